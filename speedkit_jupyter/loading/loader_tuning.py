"""The result: each way to load, what it takes, and which one was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.race import Candidate, Race
from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.measure.results.statistics import Ratio
from speedkit_jupyter.measure.rounds.budget import LONGER

if TYPE_CHECKING:
    from speedkit_jupyter.loading.samples import Samples
    from speedkit_jupyter.loading.tuned_loader import TunedLoader
    from speedkit_jupyter.loading.ways import Ways

# What looks faster by less than this is not worth a longer search.
WORTH_KNOWING = 1.03


@dataclass(repr=False)
class LoaderTuning(Shown):
    """`loader` is the one that was rebuilt, with the user's own settings where nothing was proven
    faster. `epoch` is its length in batches. `declined` says what was not tried, and why; `remarks`
    what the choice changes beside time; `source` makes the same in plain torch. `against` is the
    step that it was measured with, `name` the user's word for the loader.
    """

    loader: TunedLoader
    race: Race
    chosen: Candidate
    samples: Samples
    epoch: int = 0
    name: str = "loader"
    against: str = ""
    declined: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    source: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def own(self) -> Candidate:
        """The loader as its user made it."""
        return self.race.own

    @property
    def is_changed(self) -> bool:
        """Whether another one was proven faster."""
        return self.chosen is not self.own

    @property
    def ratio(self) -> Ratio | None:
        """How many times as fast the choice is."""
        return self.race.ratio(self.chosen) if self.is_changed else None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each way to load."""
        return [self._row(one) for one in self.race.candidates]

    def _row(self, one: Candidate) -> dict[str, Any]:
        ratio = self.race.ratio(one)
        return {
            "settings": one.words,
            "batch_s": one.batch_s if one.times_s else None,
            "waiting": one.waiting if one.times_s else None,
            "ratio": None if ratio is None else ratio.median,
            "low": None if ratio is None else ratio.low,
            "high": None if ratio is None else ratio.high,
            "rounds": len(one.times_s),
            "chosen": one is self.chosen,
            "note": one.failure or one.why_out,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        plain = ("against", "epoch", "declined", "remarks", "source", "environment", "command")
        return {"loader": self.name, "rows": self.rows(), **{n: getattr(self, n) for n in plain}}


def remarks(race: Race, chosen: Candidate, ways: Ways) -> Iterator[str]:
    """Give what the choice changes beside time; and what looked faster, and how to know."""
    settings, own = chosen.settings, race.own.settings
    if settings.kept:
        yield (
            "samples are decoded once and kept in main memory: "
            f"{ways.kept_bytes / 2**20:,.3g} MiB once all were drawn; the first epoch takes as "
            "long as before"
        )
    if settings.num_workers != own.num_workers and ways.samples.is_random:
        yield (
            "random numbers that the data set draws are each worker's own: as random as before, "
            "and the same again for the same seed and number of workers, but other ones"
        )
    if settings.num_workers and settings.persistent_workers and not own.persistent_workers:
        yield (
            "the rebuilt loader's workers stay between epochs, and start anew where the data set "
            "was changed; those of the plain code start for each epoch"
        )
    if settings.whole_batches:
        yield "its sampler gives whole batches: loader.batch_sampler is None"
    best = race.best()
    ratio = None if best is chosen else race.ratio(best)
    if ratio is not None and ratio.median >= WORTH_KNOWING:
        yield f"not proven: {best.words}, which looked {ratio.median:.2f} times as fast; {LONGER}"
