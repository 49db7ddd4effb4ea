"""What a choice changes beside time, in words."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.loading.candidate import Candidate
from speedkit_jupyter.loading.race import Race
from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.loading.ways import Ways
from speedkit_jupyter.measure.rounds.budget import advice

# What looks faster by less than this is not worth a longer search.
WORTH_KNOWING = 1.03


def remarks(chosen: Candidate, own: Candidate, ways: Ways) -> Iterator[str]:
    """What else is different with the choice."""
    settings = chosen.settings
    if chosen is own:
        return
    if settings.kept:
        where = "main memory" if settings.kept == "memory" else settings.kept
        yield (
            f"samples are decoded once and kept in {where}: {ways.kept_bytes / 2**20:,.3g} MiB "
            "once all were drawn; the first epoch takes as long as before"
        )
    if settings.num_workers != own.settings.num_workers and ways.samples.is_random:
        yield (
            "random numbers that the data set draws are each worker's own: as random as before, "
            "and the same again for the same seed and number of workers, but other ones"
        )
    if settings.num_workers and settings.persistent_workers and not own.settings.persistent_workers:
        yield (
            "the rebuilt loader's workers stay between epochs, and start anew where the data set "
            "was changed; those of the plain code start for each epoch"
        )
    if settings.copied_to:
        yield (
            f"batches are on their way to {settings.copied_to} when the loop gets them, from "
            "pinned memory, and nobody waits for the copy (non_blocking=True)"
        )
    if settings.whole_batches:
        yield "its sampler gives whole batches: loader.batch_sampler is None"
    if not settings.in_order:
        yield "batches come in the order in which they are ready"


def beside(race: Race, chosen: Candidate) -> Iterator[str]:
    """What fewer threads would bring, which is no setting of a loader."""
    found = [one for one in race.racing if one.threads is not None and one.times_s]
    best = min(found, key=lambda one: one.batch_s(race.epoch), default=None)
    ratio = None if best is None else race.ratio(best, chosen)
    if best is not None and ratio is not None and ratio.low > 1:
        yield (
            f"with {best.words} ({best.threads} for torch) it would be {ratio.median:.2f} times as "
            f"fast as the choice: DataLoader(…, {_said(best.settings)}) and "
            f"torch.set_num_threads({best.threads}), or %speedkit apply with threads {best.threads}"
        )


def unproven(race: Race, chosen: Candidate, budget_s: float) -> Iterator[str]:
    """What looked faster than the user's own, and how to know."""
    best = race.best()
    ratio = None if best is chosen else race.ratio(best)
    if ratio is not None and ratio.median >= WORTH_KNOWING:
        more = advice(0.0, "may settle it", "settling it", budget_s)
        yield f"not proven: {best.words}, which looked {ratio.median:.2f} times as fast; {more}"


def _said(settings: Settings) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in settings.arguments().items())
