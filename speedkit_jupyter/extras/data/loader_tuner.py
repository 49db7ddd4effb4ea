"""Times a loader's other ways to load with the user's own step, then everything is put back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import loader_samples as samples
from speedkit_jupyter.extras.data.loader_race import GAIN, LoaderCandidate, LoaderRace
from speedkit_jupyter.extras.data.loader_samples import Samples, why_no_workers
from speedkit_jupyter.extras.data.loader_settings import (
    PREFETCH_FACTORS,
    WORKERS,
    LoaderSettings,
    is_iterable,
    length,
    rebuilt,
    source,
    takes_whole_batches,
)
from speedkit_jupyter.extras.data.loader_steps import LoaderTimer
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.rounds.budget import LONGER, Budget
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.rounds.timeit_run import device_of
from speedkit_jupyter.step.over_batches import arguments_of, loop
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import arguments, units
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.torchglue.interrupts import interruptible

DEFAULT_S = 20.0
# The share of the budget that is kept for variations of the best of the first race, and then for
# the proof: the fastest beside the user's own alone.
NEAR, PROOF = 0.65, 0.35


@dataclass(repr=False)
class LoaderTuning(Shown):
    """`loader` is the one that was rebuilt, with the user's own settings where nothing was proven
    faster. `epoch` is its length in batches. `declined` says what was not tried, and why; `remarks`
    what the choice changes beside time; `source` is what to write for it. `against` is the
    step that it was measured with, `name` the user's word for the loader.
    """

    REPORTS = f"{__package__}.report"

    loader: DataLoader[Any]
    race: LoaderRace
    chosen: LoaderCandidate
    epoch: int
    name: str
    against: str
    declined: dict[str, str]
    remarks: list[str]
    source: str
    environment: Mapping[str, str]
    command: str

    @property
    def is_changed(self) -> bool:
        return self.chosen is not self.race.own

    @property
    def ratio(self) -> Ratio | None:
        return self.race.ratio(self.chosen) if self.is_changed else None

    def rows(self) -> list[dict[str, Any]]:
        ratios = map(self.race.ratio, self.race.candidates)
        return [
            {
                "settings": one.settings.words,
                "batch_s": one.batch_s if one.times_s else None,
                "waiting": one.waiting if one.times_s else None,
                "ratio": ratio and ratio.median,
                "low": ratio and ratio.low,
                "high": ratio and ratio.high,
                "rounds": len(one.times_s),
                "chosen": one is self.chosen,
                "note": one.failure or one.why_out,
            }
            for one, ratio in zip(self.race.candidates, ratios, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        plain = ("against", "epoch", "declined", "remarks", "source", "environment", "command")
        return {"loader": self.name, "rows": self.rows(), **{n: getattr(self, n) for n in plain}}


class LoaderTuner:
    """Drain `run()`, then read `result()`.

    `step` goes through `loader`, which its user calls `name`, and is measured for `budget_s`
    seconds in all; `against` is the step's name. Whatever happens, models, optimizers, random
    generators and names end as they began, and no worker is left. Raises StepError where the step
    can't be measured, or never goes through the loader.
    """

    def __init__(
        self,
        step: Step,
        loader: DataLoader[Any],
        budget_s: float | None = None,
        name: str = "loader",
        against: str = "",
        command: str = "",
    ) -> None:
        self._step, self._loader, self._device = step, loader, device_of(step)
        self._budget_s = arguments.seconds("budget_s", budget_s) or DEFAULT_S
        self._name, self._against, self._command = name, against, command
        self._result: LoaderTuning | None = None

    def result(self) -> LoaderTuning:
        if self._result is None:
            raise StepError("nothing was measured yet")
        return self._result

    def has_results(self) -> bool:
        return self._result is not None

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yields after every block. What the step changed is put back at the end."""
        budget = Budget(self._budget_s)
        with self._step.guarded() as guard:
            budget.reserved_s = guard.taking_s
            state, budget_s = guard.state, self._budget_s
            timed = LoaderTimer(self._step, self._loader, self._device, budget_s, state.restore)
            race = LoaderRace([LoaderCandidate(LoaderSettings.of(self._loader))], timed.block)
            try:
                yield from self._race(race, timed, budget)
            finally:
                for one in race.candidates:
                    one.close()

    def _race(
        self, race: LoaderRace, timed: LoaderTimer, budget: Budget
    ) -> Generator[Progress, None, None]:
        """First what differs most, then variations of the best, then the fastest alone."""
        yield Progress(0.0, "a look at the samples")
        seen = samples.look_at(self._loader)
        timed.restore()
        yield Progress(budget.share, "first batches")
        timed.begin(race.own)
        ways, declined = first_ways(self._loader, seen, Hardware.current().cpu.usable_cores)

        def outcome(chosen: LoaderCandidate) -> LoaderTuning:
            loader: Any = rebuilt(self._loader, chosen.settings)
            tuning = loader.tuning = LoaderTuning(
                loader, race, chosen, timed.epoch, self._name, self._against, declined,
                [*_remarks(race, chosen, seen)], source(self._loader, chosen.settings, self._name),
                environment(self._device), self._command,
            )  # fmt: skip
            return tuning

        race.admit(ways, timed.enter)
        self._result = outcome(race.own)
        yield from _rounds(race, budget, NEAR * self._budget_s)
        best = race.worth_variations().settings
        race.admit(variations(best, self._device.type == "cuda"), timed.enter)
        yield from _rounds(race, budget, PROOF * self._budget_s)
        yield Progress(budget.share, "the same samples in the same order?")
        while (rival := race.rival()) is not None and (
            why := samples.difference(self._loader, rival.settings, timed.restore)
        ):
            rival.leave(why)
        race.narrow(rival)
        yield from _rounds(race, budget, 0.0)
        self._result = outcome(race.proven())


