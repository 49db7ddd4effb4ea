"""The search: the strongest combination and what is near it race; what wins has to prove itself.

A race chooses by successive halving and proves nothing. What leads is confirmed against the
baseline in fresh rounds, beside the plan without each of its parts, so that the figure that is
reported did not win by luck and no part stays in the plan for nothing. A plan that was learned for
this very step earlier is only confirmed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.checks.attention_kernels import Seen
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.budget import LONGER, few_digits
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.facts.attention import Call
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import hidden
from speedkit_jupyter.session import current, notebook
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.tuning import attention, learning, other_models, parts, tasks
from speedkit_jupyter.tuning.allowance import Allowance
from speedkit_jupyter.tuning.candidates import (
    BASELINE,
    Candidate,
    candidates,
    joined,
    means_something,
    neighbours,
    strongest,
)
from speedkit_jupyter.tuning.outcome import Tuning
from speedkit_jupyter.tuning.proof import confirm
from speedkit_jupyter.tuning.stages import Stages
from speedkit_jupyter.tuning.tasks import Task

# Compiling is not tried for less than so many seconds of budget, or of all the user's steps.
COMPILE_S = 20.0
# So often what is near the best so far races with it.
MOST_TURNS = 3
# What lost a race by no more than this gets rounds enough to tell whether it helps after all.
NARROW = 0.95
# The engines of float32 products are not measured for less than so many seconds of budget; that
# takes two seconds, and at most this share of it. What took less than this goes without saying.
ENGINES_S, ENGINES_SHARE, NOTICED_S = 12.0, 0.25, 0.5


class Search:
    """Drain `run()`, then read `result()`; closing the generator keeps the best plan so far.

    `budget_s` are the seconds for all of it but compiling; None is enough for a clear answer.
    `objective` is `time` or `memory`, which may take `within` times the time; with `steps` it is
    the total time of so many steps, what comes before the first one included. `fresh` searches
    although a plan is known; the optimizations in `keep` stay as they are. Where the user names an
    `accuracy`, what changes the results is tried in the end, and chosen where it is accepted. The
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
        self._fresh = fresh
        self._identity: tuple[str, Task] | None = None
        self._calls: dict[Call, Seen] = {}
        self._left_out: list[Candidate] = []

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
        """Return the result with the plan learned for this step, if one was; not yet checked.

        Runs a step once or a few times, which is undone: it says also how long one takes, which
        optimizers it makes and how it calls attention. Raises what the step raises.
        """
        __tracebackhide__ = True
        tuning, took_s = self._tuning, list[float]()
        if self._identity is not None:
            return tuning
        self._identity = tasks.identify(
            self.step, tuning.hardware, tuning.aim, tuning.steps, took_s,
            self._allowance.budget, tuning.kept, self._calls,
        )  # fmt: skip
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
        start, tuning, has_ended = time.perf_counter(), self._tuning, False
        self._allowance.begin(self.begun_s)
        yield Progress(0.0, "looking at one step")
        try:
            learned = self.recall().winner
            yield Progress(self._allowance.budget.share, self._ahead())
            if learned.values:
                yield from self._check_learned(learned)
            if not tuning.confirmed:
                yield from self._search()
                self._keep()
            if self._accuracy is not None:
                yield from other_models.choose(self._stages, self._accuracy)
            has_ended = True
        finally:
            if not has_ended and tuning.record is None:
                tuning.winner, tuning.unclear = BASELINE, self._stages.so_far()
            tuning.seconds = time.perf_counter() - start
            self.step.kept.clear()
            self._calls.clear()
        if tuning.is_settled:
            current(notebook()).tuned(tuning.models, tuning.found)

    def _ahead(self) -> str:
        """Say how long it will take, and whether that is enough."""
        step_s = self._allowance.step_s
        text = f"one step takes {step_s:.2g} s: about {self.budget_s:.0f} s"
        text += " and what compiling takes"
        is_short = self.budget_s < self._allowance.enough_s / 2
        return f"{text}; {LONGER}" if is_short else text

    def _check_learned(self, known: Candidate) -> Generator[Progress, None, None]:
        """A short A/B of the plan that was learned; it is forgotten where it does not hold."""
        __tracebackhide__ = True
        yield from confirm(self._stages, known, "checking the learned plan", with_parts=False)
        tuning, learned = self._tuning, self._tuning.learned
        if tuning.winner.name == known.name or learned is None:
            return
        if not tuning.unclear:
            learning.forget(learned)
        outcome = "could not be checked" if tuning.unclear else "was dropped"
        reasons = [rejected.reason for rejected in tuning.rejected if rejected.name == known.name]
        tuning.notes.append("; ".join([f"The learned plan {known.name} {outcome}", *reasons]))
        tuning.learned, tuning.unclear = None, ""

    def _search(self) -> Generator[Progress, None, None]:
        """Race what is worth trying and prove what leads, until a plan is proven or time is out."""
        __tracebackhide__ = True
        tuning, stages, allowance = self._tuning, self._stages, self._allowance
        yield from self._measure_engines()
        singles = candidates(
            tuning.hardware, tuning.facts, tuning.kept, tuning.facts_of_others, tuning.objective
        )
        queue, proven = self._first(singles), set[str]()
        while queue and not tuning.confirmed and allowance.budget.allows(allowance.step_s):
            room = max(allowance.room(), 1)
            asked, queue = queue[:room], [plan for plan in queue[room:] if self._is_new(plan)]
            if len(asked) == 1:  # it is confirmed or not
                best = asked[0]
                stages.tried[best.name] = best
            else:
                best = yield from self._raced(asked, singles)
            if not best.values or best.name in proven:
                if not allowance.has_time(1):
                    break
                continue
            proven.add(best.name)
            yield from confirm(stages, best)
            if not allowance.has_time(1):
                break
        tried = stages.tried
        self._left_out = [plan for plan in queue if plan.name not in tried]
        if self._left_out:
            names = [plan.name for plan in self._left_out]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            listed = f"{', '.join(names[:4])}{more}"
            tuning.notes.append(f"Left out, since the budget is short: {listed}")
        if not tuning.confirmed:
            tuning.winner, tuning.comparison = BASELINE, None
            tuning.unclear = tuning.unclear or self._why_unclear(singles)

    def _first(self, singles: Sequence[Candidate]) -> list[Candidate]:
        """Return the strongest with and without compiling, its parts, it without each of them,
        and with each other value that is offered.
        """
        cheap = [single for single in singles if not single.costly]
        costly = [single for single in singles if single.costly]
        start = strongest(cheap)
        compiled = [joined(start, single) for single in costly[:1]]
        alone = [start.part(name) for name in start.values]
        near = [*parts.without_each(start), *neighbours(start, cheap)]
        every = [start, *compiled, *alone, *near, *cheap, *costly]
        return [plan for plan in _each_once(every) if plan.values and self._can_pay(plan)]

    def _raced(
        self, asked: Sequence[Candidate], singles: Sequence[Candidate]
    ) -> Generator[Progress, None, Candidate]:
        """Return what leads once what is near it has raced with it, or what lost narrowly."""
        __tracebackhide__ = True
        stages, allowance = self._stages, self._allowance
        best, comparison = yield from stages.race("what the machine suggests", asked)
        for _ in range(MOST_TURNS if best.values else 0):
            near = [*parts.without_each(best), *neighbours(best, singles)]
            new = [plan for plan in _each_once(near) if self._is_new(plan) and self._can_pay(plan)]
            new = new[: max(allowance.room() - 1, 0)]
            if not new or not allowance.has_time(len(new) + 1):
                break
            better, _ = yield from stages.race("what is near it", [best, *new])
            if better.name == best.name or not better.values:
                break
            best = better
        if best.values or stages.aim.memory:
            return best
        close = [
            (ratio.median, plan)
            for plan in asked
            for record in comparison.records[1:]
            if record.name == plan.name
            and (ratio := stages.ratio_if_able(comparison, record)) is not None
            and ratio.median > NARROW
            and ratio.high > 1
        ]
        return max(close, key=lambda one: one[0], default=(0.0, BASELINE))[1]

    def _is_new(self, plan: Candidate) -> bool:
        """Whether it has not raced, and no part of it was far slower by itself."""
        slow = {
            record.name
            for stage in self._tuning.stages
            for record in stage.comparison.records[1:]
            if "dropped" in record.notes
        }
        alone = {plan.part(name).name for name in plan.values}
        return bool(plan.values) and plan.name not in self._stages.tried and not slow & alone

    def _why_unclear(self, singles: Sequence[Candidate]) -> str:
        """Say why the races tell neither yes nor no; empty where they say no."""
        timed = any(record.times_s or "dropped" in record.notes or record.failure
                    for stage in self._tuning.stages
                    for record in stage.comparison.records[1:])  # fmt: skip
        if singles and not timed:
            return f"one step takes {self._allowance.step_s:.2g} s; {LONGER}"
        if len(self._left_out) > len(self._stages.tried):
            return f"{len(self._left_out)} plans were left out; {LONGER}"
        return ""

    def _can_pay(self, plan: Candidate) -> bool:
        """Whether such a budget, and so many steps, can pay for compiling, if it compiles."""
        steps, step_s = self._tuning.steps, self._allowance.step_s
        why = ""
        if plan.costly and steps is not None and steps * step_s <= COMPILE_S:
            why = f"{steps} steps take {steps * step_s:.1f} s, compiling alone takes longer"
        elif plan.costly and self.budget_s < COMPILE_S:
            short = f"{few_digits(self.budget_s)} s are less than what compiling takes"
            why = f"{short}: --budget 30 tries it"
        if why:
            self._stages.refuse(plan.name, why)
        return not why

    def _measure_engines(self) -> Generator[Progress, None, None]:
        """Those of products once for a machine, beside the budget; attention's for this step."""
        tuning, budget = self._tuning, self._allowance.budget
        is_known = tuning.facts.device_type != "cpu" or tuning.hardware.cpu.gemm is not None
        if not (is_known or tuning.hardware.pinned or budget.seconds < ENGINES_S):
            yield Progress(budget.share, "measuring the engines of float32 products, once")
            begun_s = clock.now()
            tuning.hardware = tuning.hardware.with_gemm(ENGINES_SHARE * budget.seconds)
            took_s, rates = clock.now() - begun_s, tuning.hardware.cpu.gemm
            budget.exclude(took_s)
            if rates is not None and rates.failure:
                tuning.notes.append(f"gemm was not tried: {rates.failure}")
            elif took_s > NOTICED_S:  # it was not known already
                tuning.notes.append(
                    f"It took {took_s:.1f} s more to measure the engines of float32 products, "
                    "which is done once for this machine"
                )
        calls, self._calls = self._calls, {}
        yield from attention.measure(tuning, budget, calls, self.step.models)

    def _keep(self) -> None:
        """Remember what was found, also that nothing helped: rules shall not turn it on then.

        Not so where the search could not tell. A store that can't be written is said, and no more.
        """
        tuning = self._tuning
        # What was not to be tried may help, for all that it knows.
        has_answer = tuning.helped or not (tuning.unclear or tuning.kept)
        if self._identity is None or not has_answer:
            return
        winner = tuning.winner
        try:
            learning.keep(*self._identity, tuning.plan, winner.values, winner.name, tuning.ratio)
        except SpeedKitError as error:
            tuning.notes.append(f"the plan was not kept for the next time: {error}")


def _each_once(plans: Sequence[Candidate]) -> list[Candidate]:
    """Those that mean something, in their order."""
    return list({plan.name: plan for plan in plans if means_something(plan)}.values())


def _known(keep: Collection[str]) -> tuple[str, ...]:
    """The names in the catalog's order; raises StepError for others."""
    names = [entry.name for entry in CATALOG]
    for name in keep:
        if name not in names:
            raise StepError(f"keep: there is no optimization {name!r:.100}: {', '.join(names)}")
    return tuple(name for name in names if name in keep)
