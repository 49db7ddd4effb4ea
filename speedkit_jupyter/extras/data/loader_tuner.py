"""Find and report the fastest loader settings for the user's step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data import loader_settings
from speedkit_jupyter.extras.data.loader_race import LoaderRace, LoaderTimer, LoaderWay
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.report.elements import BLANK, CodeBlock, Row, Section, Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Progress, Shown, drained, environment
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.rounds.timing import device_of
from speedkit_jupyter.step.step import Step, arguments_of, loop, step_of
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.units import between, ratio, seconds, share
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code

# Default budget in seconds for tuning a loader or a batch size. Starting workers takes time.
LOADING_BUDGET_S = 20.0
COLUMNS = ("", "settings", "a batch", "waiting", "as fast as now", INTERVAL, "")
RANDOM = (
    "random numbers that the data set draws are each worker's own: as random as before, and the "
    "same again for the same seed and number of workers, but other numbers"
)
UNDONE = "Epochs have {:,} batches. All is as before the search; no worker is left."


@dataclass(repr=False)
class LoaderTuning(Shown):
    """The result of tuning: a copy of the loader, with other settings if proven faster."""

    REPORT = f"{__name__}:loader_report"

    loader: Any  # the rebuilt DataLoader; None in its attribute `tuning`
    race: LoaderRace
    chosen: LoaderWay
    epoch: int  # batches per epoch, or per loop that ends early
    name: str
    against: str  # the step's name
    declined: str  # the reason for not trying other worker counts
    remarks: list[str]
    source: str  # the line of code to write
    environment: Mapping[str, str]
    command: str

    @property
    def is_changed(self) -> bool:
        return self.chosen is not self.race.own

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "settings": one.settings.words, "batch_s": one.batch_s if one.times_s else None,
                "waiting": one.waiting if one.times_s else None, "ratio": found and found.median,
                "low": found and found.low, "high": found and found.high,
                "rounds": len(one.times_s), "chosen": one is self.chosen, "note": one.why_out,
            }
            for one, found in zip(self.race.ways, map(self.race.ratio, self.race.ways), strict=True)
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        plain = ("against", "epoch", "declined", "remarks", "source", "environment", "command")
        return {"loader": self.name, "rows": self.rows(), **{n: getattr(self, n) for n in plain}}


class LoaderTuner:
    """Tune a loader for a step that loops over it: drain `run()`, then call `result()`."""

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
        self._budget_s = arguments.seconds("budget_s", budget_s) or LOADING_BUDGET_S
        self._name, self._against, self._command = name, against, command
        self._result: Any = None

    def result(self) -> LoaderTuning:
        return self._result  # type: ignore[no-any-return]

    def has_results(self) -> bool:
        return self._result is not None

    def run(self) -> Generator[Progress, None, None]:
        """Measure, and yield progress. The state of the step is restored at the end."""
        budget = Budget(self._budget_s)
        with self._step.guarded() as guard:
            budget.reserved_s = guard.taking_s
            timer = LoaderTimer(self._step, self._loader, self._budget_s, guard.state.restore)
            race = LoaderRace([LoaderWay(LoaderSettings.of(self._loader))])
            try:
                yield from self._race(race, timer, budget)
            finally:
                for one in race.ways:
                    one.leave()
                    one.loader = None

    def _race(
        self, race: LoaderRace, timer: LoaderTimer, budget: Budget
    ) -> Generator[Progress, None, None]:
        """Time all settings. Choose the fastest that is proven and gives the same batches."""
        yield Progress(0.0, "a look at the samples")
        seen = loader_settings.look_at(self._loader)
        timer.restore()
        yield Progress(budget.share, "first batches")
        timer.begin(race.own)
        cores, pin = Hardware.current().cpu.usable_cores, self._device.type not in ("cpu", "mps")
        ways, declined = loader_settings.candidates(self._loader, seen, cores, pin)

        def outcome(chosen: LoaderWay) -> LoaderTuning:
            loader: Any = loader_settings.rebuilt(self._loader, chosen.settings)
            line = loader_settings.source(self._loader, chosen.settings, self._name)
            has_others = chosen.settings.num_workers != race.own.settings.num_workers
            tuning = LoaderTuning(
                loader, race, chosen, timer.epoch, self._name, self._against, declined,
                [RANDOM] * (has_others and seen.is_random), line, environment(self._device),
                self._command,
            )  # fmt: skip
            loader.tuning = replace(tuning, loader=None)  # a cycle would keep its workers alive
            return tuning

        race.admit(ways, timer.enter)
        self._result = outcome(race.own)
        racing = race.racing
        for order in ShuffledRounds(racing, lambda: budget.room_s):
            for one in race.round(order, timer.block):
                yield Progress(budget.share, f"round {race.rounds + 1}: {one.settings.words}")
            racing[:] = race.racing
            if len(racing) == 1 or race.is_settled():
                break
        yield Progress(budget.share, "the same samples in the same order?")
        while (best := race.proven()) is not race.own and (
            why := loader_settings.difference(self._loader, best.settings, timer.restore)
        ):
            best.leave(why)
        self._result = outcome(race.proven())


@interruptible_in_users_code
def tune_loader(
    loader: DataLoader[Any],
    step: Callable[..., object] | None = None,
    *,
    budget_s: float | None = None,
) -> DataLoader[Any]:
    """Return the loader, rebuilt with the fastest settings for this step.

    It tries worker counts, pinned memory, and whole batches of a TensorDataset. For the same seed,
    samples keep their order, but a data set may draw other random numbers. All state is restored.

    Args:
        loader: a torch DataLoader, or a subclass.
        step: a function of a batch (`step(batch)`, or `step(images, labels)` for a tuple), or a
            function that loops over the loader (`step()`). Without a step, loading alone is timed.
        budget_s: seconds for everything (default: 20).

    Returns:
        A copy of the loader. Its settings change only if others are proven faster. Its attribute
        `tuning` has the measurements.

    Raises:
        StepError: an argument is invalid, or the step can't be measured or never uses the loader.

    Example::

        loader = tune_loader(loader, train_on_batch)
    """
    check_loader(loader)
    against = "" if step is None else getattr(step, "__name__", "step")
    command = f"tune_loader(loader{f', {against}' if against else ''})"
    tuner = LoaderTuner(step_over(loader, step), loader, budget_s, against=against, command=command)
    return drained(tuner).loader  # type: ignore[no-any-return]


def check_loader(loader: Any) -> None:
    if not is_a(loader, DataLoader):
        kind = type(loader).__name__
        raise StepError(f"loader must be a torch.utils.data.DataLoader, not {kind}")


def step_over(loader: DataLoader[Any], step: Callable[..., object] | None = None) -> Step:
    """Return a step that loops over the loader. `step` takes a batch, or has its own loop."""
    if step is None:
        return Step(lambda _: loop(loader), [], others=[loader])
    measured, takes = step_of(step), arguments_of(step)
    run = (lambda _: loop(loader, step, takes > 1)) if takes else measured.run
    return replace(measured, run=run, others=[*measured.others, loader])


def loader_report(tuning: LoaderTuning) -> Document:
    rows = [_loader_row(tuning, one) for one in tuning.race.ways]
    content: list[Any] = [Table(COLUMNS, rows, COLUMNS[2:6], wraps=("settings",))]
    notes = [*tuning.remarks, UNDONE.format(tuning.epoch)]
    if tuning.is_changed:
        content.append(CodeBlock(tuning.source))
        notes.insert(0, "In your own line … is as it is. `-v NAME` gives you the rebuilt loader.")
    if tuning.declined:
        content.append(f"Other workers are not tried: {tuning.declined}.")
    content.append(Section("\n".join(notes), folded=True))
    step = f"with `{tuning.against}`" if tuning.against else "loading alone"
    if tuning.is_changed and (found := tuning.race.ratio(tuning.chosen)):
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
    notes = ["taken"] * chosen + [one.why_out or "as it is" * own]
    cells = (
        "→" if chosen else "", one.settings.words, seconds(one.batch_s) if one.times_s else BLANK,
        share(one.waiting) if one.times_s else BLANK, ratio(found.median) if found else "",
        between(found.low, found.high) if found else "", ", ".join(filter(None, notes)),
    )  # fmt: skip
    return Row(cells, "good" if chosen and not own else "plain")
