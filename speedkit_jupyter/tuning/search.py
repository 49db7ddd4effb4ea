"""The search: the strongest combination and what is near it race; what wins has to prove itself.

A race chooses and proves nothing: what falls behind leaves it after few rounds. Then what compiling
adds. What is chosen is confirmed against baseline in fresh rounds, together with what each of its
parts is worth, so that the figure that is reported did not win by luck and no part stays in the
plan for nothing. A plan that was learned for this very step earlier is only confirmed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Generator
from contextlib import ExitStack

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.budget import few_digits
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import hidden
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.tuning import attention, gemm_engines, other_models
from speedkit_jupyter.tuning.allowance import Allowance
from speedkit_jupyter.tuning.candidates import (
    Candidate,
    candidates,
    combinations,
    distance,
    joined,
    strongest,
)
from speedkit_jupyter.tuning.outcome import Tuning
from speedkit_jupyter.tuning.proof import Proof
from speedkit_jupyter.tuning.recalled import Recalled
from speedkit_jupyter.tuning.stages import BASELINE, Stages

# Shares of the budget that the races may take; most end earlier. The proof may take the rest.
RACE, NEAR, COMPILED = 0.35, 0.15, 0.2
# Compiling is not tried for less than so many seconds of budget, or of all the user's steps.
COMPILE_S = 20.0


class Search:
    """Drain `run()`, then read `result()`; closing the generator keeps the best plan so far.

    `budget_s` are the seconds for all of it but compiling; None is enough for a clear answer.
    `objective` is `time` or `memory`, which may take `within` times the time; with `steps` it is
    the total time of so many steps, what comes before the first one included. `fresh` searches
    although a plan is known; the optimizations in `keep` stay as they are. Where the user names an
    `accuracy`, what makes another model is tried in the end, and chosen where it is accepted. The
    budget begins when it runs, or began at `begun_s` on the clock, where that is set. Raises
    StepError.
    """

    def __init__(
        self,
        step: Step,
        budget_s: float | None = None,
        steps: int | None = None,
        objective: str = "time",
        fresh: bool = False,
        keep: Collection[str] = (),
        accuracy: NamedAccuracy | None = None,
        within: float | None = None,
    ) -> None:
        if not isinstance(objective, str) or objective not in ("time", "memory"):
            raise StepError(f"the objective is time or memory, not {objective!r:.100}")
        if within is not None and objective != "memory":
            raise StepError("within belongs to the objective memory: how much slower it may get")
        if within is not None and not 1 <= within < math.inf:
            raise StepError(f"within must be 1 or more, as in 1.2, not {within:g}")
        if steps is not None and steps < 1:
            raise StepError(f"steps must be 1 or more, not {steps}")
        if not step.models:
            raise StepError(step.why_no_model("tune"))
        Benchmark(step, [Variant("baseline")], budget_s)  # raises for what can't be measured
        self.step, self._accuracy = step, accuracy
        if accuracy is not None:
            accuracy.bound(step.models)  # raises for what can't be called
        with ExitStack() as stack:
            for model in step.models:
                stack.enter_context(hidden(model))
            facts, *others = [Facts.read(model, step.holders(model)) for model in step.models]
        self._tuning = Tuning(step, Hardware.current(), facts, objective, within, steps)
        self._tuning.facts_of_others = tuple(others)
        self._tuning.kept = _known(keep)
        self.begun_s: float | None = None
        self._allowance = Allowance(budget_s)
        self._stages = Stages(step, self._tuning, self._allowance)
        self._recalled = Recalled(step, self._tuning, self._allowance, fresh)

    @property
    def budget_s(self) -> float:
        """Seconds for all of it but compiling; known for good once one step was looked at."""
        return self._allowance.budget.seconds

    def result(self) -> Tuning:
        """What is known so far; a winner that was not confirmed says so."""
        return self._tuning

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return self._allowance.step_s > 0

    def recall(self) -> Tuning:
        """The result with the plan that was learned for this step, if one was; not yet checked.

        Runs one step or two, which are undone. Raises what the step raises.
        """
        __tracebackhide__ = True
        self._recalled.look_up()
        return self._tuning

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        __tracebackhide__ = True
        start = time.perf_counter()
        self._allowance.begin(self.begun_s)
        budget = self._allowance.budget
        tuning = self._tuning
        yield Progress(0.0, "looking at one step")
        has_ended = False
        try:
            winner = self.recall().winner
            yield Progress(budget.share, self._ahead())
            if winner.values:
                yield from self._recalled.check(winner, self._stages)
            if not tuning.confirmed:
                yield from self._search()
            if self._accuracy is not None:
                yield from other_models.choose(self._stages, self._accuracy)
            has_ended = True
        finally:
            if not has_ended and tuning.record is None:
                tuning.winner, tuning.unclear = BASELINE, self._stages.so_far()
            tuning.seconds = time.perf_counter() - start
            self.step.kept.clear()
            self._recalled.taken_calls()

    def _ahead(self) -> str:
        """How long it will take, and whether that is enough."""
        step_s = self._allowance.step_s
        text = f"one step takes {step_s:.2g} s: about {self.budget_s:.0f} s"
        text += " and what compiling takes"
        is_short = self.budget_s < self._allowance.enough_s / 2
        return f"{text}; {self._allowance.more()}" if is_short else text

    def _search(self) -> Generator[Progress, None, None]:
        __tracebackhide__ = True
        tuning, stages = self._tuning, self._stages
        yield from gemm_engines.measure(tuning, self._allowance.budget)
        yield from attention.measure(
            tuning, self._allowance.budget, self._recalled.taken_calls(), self.step.models
        )
        singles = candidates(
            tuning.hardware,
            tuning.facts,
            tuning.kept,
            tuning.facts_of_others,
            tuning.objective,
        )
        best = yield from self._best_of(singles)
        losers = [] if best.values or tuning.objective == "memory" else stages.narrow_losers()
        if losers:  # a race of few rounds is no proof that nothing helps
            best = yield from Proof(stages).look_again(losers)
        if best.values:
            tuning.unclear = ""
            yield from Proof(stages).confirm(best, "confirming")
        else:
            tuning.winner, tuning.comparison = BASELINE, None
        yield from self._try_what_was_left_out()
        stages.say_what_was_left_out()
        if not tuning.helped and singles:
            tuning.unclear = tuning.unclear or stages.why_unclear()
        self._recalled.keep()

    def _try_what_was_left_out(self) -> Generator[Progress, None, None]:
        """Where a long step left time for the strongest combination only, and that did not help."""
        __tracebackhide__ = True
        tuning, stages = self._tuning, self._stages
        while not tuning.confirmed and (rest := stages.left_out()):
            best = yield from stages.race("what was left out", rest, RACE)
            if best.values:
                tuning.unclear = ""
                yield from Proof(stages).confirm(best, "confirming")
            elif len(stages.left_out()) == len(rest):  # no time for any of it
                tuning.winner, tuning.comparison = BASELINE, None
                return

    def _best_of(self, singles: list[Candidate]) -> Generator[Progress, None, Candidate]:
        """What leads once everything that there is time for has raced; it proves nothing yet."""
        __tracebackhide__ = True
        stages, cheap = self._stages, [single for single in singles if not single.costly]
        costly, start = [single for single in singles if single.costly], strongest(cheap)
        # The strongest with and without compiling, then its parts are taken out one by one.
        every = combinations(cheap, start)
        compiled = [joined(start, single) for single in costly[:1]]
        compiled = [plan for plan in compiled if self._can_pay(plan)]
        every = [*every[:1], *compiled, *every[1:]]
        best = yield from stages.race("what the machine suggests", every, RACE)
        for _ in range(len(cheap) if not best.costly else 0):
            near = [plan for plan in combinations(cheap, best) if distance(plan, best) == 1]
            better = yield from stages.race("what is near it", stages.new(near), NEAR, best)
            if better.name == best.name:
                break
            best = better
        compiled = stages.new([joined(best, single) for single in costly])
        compiled = [plan for plan in compiled if self._can_pay(plan)]
        best = yield from stages.race("compiled", compiled, COMPILED, best)
        no_race = not stages.has_raced and self._allowance.budget.allows(self._allowance.step_s)
        return start if no_race and not best.values else best  # the strongest alone

    def _can_pay(self, plan: Candidate) -> bool:
        """Whether such a budget, and so many steps, can pay for compiling at all."""
        steps, step_s = self._tuning.steps, self._allowance.step_s
        why = ""
        if steps is not None and steps * step_s <= COMPILE_S:
            why = f"{steps} steps take {steps * step_s:.1f} s, compiling alone takes longer"
        elif self.budget_s < COMPILE_S:
            short = f"{few_digits(self.budget_s)} s are less than what compiling takes"
            why = f"{short}: --budget 30 tries it"
        if why:
            self._stages.refuse(plan.name, why)
        return not why


def _known(keep: Collection[str]) -> tuple[str, ...]:
    """The names in the catalog's order; raises StepError for others."""
    names = [entry.name for entry in CATALOG]
    for name in keep:
        if name not in names:
            raise StepError(f"keep: there is no optimization {name!r:.100}: {', '.join(names)}")
    return tuple(name for name in names if name in keep)
