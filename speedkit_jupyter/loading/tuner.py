"""Times a loader's other ways to load with the user's own step, then everything is put back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading import order, samples
from speedkit_jupyter.loading.candidate import LONG_EPOCH, Candidate
from speedkit_jupyter.loading.loader_tuning import LoaderTuning
from speedkit_jupyter.loading.obstacles import drawing, is_iterable, length, why_not_sent
from speedkit_jupyter.loading.race import Race
from speedkit_jupyter.loading.remarks import beside, remarks, unproven
from speedkit_jupyter.loading.samples import Samples
from speedkit_jupyter.loading.settings import Settings
from speedkit_jupyter.loading.source import source
from speedkit_jupyter.loading.timed import Timed
from speedkit_jupyter.loading.tuned_loader import rebuilt
from speedkit_jupyter.loading.ways import Ways
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.environment import environment
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.support.arguments import seconds
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from speedkit_jupyter.loading.tuned_loader import TunedLoader

DEFAULT_S = 20.0
# What is left of the budget for what is near the best of the first race, and then for the proof:
# the quickest beside the user's own, with no others.
NEAR, PROOF = 0.65, 0.35


class LoaderTuner:
    """Drain `run()`, then read `result()`.

    `step` goes through `loader` in a loop, and is measured for `budget_s` seconds in all. Whatever
    happens, models, optimizers, random generators and names end as they began, and no worker is
    left. Raises StepError where the step can't be measured, or never goes through the loader.
    """

    def __init__(
        self,
        step: Step,
        loader: DataLoader[Any],
        device: torch.device,
        budget_s: float | None = None,
        *,
        keep: bool = True,
        any_order: bool = False,
        name: str = "loader",
        against: str = "",
        command: str = "",
    ) -> None:
        self.step, self._loader, self._device = step, loader, device
        self.budget_s = seconds("budget_s", budget_s) or DEFAULT_S
        self.begun_s: float | None = None
        self._allowed = keep, any_order
        self._name, self._against, self._command = name, against, command
        self._result: LoaderTuning | None = None

    def result(self) -> LoaderTuning:
        """What is known so far."""
        if self._result is None:
            raise StepError("nothing was measured yet")
        return self._result

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return self._result is not None

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yields after every stretch. What the step changed is put back at the end."""
        __tracebackhide__ = True
        budget = Budget(self.budget_s, begun_s=self.begun_s)
        with self.step.isolated() as visit:
            budget.reserved_s = visit.taking_s
            timed = Timed(self.step, self._loader, self._device, self.budget_s, visit.state.restore)
            own = Candidate(Settings.of(self._loader))
            race = Race([own], timed.block, length(self._loader) or LONG_EPOCH)
            try:
                with timed.installed():
                    yield Progress(0.0, "a look at the samples")
                    seen = self._look(visit.state.restore)
                    yield Progress(budget.share, "first batches")
                    timed.begin(own)
                    yield from self._race(race, timed, seen, budget)
            finally:
                for one in race.candidates:
                    one.close()

    def _race(
        self, race: Race, timed: Timed, seen: Samples, budget: Budget
    ) -> Generator[Progress, None, None]:
        """First what differs most, then what is near the best of that, then the quickest alone."""
        __tracebackhide__ = True
        own = race.candidates[0]
        race.epoch = timed.epoch(own) or race.epoch
        state, ways = self.step.state(), self._ways(seen)
        _admit(race, map(Candidate, list(ways.first())[1:]), timed, seen)
        self._result = self._outcome(race, own, ways, seen)
        yield from _rounds(race, timed, budget, NEAR * self.budget_s)
        _admit(race, list(_near(race, ways)), timed, seen)
        yield from _rounds(race, timed, budget, PROOF * self.budget_s)
        yield Progress(budget.share, "the same samples in the same order?")
        self._drop_what_differs(race, ways, seen, state)
        race.narrow()
        yield from _rounds(race, timed, budget, 0.0)
        chosen = _proven(race)
        self._result = self._outcome(race, chosen, ways, seen)

    def _ways(self, seen: Samples) -> Ways:
        cores = Hardware.current().cpu.usable_cores
        keep, any_order = self._allowed
        return Ways(self._loader, seen, cores, self._device, length(self._loader), keep, any_order)

    def _look(self, settle: Callable[[], object]) -> Samples:
        if is_iterable(self._loader):
            return Samples()
        try:
            seen = samples.look_at(self._loader, Walk(drawing(self._loader)))
        except StopIteration:  # would look like the end of a generator of ours
            raise StepError("the data set raises StopIteration for a sample") from None
        if seen.keys:
            few = seen.keys[: self._loader.batch_size or 1]
            seen = replace(seen, why_not_sent=why_not_sent(self._loader, few))
        settle()
        return seen

    def _drop_what_differs(self, race: Race, ways: Ways, seen: Samples, state: State) -> None:
        """Until the quickest of the others give the same samples in the same order."""
        same: set[Candidate] = set()
        while not ways.any_order:
            rivals = [one for one in race.finalists() if one not in same]
            if not rivals:
                return
            for one in rivals:
                one.why_out = order.difference(
                    self._loader, one.settings, seen.is_random, state.restore
                )
                if one.why_out:
                    one.close()
                else:
                    same.add(one)

    def _outcome(self, race: Race, chosen: Candidate, ways: Ways, seen: Samples) -> LoaderTuning:
        loader: TunedLoader = rebuilt(self._loader, chosen.settings)  # type: ignore[assignment]
        loader.tuning = LoaderTuning(
            loader=loader,
            race=race,
            chosen=chosen,
            samples=seen,
            name=self._name,
            against=self._against,
            declined=ways.declined,
            remarks=[
                *remarks(chosen, race.candidates[0], ways),
                *beside(race, chosen),
                *unproven(race, chosen, self.budget_s),
            ],
            source=source(self._loader, chosen.settings, self._name),
            environment=environment(self._device),
            command=self._command,
        )
        return loader.tuning


