"""The search: the strongest combination and what is near it race; what wins has to prove itself.

A race chooses and proves nothing: what falls behind leaves it after few rounds. Then what compiling
adds. What is chosen is confirmed against baseline in fresh rounds, together with what each of its
parts is worth, so that the figure that is reported did not win by luck and no part stays in the
plan for nothing. A plan that was learned for this very step earlier is only confirmed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
from contextlib import ExitStack
from dataclasses import replace

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.checks.attention_calls import Seen
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.budget import few_digits
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.attention.timings import Call, Measured
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import hidden
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.tuning import engines, learning, other_models, tasks
from speedkit_jupyter.tuning.allowance import Allowance
from speedkit_jupyter.tuning.attention import keep, timed
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
from speedkit_jupyter.tuning.stages import BASELINE, Stages
from speedkit_jupyter.tuning.tasks import Task

# Shares of the budget that the races may take; most end earlier. The proof may take the rest.
RACE, NEAR, COMPILED = 0.35, 0.15, 0.2
# Compiling is not tried for less than so many seconds of budget, or of all the user's steps.
COMPILE_S = 20.0
# Its share of the budget is what measuring attention kernels may take.
ATTENTION = 0.1


class Search:
    """Drain `run()`, then read `result()`; closing the generator keeps the best plan so far.

    `budget_s` are the seconds for all of it but compiling; None is enough for a clear answer.
    `objective` is `time` or `memory`; with `steps` it is the total time of so many steps, what
    comes before the first one included. `fresh` searches although a plan is known; the
    optimizations in `keep` stay as they are. Where the user names an `accuracy`, what makes another
    model is tried in the end, and chosen where it is accepted. The budget
    begins when it runs, or began at `begun_s` on the clock, where that is set. Raises StepError.
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
    ) -> None:
        if not isinstance(objective, str) or objective not in ("time", "memory"):
            raise StepError(f"the objective is time or memory, not {objective!r:.100}")
        if steps is not None and steps < 1:
            raise StepError(f"steps must be 1 or more, not {steps}")
        if not step.models:
            raise StepError(step.why_no_model("tune"))
        Benchmark(step, [Variant("baseline")], budget_s)  # raises for what can't be measured
        self.step, self._fresh, self._accuracy = step, fresh, accuracy
        if accuracy is not None:
            accuracy.bound(step.models)  # raises for what can't be called
        with ExitStack() as stack:
            for model in step.models:
                stack.enter_context(hidden(model))
            facts, *others = [Facts.read(model, step.holders(model)) for model in step.models]
        self._tuning = Tuning(step, Hardware.current(), facts, objective, steps)
        self._tuning.facts_of_others = tuple(others)
        self._tuning.kept = _known(keep)
        self.begun_s: float | None = None
        self._identity: tuple[str, Task] | None = None
        self._calls: dict[Call, Seen] = {}
        self._allowance = Allowance(budget_s)
        self._stages = Stages(step, self._tuning, self._allowance)

    @property
    def budget_s(self) -> float:
        """Seconds for all of it but compiling; known for good once one step was looked at."""
        return self._allowance.budget.seconds

    def result(self) -> Tuning:
        """What is known so far; a winner that was not confirmed says so."""
        return self._tuning

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return bool(self._tuning.stages)

    def recall(self) -> Tuning:
        """The result with the plan that was learned for this step, if one was; not yet checked.

        Runs one step or two, which are undone. Raises what the step raises.
        """
        __tracebackhide__ = True
        tuning = self._tuning
        if self._identity is None:
            took_s: list[float] = []
            self._identity = tasks.identify(
                self.step,
                tuning.hardware,
                tuning.objective,
                tuning.steps,
                took_s,
                self._allowance.budget,
                tuning.kept,
                self._calls,
            )
            self._allowance.is_known_to_take(min(took_s))
            made, others = self.step.made, tuning.facts_of_others
            tuning.facts = tuning.facts.stepped_by(made)
            tuning.facts_of_others = tuple(facts.stepped_by(made) for facts in others)
            learned = None if self._fresh else learning.find(*self._identity)
            if learned is not None and learned.plan["values"]:  # where nothing helped, search again
                tuning.learned, tuning.winner = learned, Candidate(learned.plan["values"])
        return tuning

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        __tracebackhide__ = True
        start = time.perf_counter()
        self._allowance.begin(self.begun_s)
        budget = self._allowance.budget
        tuning = self._tuning
        yield Progress(0.0, "looking at one step")
        winner = self.recall().winner
        try:
            yield Progress(budget.share, self._ahead())
            if winner.values:
                yield from self._check(winner)
            if not tuning.confirmed:
                yield from self._search()
            if self._accuracy is not None:
                yield from other_models.choose(self._stages, self._accuracy)
        finally:
            tuning.seconds = time.perf_counter() - start
            self.step.kept.clear()
            self._calls = {}

    def _ahead(self) -> str:
        """How long it will take, and whether that is enough."""
        step_s = self._allowance.step_s
        text = f"one step takes {step_s:.2g} s: about {self.budget_s:.0f} s"
        text += " and what compiling takes"
        is_short = self.budget_s < self._allowance.enough_s / 2
        return f"{text}; {self._allowance.more()}" if is_short else text

    def _check(self, known: Candidate) -> Generator[Progress, None, None]:
        """A short A/B of the plan that was learned; it is forgotten where it does not hold."""
        __tracebackhide__ = True
        yield from Proof(self._stages).confirm(known, "checking the learned plan", parts=False)
        learned, tuning = self._tuning.learned, self._tuning
        if tuning.winner.name != known.name and learned is not None:
            if not tuning.unclear:
                learning.forget(learned)
            outcome = "could not be checked" if tuning.unclear else "was dropped"
            reasons = [
                candidate.reason for candidate in tuning.rejected if candidate.name == known.name
            ]
            tuning.notes.append("; ".join([f"The learned plan {known.name} {outcome}", *reasons]))
            tuning.learned, tuning.comparison = None, None
            tuning.winner, tuning.confirmed, tuning.unclear = BASELINE, False, ""

    def _search(self) -> Generator[Progress, None, None]:
        __tracebackhide__ = True
        tuning, stages = self._tuning, self._stages
        yield from engines.measure(tuning, self._allowance.budget)
        yield from self._measure_attention()
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
        self._keep()

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

    def _measure_attention(self) -> Generator[Progress, None, None]:
        """Its kernels, on the calls that the step makes: what is faster there is tried."""
        tuning, budget = self._tuning, self._allowance.budget
        calls, self._calls = self._calls, {}  # with tensors of the step
        if not calls or "sdpa" in tuning.kept:
            return
        rows, left_out = list[Measured](), list[Call]()
        yield Progress(budget.share, "measuring the attention kernels on the calls of the step")
        seconds = ATTENTION * budget.seconds
        for row in timed(calls, tuning.hardware, tuning.facts, seconds, left_out):
            rows.append(row)
            yield Progress(budget.share, "measuring the attention kernels on the calls of the step")
        if left_out and not budget.is_a_look:
            kinds = f"{len(set(left_out))} kind{'s' * (len(set(left_out)) > 1)} of calls"
            tuning.notes.append(f"Attention kernels: no time was left to measure {kinds}")
        keep(self.step.models, tuple(rows))
        tuning.facts = replace(tuning.facts, attention=tuple(rows))
        others = tuning.facts_of_others
        tuning.facts_of_others = tuple(replace(one, attention=tuple(rows)) for one in others)

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

    def _keep(self) -> None:
        """Remember what was found, also that nothing helped: rules shall not turn it on then.

        Not so where the search could not tell. A store that can't be written is said, and no more.
        """
        tuning = self._tuning
        # What was not to be tried may help, for all that it knows.
        no_answer = not tuning.helped and (tuning.unclear or tuning.kept)
        if self._identity is None or no_answer:
            return
        winner = tuning.winner
        try:
            learning.keep(*self._identity, tuning.plan, winner.values, winner.name, tuning.ratio)
        except SpeedKitError as error:
            tuning.notes.append(f"the plan was not kept for the next time: {error}")


def _known(keep: Collection[str]) -> tuple[str, ...]:
    """The names in the catalog's order; raises StepError for others."""
    names = [entry.name for entry in CATALOG]
    for name in keep:
        if name not in names:
            raise StepError(f"keep: there is no optimization {name!r:.100}: {', '.join(names)}")
    return tuple(name for name in names if name in keep)
