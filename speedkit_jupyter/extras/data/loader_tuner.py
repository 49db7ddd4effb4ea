"""Finds the fastest settings of a loader with the user's own step, then everything is put back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import loader_samples as samples
from speedkit_jupyter.extras.data.loader_race import GAIN, LoaderRace, LoaderTimer, LoaderWay
from speedkit_jupyter.extras.data.loader_samples import Samples, why_no_workers
from speedkit_jupyter.extras.data.loader_settings import (
    LoaderSettings,
    is_iterable,
    length,
    rebuilt,
    source,
    takes_whole_batches,
)
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, CodeBlock, Row, Section, Table
from speedkit_jupyter.rounds.budget import LONGER, Budget
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.rounds.presentable import Shown, report_of
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds
from speedkit_jupyter.rounds.statistics import INTERVAL, Ratio
from speedkit_jupyter.rounds.timeit_run import device_of
from speedkit_jupyter.step.over_batches import arguments_of, loop
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.units import between, ratio, seconds, share
from speedkit_jupyter.torchglue.interrupts import interruptible

# Seconds of a search for settings, of a loader or a batch size: workers alone take one to start.
DEFAULT_S = 20.0
# Shares of the budget that are kept for variations of the best way, and then for the proof.
NEAR, PROOF = 0.65, 0.35
# Numbers of workers that are tried, up to the usable cores; torch's own prefetch factor is 2.
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PREFETCH_FACTORS = (4, 8)
COLUMNS = ("", "settings", "a batch", "waiting", "as fast as now", INTERVAL, "")
TAKE = "To write in its own line (… is as it is); `-v NAME` gives a variable the rebuilt loader"
UNDONE = (
    "Epochs of {:,} batches, with their starts. Model, optimizer and random state are as before "
    "the measurement; no worker is left."
)


@dataclass(repr=False)
class LoaderTuning(Shown):
    """The rebuilt `loader`, with the user's own settings if none was proven faster.

    `epoch` is its length in batches, `declined` has the reasons for settings that were not tried,
    `remarks` other changes than time, `source` the line to write. `name` is the user's name of the
    loader, `against` the name of the step.
    """

    REPORTS = __name__

    loader: DataLoader[Any]
    race: LoaderRace
    chosen: LoaderWay
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
        """Return the speed-up over the user's own settings, if others were chosen."""
        return self.race.ratio(self.chosen) if self.is_changed else None

    def rows(self) -> list[dict[str, Any]]:
        ratios = map(self.race.ratio, self.race.ways)
        return [
            {
                "settings": one.settings.words,
                "batch_s": one.batch_s if one.times_s else None,
                "waiting": one.waiting if one.times_s else None,
                "ratio": found and found.median,
                "low": found and found.low,
                "high": found and found.high,
                "rounds": len(one.times_s),
                "chosen": one is self.chosen,
                "note": one.failure or one.why_out,
            }
            for one, found in zip(self.race.ways, ratios, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        plain = ("against", "epoch", "declined", "remarks", "source", "environment", "command")
        return {"loader": self.name, "rows": self.rows(), **{n: getattr(self, n) for n in plain}}


class LoaderTuner:
    """Drain `run()`, then read `result()`.

    The `step` goes through `loader`, for `budget_s` seconds in all. Everything that it changes is
    put back. Raises StepError if the step can't be measured, or never goes through the loader.
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
        """Measure; yield after every block. The state of the step is put back at the end."""
        budget = Budget(self._budget_s)
        with self._step.guarded() as guard:
            budget.reserved_s = guard.taking_s
            timer = LoaderTimer(self._step, self._loader, self._budget_s, guard.state.restore)
            race = LoaderRace([LoaderWay(LoaderSettings.of(self._loader))], timer.block)
            try:
                yield from self._race(race, timer, budget)
            finally:
                for one in race.ways:
                    one.close()

    def _race(
        self, race: LoaderRace, timer: LoaderTimer, budget: Budget
    ) -> Generator[Progress, None, None]:
        """Race the most different ways, then variations of the best, then the fastest alone."""
        yield Progress(0.0, "a look at the samples")
        seen = samples.look_at(self._loader)
        timer.restore()
        yield Progress(budget.share, "first batches")
        timer.begin(race.own)
        ways, declined = first_ways(self._loader, seen, Hardware.current().cpu.usable_cores)

        def outcome(chosen: LoaderWay) -> LoaderTuning:
            loader: Any = rebuilt(self._loader, chosen.settings)
            tuning = loader.tuning = LoaderTuning(
                loader, race, chosen, timer.epoch, self._name, self._against, declined,
                [*_remarks(race, chosen, seen)], source(self._loader, chosen.settings, self._name),
                environment(self._device), self._command,
            )  # fmt: skip
            return tuning

        race.admit(ways, timer.enter)
        self._result = outcome(race.own)
        yield from _rounds(race, budget, NEAR * self._budget_s)
        race.admit(variations(race.best().settings, self._device.type == "cuda"), timer.enter)
        yield from _rounds(race, budget, PROOF * self._budget_s)
        yield Progress(budget.share, "the same samples in the same order?")
        while (rival := race.rival()) is not None and (
            why := samples.difference(self._loader, rival.settings, timer.restore)
        ):
            rival.leave(why)
        race.narrow(rival)
        yield from _rounds(race, budget, 0.0)
        self._result = outcome(race.proven())


def first_ways(
    loader: DataLoader[Any], seen: Samples, cores: int
) -> tuple[list[LoaderSettings], dict[str, str]]:
    """Return the most different settings (whole batches, numbers of workers), and the reasons for
    settings that are not tried.
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
    """Yield these settings with other prefetch factors, and with pinned memory on CUDA."""
    if best.num_workers:
        factors = [factor for factor in PREFETCH_FACTORS if factor != best.prefetch_factor]
        yield from (replace(best, prefetch_factor=factor) for factor in factors)
    if on_cuda and not best.pin_memory:
        yield replace(best, pin_memory=True)


def _rounds(race: LoaderRace, budget: Budget, reserved_s: float) -> Generator[Progress, None, None]:
    """Take rounds until the race is settled, or the time is over."""

    def racing() -> list[LoaderWay]:
        is_open = (len(race.racing) > 1 or not race.rounds) and not race.is_settled()
        return race.racing if is_open else []

    least = 0 if race.rounds else 1
    for order in ShuffledRounds(racing, lambda: budget.room_s - reserved_s, least=least):
        for one in race.round(order):
            yield Progress(budget.share, f"round {race.rounds + 1}: {one.settings.words}")


def _remarks(race: LoaderRace, chosen: LoaderWay, seen: Samples) -> Iterator[str]:
    """Yield changes by the choice other than time, and a way that only looked faster."""
    settings = chosen.settings
    if settings.num_workers != race.own.settings.num_workers and seen.is_random:
        yield (
            "random numbers that the data set draws are each worker's own: as random as before, "
            "and the same again for the same seed and number of workers, but other numbers"
        )
    if settings.whole_batches:
        yield "its sampler gives whole batches: loader.batch_sampler is None"
    best, found = race.best(), race.ratio(race.best())
    if best is not chosen and found is not None and found.median >= GAIN:
        looked = f"looked {ratio(found.median)} as fast"
        yield f"not proven: {best.settings.words}, which {looked}; {LONGER}"


@interruptible
def tune_loader(
    loader: DataLoader[Any],
    step: Callable[..., object] | None = None,
    *,
    budget_s: float | None = None,
) -> DataLoader[Any]:
    """Return the loader, rebuilt with the fastest settings for this step.

    Workers, prefetching and pinned memory are tried. The loader gives the same samples in the same
    order for the same seed. Everything that measuring changes is put back, and no worker is left.

    Args:
        loader: a torch DataLoader, or a subclass.
        step: a function of a batch (`step(batch)`, or `step(images, labels)` for a tuple), or a
            function that goes through the loader (`step()`); by default loading alone is timed.
        budget_s: seconds for everything (20 by default).

    Returns:
        A DataLoader of the same class. Other settings are taken only if they are proven faster; its
        `tuning` has the measurements.

    Raises:
        StepError: if the step can't be measured, or never goes through the loader.
    """
    check_loader(loader)
    against = "" if step is None else getattr(step, "__name__", "step")
    command = f"tune_loader(loader{f', {against}' if against else ''})"
    tuner = LoaderTuner(step_over(loader, step), loader, budget_s, against=against, command=command)
    for _ in tuner.run():
        pass
    return tuner.result().loader


def check_loader(loader: Any) -> None:
    """Raise StepError for any object but a torch DataLoader."""
    if not is_a(loader, DataLoader):
        kind = type(loader).__name__
        raise StepError(f"loader must be a torch.utils.data.DataLoader, not {kind}")


def step_over(loader: DataLoader[Any], step: Callable[..., object] | None = None) -> Step:
    """Return a loop over the loader as a step, which gives each batch to a function that takes it.

    A function without arguments goes through the loader itself.
    """
    if step is None:
        return Step(lambda _: loop(loader), [], others=[loader])
    measured = step_of(step)
    measured.others = [*measured.others, loader]
    if takes := arguments_of(step):
        measured.run = lambda _: loop(loader, step, takes > 1)
    return measured


@report_of.register
def loader_report(tuning: LoaderTuning) -> Document:
    """Return the choice first, then every way that was tried."""
    rows = [_loader_row(tuning, one) for one in tuning.race.ways]
    content = [
        Table(COLUMNS, rows, COLUMNS[2:6], wraps=("settings",)),
        "\n".join(tuning.remarks),
        Table(("not tried", "why"), list(tuning.declined.items())),
        Section(CodeBlock(tuning.source), TAKE) if tuning.is_changed else None,
        UNDONE.format(tuning.epoch),
    ]
    step = f"with `{tuning.against}`" if tuning.against else "loading alone"
    if found := tuning.ratio:
        headline = f"`{tuning.name}`, {tuning.chosen.settings.words}: {ratio(found.median)} as fast"
        headline += f" {step}, {INTERVAL} {between(found.low, found.high)}"
    else:
        headline = f"Leave `{tuning.name}` as it is: nothing was proven faster {step}"
        if tuning.against and tuning.race.own.times_s:
            headline += f" ({share(tuning.race.own.waiting)} of its time is waiting)"
    return Document(headline, content, tuning.to_dict())


def _loader_row(tuning: LoaderTuning, one: LoaderWay) -> Row:
    own, chosen = one is tuning.race.own, one is tuning.chosen
    found = None if own else tuning.race.ratio(one)
    notes = ["taken"] * chosen + [one.failure or one.why_out or "as it is" * own]
    cells = (
        "→" if chosen else "",
        one.settings.words,
        seconds(one.batch_s) if one.times_s else BLANK,
        share(one.waiting) if one.times_s else BLANK,
        ratio(found.median) if found else "",
        between(found.low, found.high) if found else "",
        ", ".join(filter(None, notes)),
    )
    return Row(cells, "bad" if one.failure else "good" if chosen and not own else "plain")
