"""The search: the strongest combination and what is near it race; what wins has to prove itself.

A race chooses by successive halving and proves nothing. What leads is confirmed against the
baseline in fresh rounds, beside the plan without each of its parts, so that the figure that is
reported did not win by luck and no part stays in the plan for nothing. A plan that was learned for
this very step earlier is only confirmed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from statistics import median
from typing import Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.statistics import SAME
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.budget import few_digits
from speedkit_jupyter.measure.rounds.sampler import Policy, Progress
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.measure.undo import guard
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans import planning
from speedkit_jupyter.session import current, notebook
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.tuning import bundles, learning
from speedkit_jupyter.tuning.aim import WORTH_IT, Aim, idlest, is_out, pays, row_of
from speedkit_jupyter.tuning.candidates import BASELINE, Candidate, candidates, strongest
from speedkit_jupyter.tuning.outcome import INTERRUPTED, Stage, Tuning
from speedkit_jupyter.tuning.races import RACE_ROUNDS, Allowance, Lightest, Proof, Race

# Compiling is not tried with a budget below this many seconds, nor if all of the user's steps take
# less.
COMPILE_S = 20.0
# So many races choose: one of what the machine suggests, the others of what is near its best.
MOST_RACES = 4
# A plan that lost a race by no more than this is proven or refuted with more rounds.
NARROW = 0.95
# The engines of float32 products are measured if the budget has this many seconds. That takes two
# seconds, and at most this share of the budget. Less than NOTICED_S goes without saying.
ENGINES_S, ENGINES_SHARE, NOTICED_S = 12.0, 0.25, 0.5
# This many of the plans that were left out are named.
MOST_NAMES = 4


class Search:
    """Drain `run()`, then read `result()`; closing the generator keeps what is known so far.

    `budget_s` are the seconds for all of it but compiling; None is enough for a clear answer.
    `objective` is `time` or `memory`, which may take `within` times the time; with `steps` it is
    the total time of this many steps, compiling included. `fresh` searches although a plan is
    known; the optimizations in `keep` stay as they are. The budget begins when the search runs, or
    at `begun_s` on the clock. Raises StepError.
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
        if objective not in ("time", "memory"):
            raise StepError(f"the objective is time or memory, not {objective!r:.100}")
        if within is not None and objective != "memory":
            raise StepError("within belongs to the objective memory: how much slower it may get")
        if within is not None and not 1 <= within < math.inf:
            raise StepError(f"within must be 1 or more, as in 1.2, not {within:g}")
        if steps is not None and steps < 1:
            raise StepError(f"steps must be 1 or more, not {steps}")
        names = [entry.name for entry in CATALOG]
        if unknown := [name for name in keep if name not in names]:
            every = ", ".join(names)
            raise StepError(f"keep: there is no optimization {unknown[0]!r:.100}: {every}")
        if not step.models:
            raise StepError(step.why_no_model("tune"))
        Benchmark(step, [Variant("baseline")], budget_s)  # raises for what can't be measured
        kept = tuple(name for name in names if name in keep)
        self.step, self._fresh, self.hardware = step, fresh, Hardware.current()
        self.tuning = Tuning(step, objective, within, steps, kept)
        self.known, self.aim = self.tuning.known, Aim(objective == "memory", within, steps)
        self.begun_s: float | None = None
        self._budget_s, self.budget = budget_s, Allowance(budget_s)

    def result(self) -> Tuning:
        return self.tuning

    def has_results(self) -> bool:
        return self.budget.step_s > 0

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        tuning, start_s, why = self.tuning, clock.now(), INTERRUPTED
        self.budget = Allowance(self._budget_s, self.begun_s)
        yield Progress(0.0, "looking at one step")
        try:
            seen = self._read_step()
            yield Progress(self.budget.share, self.budget.ahead())
            if tuning.learned is not None:
                yield from self._check_learned(tuning.learned)
            if not tuning.helped:
                yield from self._search(seen.facts)
            why = self.known.why_unclear(self.budget.step_s)
        finally:
            tuning.conclude(why)
            tuning.seconds = clock.now() - start_s
            self.step.kept.clear()
            if tuning.is_settled:
                current(notebook()).tuned(tuning.models, tuning.found)
        if tuning.learned is None:
            self._keep(seen)

    def _read_step(self) -> learning.StepFacts:
        """Return what a step does and how long it takes; note the plan that was learned for it."""
        tuning = self.tuning
        seen = learning.read_step(self.step, self.hardware, self.budget)
        self.budget.follow(seen.step_s)
        task = replace(seen.task, objective=tuning.aim, steps=tuning.steps, kept=tuning.kept)
        learned = None if self._fresh else learning.find(seen.setting, task)
        if learned is not None and learned.value["values"]:  # where nothing helped, search again
            tuning.learned = learned
        return seen._replace(task=task)

    def _check_learned(self, learned: database.Kept) -> Iterator[Progress]:
        """Prove the plan that was learned; it is forgotten where it does not hold."""
        plan, tuning = Candidate(learned.value["values"]), self.tuning
        yield from self.prove(plan, "checking the learned plan", with_parts=False)
        if tuning.helped:
            return
        rows = [row for row in self.known.rows() if row.record.name == plan.name]
        is_refuted = bool(rows) and not any(row.may_help for row in rows)
        if is_refuted:
            with suppress(SpeedKitError):  # a store that can't be written is no reason to stop
                database.unlearn([learned.number])
        outcome = "was dropped" if is_refuted else "could not be checked"
        tuning.notes.append(f"The learned plan {plan.name} {outcome}")
        tuning.learned = None

    def _search(self, facts: Sequence[Facts]) -> Iterator[Progress]:
        """Race what is worth trying and prove what leads, until a plan is proven or time is out."""
        tuning, known, budget = self.tuning, self.known, self.budget
        if facts[0].device_type == "cpu":
            yield from self._measure_engines()
        singles = candidates(self.hardware, facts[0], tuning.kept, facts[1:], tuning.objective)
        known.left, proven = self._first(singles), set[str]()
        while known.left and not tuning.helped and budget.allows(budget.step_s):
            room = max(budget.room(), 1)
            asked, known.left = known.left[:room], known.left[room:]
            best = yield from self._raced(asked, singles)
            if best.values and best.name not in proven:
                proven.add(best.name)
                yield from self.prove(best)
                if best in known.refused:  # what lost to it may be right
                    known.left = [*asked, *known.left]
                    for plan in asked:
                        known.tried.pop(plan.name, None)
            known.left = [plan for plan in known.left if known.is_new(plan)]
            if not budget.can_check():  # nothing more could be proven
                break
        if names := [plan.name for plan in known.left]:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            listed = f"{', '.join(names[:MOST_NAMES])}{more}"
            tuning.notes.append(f"Left out, since the budget is short: {listed}")

    def _measure_engines(self) -> Iterator[Progress]:
        """Measure those of float32 products, once for a machine, and so beside the budget."""
        budget, notes, known = self.budget, self.tuning.notes, self.hardware.cpu.gemm
        if known is not None or self.hardware.pinned or budget.seconds < ENGINES_S:
            return
        doing = "measuring the engines of float32 products, once"
        yield Progress(budget.share, doing)
        begun_s = clock.now()
        self.hardware = self.hardware.with_gemm(ENGINES_SHARE * budget.seconds)
        took_s, rates = clock.now() - begun_s, self.hardware.cpu.gemm
        budget.exclude(took_s)
        if rates is not None and rates.failure:
            notes.append(f"gemm was not tried: {rates.failure}")
        elif took_s > NOTICED_S:  # it was not known already
            notes.append(f"It took {took_s:.1f} s more, {doing} for this machine")

    def _first(self, singles: Sequence[Candidate]) -> list[Candidate]:
        """Return the strongest with and without compiling, what is near it, and single changes."""
        cheap = [single for single in singles if not single.costly]
        costly = [single for single in singles if single.costly]
        start = strongest(cheap)
        compiled = [start.joined(single) for single in costly[:1]]
        alone = [start.part(name) for name in start.values]
        return self._worth_trying(
            [start, *compiled, *alone, *start.neighbours(cheap), *cheap, *costly]
        )

    def _worth_trying(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """Return each once that is consistent and can pay; note why the others can't."""
        able = {plan.name: plan for plan in plans if plan.values and plan.is_consistent}
        steps, seconds = self.tuning.steps, self.budget.seconds
        steps_s = math.inf if steps is None else steps * self.budget.step_s
        if steps_s <= COMPILE_S:
            why = f"{steps} steps take {steps_s:.1f} s, compiling alone takes longer"
        elif seconds < COMPILE_S:
            short = f"{few_digits(seconds)} s are less than what compiling takes"
            why = f"{short}: --budget 30 tries it"
        else:
            return list(able.values())
        for plan in filter(lambda plan: plan.costly, able.values()):
            self.known.refuse(plan.name, why)
        return [plan for plan in able.values() if not plan.costly]

    def _raced(
        self, asked: Sequence[Candidate], singles: Sequence[Candidate]
    ) -> Generator[Progress, None, Candidate]:
        """Return what leads, or lost narrowly, beside all that is near it; BASELINE without one."""
        known, leads, title = self.known, BASELINE, "what the machine suggests"
        for _ in range(MOST_RACES):
            known.tried |= {plan.name: plan for plan in asked}
            if len(asked) == 1:  # it has only to be proven
                return asked[0]
            policy = Lightest(self.aim.within) if self.aim.memory else Race()
            comparison = yield from self._benchmark(title, asked, self.budget.race_s, policy)
            best = self._best_of(comparison, asked)
            for plan in asked:
                if plan.name != best.name:
                    why = self.aim.why_not(comparison, row_of(comparison, plan), best.name)
                    known.refuse(plan.name, why)
            if best.name in (leads.name, BASELINE.name):
                break
            leads, title = best, "what is near it"
            near = self._worth_trying(best.neighbours(singles))
            new = [plan for plan in near if known.is_new(plan)][: max(self.budget.room() - 1, 0)]
            if not new:
                break
            asked = [leads, *new]
        return leads

    def _best_of(self, comparison: Comparison, asked: Sequence[Candidate]) -> Candidate:
        """Return the best by its gain whose parts pay; of equals that of fewest parts."""
        gains = {plan.name: self.aim.gain(comparison, row_of(comparison, plan)) for plan in asked}
        plain = max([1.0, *(gains[plan.name] for plan in asked if not plan.costly)])
        able = [
            plan
            for plan in asked
            if gains[plan.name] > (WORTH_IT * plain if plan.costly else NARROW)
            and pays(plan, gains, asked)
        ]
        most = max([0.0, *(gains[plan.name] for plan in able)])
        equal = [plan for plan in able if gains[plan.name] * (1 + SAME) > most]
        return min(equal, key=lambda plan: len(plan.values), default=BASELINE)

    def prove(
        self, whole: Candidate, title: str = "confirming", with_parts: bool = True
    ) -> Iterator[Progress]:
        """Measure a plan in rounds that took no part in choosing it, and it without each part."""
        known, budget = self.known, self.budget
        plans = [whole, *(whole.without_each() if with_parts else ())]
        known.tried |= {plan.name: plan for plan in plans}
        budget.leave_time_for_a_proof(1 + len(plans))
        policy = Proof(plans, self.aim, checks=budget.can_check())
        comparison = yield from self._benchmark(title, plans, budget.left_s, policy)
        rows = {plan.name: row_of(comparison, plan) for plan in plans}
        known.refused += [plan for plan in plans if is_out(comparison, rows[plan.name])]
        gains = {name: self.aim.gain(comparison, row, proven=True) for name, row in rows.items()}
        best = whole if gains[whole.name] > 1 else max(plans, key=lambda plan: gains[plan.name])
        if gains[whole.name] <= 1 and whole.name != self.tuning.winner.name:
            why = self.aim.why_not(comparison, rows[whole.name], best.name)
            known.refuse(whole.name, f"fresh rounds did not confirm it: {why}")
        if gains[best.name] > 1:
            self.tuning.take(best, comparison)
            yield from self._drop_idlest(comparison, gains)

    def _drop_idlest(
        self, comparison: Comparison, gains: Mapping[str, float]
    ) -> Iterator[Progress]:
        """Leave out the part that brings least, if it brings nothing, and prove the rest anew if
        others bring nothing either: together they may be worth much.
        """
        tuning, whole = self.tuning, self.tuning.winner
        name = "" if self.aim.memory else idlest(whole, comparison)
        rest = whole.without(name)
        if not name or gains.get(rest.name, 0.0) <= 1:
            return
        parts = {part.name: part for part in tuning.parts_found}
        gone = parts.pop(name)
        self.known.refuse(gone.word, f"left out: with it the plan is {gone.ratio} as fast")
        tuning.take(rest, comparison)
        tuning.parts_found = list((parts | {p.name: p for p in tuning.parts_found}).values())
        is_idle = any(part.is_idle for part in tuning.parts_found)
        if is_idle and len(rest.values) > 1 and self.budget.can_check():
            yield from self.prove(rest, "without what is not proven")

    def _benchmark(
        self, title: str, asked: Sequence[Candidate], seconds: float, policy: Policy
    ) -> Generator[Progress, None, Comparison]:
        """Compare the baseline and what is asked: a stage of the result, also if cut short."""
        variants, budget = [plan.variant() for plan in (BASELINE, *asked)], self.budget
        benchmark = Benchmark(self.step, variants, max(seconds, 0.01), policy=policy, within=budget)
        is_known = False
        try:
            with closing(benchmark.run()) as run:
                for progress in run:
                    here = guard.in_progress()
                    paused_s = here.paused_s if here else 0.0
                    yield Progress(budget.share, f"{title}: {progress.text}", progress.known)
                    if here:  # turns that were given up
                        budget.exclude(here.paused_s - paused_s)
                    times_s = benchmark.result().baseline.times_s
                    if not is_known and len(times_s) >= RACE_ROUNDS:
                        is_known = True
                        budget.follow(median(times_s))
        finally:
            self.tuning.compiling_s += benchmark.budget.excluded_s
            comparison = benchmark.result()
            if benchmark.has_results():
                self.known.stages.append(Stage(title, comparison))
        return comparison

    def _keep(self, seen: learning.StepFacts) -> None:
        """Remember the plan, or that nothing helps; not if what was to be kept may help."""
        tuning, winner = self.tuning, self.tuning.winner
        if tuning.helped or not (tuning.unclear or tuning.kept):
            plans = [planning.plan(tuning.config, self.hardware, one) for one in seen.facts]
            about = (seen.setting, seen.task, planning.together(plans))
            bundle = self._bundle()
            try:
                learning.keep(*about, winner.values, winner.name, tuning.ratio, bundle)
            except SpeedKitError as error:
                tuning.notes.append(f"the plan was not kept for the next time: {error}")

    def _bundle(self) -> dict[str, Any] | None:
        """Keep the winner's compiled code, if it has some; return its manifest."""
        winner = self.tuning.winner
        if not winner.values.get("compile"):
            return None
        rows = [row.record for row in self.known.rows() if row.record.name == winner.name]
        cold_s = max((one.first_call_s or 0.0 for one in rows), default=0.0)
        return bundles.collect(self.step, self.tuning.config, cold_s)
