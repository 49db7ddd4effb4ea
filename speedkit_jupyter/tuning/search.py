"""The search: the strongest combination and what is near it race; what wins has to prove itself.

A race chooses by successive halving and proves nothing. What leads is confirmed against the
baseline in fresh rounds, beside the plan without each of its parts, so that the figure that is
reported did not win by luck and no part stays in the plan for nothing. A plan that was learned for
this very step earlier is only confirmed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.statistics import SAME
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.budget import Budget, few_digits
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import hidden
from speedkit_jupyter.session import current, notebook
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.tuning import learning, tasks
from speedkit_jupyter.tuning.allowance import Allowance
from speedkit_jupyter.tuning.candidates import (
    BASELINE,
    WORTH_IT,
    Candidate,
    candidates,
    joined,
    means_something,
    neighbours,
    pays,
    strongest,
    without_each,
)
from speedkit_jupyter.tuning.outcome import INTERRUPTED, Tuning, row_of
from speedkit_jupyter.tuning.proof import Prover
from speedkit_jupyter.tuning.races import Lightest, Race

# Compiling is not tried for less than so many seconds of budget, or of all the user's steps.
COMPILE_S = 20.0
# So often what is near the best so far races with it.
MOST_TURNS = 3
# What lost a race by no more than this gets rounds enough to tell whether it helps after all.
NARROW = 0.95
# The engines of float32 products are not measured for less than so many seconds of budget; that
# takes two seconds, and at most this share of it. What took less than this goes without saying.
ENGINES_S, ENGINES_SHARE, NOTICED_S = 12.0, 0.25, 0.5
# So many of the plans that were left out are named.
MOST_NAMES = 4


class Search:
    """Drain `run()`, then read `result()`; closing the generator keeps what is known so far.

    `budget_s` are the seconds for all of it but compiling; None is enough for a clear answer.
    `objective` is `time` or `memory`, which may take `within` times the time; with `steps` it is
    the total time of so many steps, what comes before the first one included. `fresh` searches
    although a plan is known; the optimizations in `keep` stay as they are. The budget begins when
    it runs, or began at `begun_s` on the clock, where that is set. Raises StepError.
    """

    def __init__(
        self,
        step: Step,
        budget_s: float | None = None,
        steps: int | None = None,
        objective: str = "time",
        fresh: bool = False,
        keep: Collection[str] = (),
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
        self.step, self._fresh = step, fresh
        with ExitStack() as stack:
            for model in step.models:
                stack.enter_context(hidden(model))
            facts, *others = [Facts.read(model, step.holders(model)) for model in step.models]
        self.tuning = Tuning(step, Hardware.current(), facts, objective, within, steps)
        self.tuning.facts_of_others = tuple(others)
        self.tuning.kept = _known(keep)
        self.allowance = Allowance(budget_s)
        self.prover = Prover(step, self.tuning, self.allowance)
        self.begun_s: float | None = None
        self._looked: tasks.Looked | None = None
        self._left_out: list[Candidate] = []

    @property
    def budget_s(self) -> float:
        """Seconds for all of it but compiling; known for good once one step was looked at."""
        return self.allowance.budget.seconds

    @property
    def budget(self) -> Budget:
        """The clock of the whole search."""
        return self.allowance.budget

    def result(self) -> Tuning:
        """Return what is known so far."""
        return self.tuning

    def has_results(self) -> bool:
        """Return whether there is anything to show already."""
        return self.allowance.step_s > 0

    def recall(self) -> Tuning:
        """Return the result with the plan learned for this step, if one was; not yet checked.

        Runs a step once or a few times, which is undone: it says also how long one takes, which
        optimizers it makes. Raises what the step raises.
        """
        __tracebackhide__ = True
        tuning = self.tuning
        if self._looked is not None:
            return tuning
        self._looked = looked = tasks.look(self.step, tuning.hardware, self.budget)
        self.allowance.is_known_to_take(looked.step_s)
        made, others = self.step.made, tuning.facts_of_others
        tuning.facts = tuning.facts.stepped_by(made)
        tuning.facts_of_others = tuple(facts.stepped_by(made) for facts in others)
        learned = None if self._fresh else learning.find(looked.setting, self._task(looked))
        if learned is not None and learned.plan["values"]:  # where nothing helped, search again
            tuning.learned, tuning.winner = learned, Candidate(learned.plan["values"])
        return tuning

    def _task(self, looked: tasks.Looked) -> tasks.Task:
        tuning = self.tuning
        return replace(looked.task, objective=tuning.aim, steps=tuning.steps, kept=tuning.kept)

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        __tracebackhide__ = True
        start, tuning, interrupted = time.perf_counter(), self.tuning, True
        self.allowance.begin(self.begun_s)
        yield Progress(0.0, "looking at one step")
        try:
            learned = self.recall().winner
            yield Progress(self.budget.share, self.allowance.ahead())
            if learned.values:
                yield from self._check_learned(learned)
            if not tuning.confirmed:
                yield from self._search()
                tuning.conclude(self._why_short())
                self._keep()
            interrupted = False
        finally:
            if interrupted and not tuning.confirmed:
                tuning.conclude(INTERRUPTED)
            tuning.seconds = time.perf_counter() - start
            self.step.kept.clear()
            self._looked = None
            if tuning.is_settled:
                current(notebook()).tuned(tuning.models, tuning.found)

    def _check_learned(self, known: Candidate) -> Generator[Progress, None, None]:
        """Prove the plan that was learned; it is forgotten where it does not hold."""
        __tracebackhide__ = True
        yield from self.prover.prove(known, "checking the learned plan", with_parts=False)
        tuning, learned = self.tuning, self.tuning.learned
        if tuning.confirmed or learned is None:
            return
        rows = [row for row in tuning.last_rows() if row.record.name == known.name]
        is_refuted = bool(rows) and not any(row.may_help for row in rows)
        if is_refuted:
            with suppress(SpeedKitError):  # a store that can't be written is no reason to stop
                database.unlearn([learned.number])
        outcome = "was dropped" if is_refuted else "could not be checked"
        reasons = [rejected.reason for rejected in tuning.rejected if rejected.name == known.name]
        tuning.notes.append("; ".join([f"The learned plan {known.name} {outcome}", *reasons]))
        tuning.learned = None

    def _search(self) -> Generator[Progress, None, None]:
        """Race what is worth trying and prove what leads, until a plan is proven or time is out."""
        __tracebackhide__ = True
        tuning, allowance = self.tuning, self.allowance
        yield from self._measure_engines()
        singles = candidates(
            tuning.hardware, tuning.facts, tuning.kept, tuning.facts_of_others, tuning.objective
        )
        queue, proven, tried = self._first(singles), set[str](), self.prover.tried
        while queue and not tuning.confirmed and allowance.budget.allows(allowance.step_s):
            room = max(allowance.room(), 1)
            asked, queue = queue[:room], queue[room:]
            best = asked[0]
            if len(asked) > 1:
                best = yield from self._raced(asked, singles)
            tried |= {plan.name: plan for plan in asked}
            if best.values and best.name not in proven:
                proven.add(best.name)
                yield from self.prover.prove(best)
                if best in self.prover.refused:  # what lost to it may be right
                    queue = [*asked, *queue]
                    for plan in asked:
                        tried.pop(plan.name, None)
            queue = [plan for plan in queue if self._is_new(plan)]
            if not allowance.can_check():  # nothing more could be proven
                break
        self._left_out = queue
        if queue:
            names = [plan.name for plan in queue]
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            listed = f"{', '.join(names[:MOST_NAMES])}{more}"
            tuning.notes.append(f"Left out, since the budget is short: {listed}")

    def _measure_engines(self) -> Iterator[Progress]:
        """Measure those of float32 products, once for a machine, and so beside the budget."""
        tuning, budget = self.tuning, self.budget
        is_known = tuning.facts.device_type != "cpu" or tuning.hardware.cpu.gemm is not None
        if is_known or tuning.hardware.pinned or budget.seconds < ENGINES_S:
            return
        doing = "measuring the engines of float32 products, once"
        yield Progress(budget.share, doing)
        begun_s = clock.now()
        tuning.hardware = tuning.hardware.with_gemm(ENGINES_SHARE * budget.seconds)
        took_s, rates = clock.now() - begun_s, tuning.hardware.cpu.gemm
        budget.exclude(took_s)
        if rates is not None and rates.failure:
            tuning.notes.append(f"gemm was not tried: {rates.failure}")
        elif took_s > NOTICED_S:  # it was not known already
            tuning.notes.append(f"It took {took_s:.1f} s more, {doing} for this machine")

    def _first(self, singles: Sequence[Candidate]) -> list[Candidate]:
        """Return the strongest with and without compiling, its parts, it without each of them,
        and with each other value that is offered.
        """
        cheap = [single for single in singles if not single.costly]
        costly = [single for single in singles if single.costly]
        start = strongest(cheap)
        compiled = [joined(start, single) for single in costly[:1]]
        alone = [start.part(name) for name in start.values]
        near = [*without_each(start), *neighbours(start, cheap)]
        return self._worth_trying([start, *compiled, *alone, *near, *cheap, *costly])

    def _raced(
        self, asked: Sequence[Candidate], singles: Sequence[Candidate]
    ) -> Generator[Progress, None, Candidate]:
        """Return what leads once what is near it has raced with it, or what lost narrowly."""
        __tracebackhide__ = True
        best = yield from self._race("what the machine suggests", asked)
        for _ in range(MOST_TURNS):
            near = self._worth_trying([*without_each(best), *neighbours(best, singles)])
            new = [plan for plan in near if self._is_new(plan)][: max(self.allowance.room() - 1, 0)]
            if not best.values or not new or not self.allowance.has_time(len(new) + 1):
                break
            better = yield from self._race("what is near it", [best, *new])
            if better.name == best.name or not better.values:
                break
            best = better
        return best

    def _race(self, title: str, asked: Sequence[Candidate]) -> Generator[Progress, None, Candidate]:
        """Return the one that leads at the end, or lost narrowly; else BASELINE."""
        __tracebackhide__ = True
        self.prover.tried |= {plan.name: plan for plan in asked}
        policy = Lightest(self.tuning.within) if self.prover.aim.memory else Race()
        comparison = yield from self.prover.benchmark(title, asked, self.allowance.race_s, policy)
        best = self._best_of(comparison, asked)
        for plan in asked:
            if plan.name != best.name:
                why = self.prover.aim.why_not(comparison, row_of(comparison, plan), best.name)
                self.tuning.refuse(plan.name, why)
        return best

    def _best_of(self, comparison: Comparison, tried: Sequence[Candidate]) -> Candidate:
        """Return the best by its gain; of those that are as good, the one of fewest parts.

        Each part has to bring what it costs, compiling more.
        """
        gains = {
            plan.name: self.prover.aim.gain(comparison, row_of(comparison, plan)) for plan in tried
        }
        plain = max([1.0, *(gains[plan.name] for plan in tried if not plan.costly)])
        able = [
            plan
            for plan in tried
            if gains[plan.name] > (WORTH_IT * plain if plan.costly else NARROW)
            and pays(plan, gains, tried)
        ]
        most = max([0.0, *(gains[plan.name] for plan in able)])
        equal = [plan for plan in able if gains[plan.name] * (1 + SAME) > most]
        return min(equal, key=lambda plan: len(plan.values), default=BASELINE)

    def _is_new(self, plan: Candidate) -> bool:
        """Return whether it has not raced, and no part of it was wrong, or far slower by itself."""
        slow = {
            record.name
            for stage in self.tuning.stages
            for record in stage.comparison.records[1:]
            if "dropped" in record.notes
        }
        is_slow = slow & {plan.part(name).name for name in plan.values}
        is_wrong = any(other.values.items() <= plan.values.items() for other in self.prover.refused)
        return not (plan.name in self.prover.tried or is_slow or is_wrong)

    def _worth_trying(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """Return each once that means something and can pay; why the others can't is noted."""
        able = {plan.name: plan for plan in plans if plan.values and means_something(plan)}
        return [plan for plan in able.values() if self._can_pay(plan)]

    def _can_pay(self, plan: Candidate) -> bool:
        steps, step_s = self.tuning.steps, self.allowance.step_s
        why = ""
        if plan.costly and steps is not None and steps * step_s <= COMPILE_S:
            why = f"{steps} steps take {steps * step_s:.1f} s, compiling alone takes longer"
        elif plan.costly and self.budget_s < COMPILE_S:
            short = f"{few_digits(self.budget_s)} s are less than what compiling takes"
            why = f"{short}: --budget 30 tries it"
        if why:
            self.tuning.refuse(plan.name, why)
        return not why

    def _why_short(self) -> str:
        """Return why the time was too short to tell anything; empty where it was not."""
        rows = [row.record for row in self.tuning.last_rows()]
        timed = any(row.times_s or row.failure or "dropped" in row.notes for row in rows)
        if not timed and (self.prover.tried or self._left_out):
            return f"one step takes {self.allowance.step_s:.2g} s"
        if len(self._left_out) > len(self.prover.tried):
            return f"{len(self._left_out)} plans were left out"
        return ""

    def _keep(self) -> None:
        """Remember what was found, also that nothing helped: rules shall not turn it on then.

        Not so where the search could not tell, nor where something was not to be tried, which may
        help. A store that can't be written is said, and no more.
        """
        tuning, looked = self.tuning, self._looked
        if looked is None or not (tuning.confirmed or not (tuning.unclear or tuning.kept)):
            return
        plan, winner = tuning.plan, tuning.winner
        try:
            task = self._task(looked)
            learning.keep(looked.setting, task, plan, winner.values, winner.name, tuning.ratio)
        except SpeedKitError as error:
            tuning.notes.append(f"the plan was not kept for the next time: {error}")


def _known(keep: Collection[str]) -> tuple[str, ...]:
    """Return the names in the catalog's order; raises StepError for others."""
    names = [entry.name for entry in CATALOG]
    for name in keep:
        if name not in names:
            raise StepError(f"keep: there is no optimization {name!r:.100}: {', '.join(names)}")
    return tuple(name for name in names if name in keep)