def first_ways(
    loader: DataLoader[Any], seen: Samples, cores: int
) -> tuple[list[LoaderSettings], dict[str, str]]:
    """Return settings that differ most: whole batches, other numbers of workers. The second result
    says what is not tried, and why.
    """
    own, declined, numbers = LoaderSettings.of(loader), dict[str, str](), list[int]()
    found = [own.with_workers(0)]
    if takes_whole_batches(loader):
        found.insert(0, replace(found[0], whole_batches=True))
    why = why_no_workers(loader, seen)
    if why and not own.num_workers:
        declined["workers"] = why
    elif is_iterable(loader):
        others = "2 workers or more" if own.num_workers < 2 else "other numbers of workers"
        declined[others] = "an iterable data set gives other batches, or another order"
        numbers = [max(own.num_workers, 1)]
    else:
        numbers = [one for one in WORKERS if one <= min(cores, length(loader) or cores)]
    found += map(own.with_workers, numbers)
    return [one for one in found if one != own], declined


def variations(best: LoaderSettings, on_cuda: bool) -> Iterator[LoaderSettings]:
    if best.num_workers:
        factors = [factor for factor in PREFETCH_FACTORS if factor != best.prefetch_factor]
        yield from (replace(best, prefetch_factor=factor) for factor in factors)
    if on_cuda and not best.pin_memory:
        yield replace(best, pin_memory=True)


def _rounds(race: LoaderRace, budget: Budget, reserved_s: float) -> Generator[Progress, None, None]:
    """Measure rounds until it is settled, or the time is over."""

    def racing() -> list[LoaderCandidate]:
        is_open = (len(race.racing) > 1 or not race.rounds) and not race.is_settled()
        return race.racing if is_open else []

    least = 0 if race.rounds else 1
    for order in ShuffledRounds(racing, lambda: budget.room_s - reserved_s, least=least):
        for one in race.round(order):
            yield Progress(budget.share, f"round {race.rounds + 1}: {one.settings.words}")


def _remarks(race: LoaderRace, chosen: LoaderCandidate, seen: Samples) -> Iterator[str]:
    """Give what the choice changes beside time, and what looked faster."""
    settings = chosen.settings
    if settings.num_workers != race.own.settings.num_workers and seen.is_random:
        yield (
            "random numbers that the data set draws are each worker's own: as random as before, "
            "and the same again for the same seed and number of workers, but other ones"
        )
    if settings.whole_batches:
        yield "its sampler gives whole batches: loader.batch_sampler is None"
    best, ratio = race.best(), race.ratio(race.best())
    if best is not chosen and ratio is not None and ratio.median >= GAIN:
        looked = f"looked {units.ratio(ratio.median)} as fast"
        yield f"not proven: {best.settings.words}, which {looked}; {LONGER}"


@interruptible
def tune_loader(
    loader: DataLoader[Any],
    step: Callable[..., object] | None = None,
    *,
    budget_s: float | None = None,
) -> DataLoader[Any]:
    """Return the loader, rebuilt with the settings that are fastest with this step: workers,
    prefetching, pinned memory; the same samples in the same order for the same seed.

    `step` takes a batch (`step(batch)`, or `step(images, labels)` where a batch is a tuple), or
    goes through the loader itself (`step()`); without it loading alone is measured. Other settings
    are taken only where they are proven faster, else the loader that is returned has the user's
    own; its `tuning` says what was measured. `budget_s` is the total budget in seconds (20 without
    it). Raises StepError where the step can't be measured.
    Everything that it changes is put back, and no worker is left.
    """
    check_loader(loader)
    against = "" if step is None else getattr(step, "__name__", "step")
    command = f"tune_loader(loader{f', {against}' if against else ''})"
    tuner = LoaderTuner(step_over(loader, step), loader, budget_s, against=against, command=command)
    for _ in tuner.run():
        pass
    return tuner.result().loader


def check_loader(loader: Any) -> None:
    """Raise StepError for what is no DataLoader of torch's."""
    if not is_a(loader, DataLoader):
        kind = type(loader).__name__
        raise StepError(f"loader must be a torch.utils.data.DataLoader, not {kind}")


def step_over(loader: DataLoader[Any], step: Callable[..., object] | None = None) -> Step:
    """Return a loop over the loader that gives the step each batch, if it takes one."""
    if step is None:
        return Step(lambda _: loop(loader), [], others=[loader])
    measured = step_of(step)
    measured.others = [*measured.others, loader]
    if takes := arguments_of(step):
        measured.run = lambda _: loop(loader, step, takes > 1)
    return measured