def _proven(race: Race) -> Candidate:
    """The quickest, where that is proven faster than the user's own."""
    own, best = race.candidates[0], race.best()
    ratio = None if best is own else race.ratio(best)
    return own if ratio is None or ratio.low <= 1 else best


def _admit(race: Race, more: Iterable[Candidate], timed: Timed, seen: Samples) -> None:
    """Others enter the race, on equal terms with those that are in it. Where workers are stuck,
    more of them would be too: each would be waited for as long.
    """
    __tracebackhide__ = True
    for one in more:
        stuck = next((other for other in race.candidates if other.is_stuck), None)
        race.candidates.append(one)
        if stuck is not None and one.settings.num_workers:
            one.why_out = f"not tried: {stuck.words} {stuck.why_out}"
            continue
        try:
            timed.enter(one, seen)
        except Exception as error:
            one.fail(error)


def _rounds(
    race: Race, timed: Timed, budget: Budget, reserved_s: float
) -> Generator[Progress, None, None]:
    """Until it is settled, or the time is over."""
    __tracebackhide__ = True
    longest_s = 0.0
    while len(race.racing) > 1 and not race.is_settled():
        begun_s = clock.now()
        if race.rounds and not budget.allows(longest_s + reserved_s):
            return
        timed.settle()
        for one in race.round():
            yield Progress(budget.share, f"round {race.rounds + 1}: {one.words}")
        _know_epoch(race, timed)
        longest_s = clock.now() - begun_s


def _know_epoch(race: Race, timed: Timed) -> None:
    """What was timed before it was seen that each batch begins an epoch does not count."""
    epoch = timed.epoch(race.candidates[0]) or race.epoch
    if (epoch == 1) != (race.epoch == 1):
        for one in race.candidates:
            one.forget()
    race.epoch = epoch


def _near(race: Race, ways: Ways) -> Generator[Candidate, None, None]:
    """What is like the best ones; and the best two numbers of workers with cores left to them."""
    for one in race.promising():
        yield from map(Candidate, ways.near(one.settings))
    for one in race.with_workers()[:2]:
        threads = ways.threads_beside(one.settings)
        if threads is not None:
            yield Candidate(one.settings, threads)
