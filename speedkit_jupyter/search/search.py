"""The search: the strongest combination and what is near it race; what wins has to prove itself.

A race chooses by successive halving and proves nothing. What leads is confirmed against the
baseline in fresh rounds, beside the plan without each of its parts: a figure must not win by luck,
nor a part stay for nothing. A plan that was learned for this very step is only confirmed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.compile import Compile, expected_s, whole_model_s
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans import planning
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.pool import Pool, pooled
from speedkit_jupyter.rounds.sampler import Policy, Progress
from speedkit_jupyter.rounds.statistics import BUSY, SAME
from speedkit_jupyter.search import bundles, learning, races
from speedkit_jupyter.search.candidates import BASELINE, BESIDE, Candidate, candidates, strongest
from speedkit_jupyter.search.found import MEMORY
from speedkit_jupyter.search.next_plans import (
    NARROW,
    PROMISING,
    best_first,
    best_of,
    compiled_whole,
    leads_by_far,
    rivals,
)
from speedkit_jupyter.search.objective import Aim, is_out, leader, row_of
from speedkit_jupyter.search.outcome import INTERRUPTED, SearchState, Stage, Tuning
from speedkit_jupyter.state import guard
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import Variant
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.torchglue import heap

# So many races choose: one of what the machine suggests, the others of what is near its best.
MOST_RACES = 3
# The engines of float32 products are measured if the budget has this many seconds. That takes two
# seconds, and at most this share of the budget. Less than NOTICED_S goes without saying.
ENGINES_S, ENGINES_SHARE, NOTICED_S = 8.0, 0.25, 0.5
# This many of the plans that were left out are named.
MOST_NAMES = 4


class PlanSearch:
    """Drain `run()`, then read `result()`; closing the generator keeps what is known so far.

    The arguments are those of `tune`; it goes on from what is `known` by an earlier search. The
    budget begins when the search runs, or at `begun_s` on the clock. Raises StepError.
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
        known: SearchState | None = None,
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
        self.step, self.hardware = step, Hardware.current()
        self._goes_on, self._fresh = known is not None, fresh or known is not None
        known = deepcopy(known) if known else SearchState()  # the earlier result stays as it is
        self.tuning = Tuning(step, objective, within, steps, kept, known=known)
        self.known, self.aim = self.tuning.known, Aim(objective == "memory", within, steps)
        self.known.wait_again()
        self.begun_s: float | None = None
        self._pool: Pool | None = None
        self._beside = BASELINE  # what is part of every plan that is tried
        self._budget_s, self.budget = budget_s, races.Allowance(budget_s)
        self._compile_s, self._whole_s = races.COMPILE_S, 0.0

    def result(self) -> Tuning:
        return self.tuning

    @property
    def _warm(self) -> Collection[str]:
        """Return the names of the plans that are warmed up."""
        return () if self._pool is None else self._pool.runners

    @property
    def _least(self) -> float:
        """Return what of the best one's speed a plan must promise to be proven beside it."""
        return NARROW if self.budget.steps_are_long else 0.0

    def has_results(self) -> bool:
        return self.budget.step_s > 0

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        tuning, start_s, why = self.tuning, clock.now(), INTERRUPTED
        self.budget = races.Allowance(self._budget_s, self.begun_s)
        try:
            yield from self._measure_engines()
            yield Progress(self.budget.share, "looking at one step")
            with pooled(self.step, races.MOST_CANDIDATES) as self._pool:
                seen = self._read_step(self._pool)
                yield Progress(self.budget.share, self.budget.ahead(self._pool.most_bytes))
                if tuning.learned is not None:
                    yield from self._check_learned(tuning.learned)
                else:
                    yield from self._prove_likely()
                if not tuning.helped:
                    yield from self._search(seen.facts)
            why = self.known.why_unclear(self.budget.step_s)
        finally:
            self._pool = None
            tuning.conclude(why)
            tuning.seconds = clock.now() - start_s
            if self.has_results():
                MEMORY.last = tuning
            if tuning.is_settled:
                MEMORY.keep(tuning.models, tuning.found)
        if tuning.learned is None or "process" in tuning.learned.value:
            self._keep(seen)

    def _read_step(self, pool: Pool) -> learning.TaskFacts:
        """Return what a step does; note how long it takes, and the plan that was learned for it."""
        tuning, budget = self.tuning, self.budget
        budget.reserved_s = pool.guard.taking_s
        reading = learning.Reading(self.step, self.hardware)
        one = Benchmark(self.step, [BASELINE.variant()], within=budget, pool=pool)
        for _ in one.warm_up(pool, reading.watching):
            pass
        tuning.compiling_s += one.budget.excluded_s
        first = pool.runners[BASELINE.name]
        seen, self._step_facts = reading.facts(first.facts.made), first.facts
        budget.follow(first.recent_s or [first.step_s], first.was_disturbed)
        if seen.autocast and "precision" not in tuning.kept:
            tuning.kept += ("precision",)
            tuning.notes.append("The step enters an autocast of its own: no other one was tried")
        task = replace(seen.task, objective=tuning.aim, steps=tuning.steps, kept=tuning.kept)
        learned = None if self._fresh else learning.find(seen.setting, task)
        step_s, fresh = first.usual_s, first.fresh_bytes.get(False, 0)
        facts = [replace(one, step_s=step_s, fresh_bytes=fresh) for one in seen.facts]
        if learned is not None and learned.value["values"]:  # where nothing helped, search again
            tuning.learned = learned
        return seen._replace(task=task, facts=facts)

    def _check_learned(self, learned: database.Kept) -> Iterator[Progress]:
        """Prove the plan that was learned; it is forgotten where it does not hold."""
        plan, tuning = Candidate(learned.value["values"]), self.tuning
        yield from self.prove(plan, "checking the learned plan", with_parts=False)
        if tuning.helped:
            return
        rows = [row for row in self.known.rows() if row.record.name == plan.name]
        is_refuted = bool(rows) and not any(r.is_likely(self.aim) or r.is_undecided for r in rows)
        if is_refuted:
            with suppress(SpeedKitError):  # a store that can't be written is no reason to stop
                database.unlearn([learned.number])
        outcome = "was dropped" if is_refuted else "could not be checked"
        tuning.notes.append(f"The learned plan {plan.name} {outcome}")
        tuning.learned = None

    def _prove_likely(self) -> Iterator[Progress]:
        """Prove what an earlier search named as its best, and what else it left likely, one after
        another, until one is proven.
        """
        known, asked = self.known, set[str]()
        while (best := known.best(self.aim)) and (
            best.is_likely(self.aim) or (not asked and self._goes_on and best.may_help)
        ):
            if self.tuning.helped or best.record.name in asked or not self.budget.can_check():
                return
            asked.add(best.record.name)
            yield from self.prove(known.plans[best.record.name])

    def _search(self, facts: Sequence[Facts]) -> Iterator[Progress]:
        """Race what is worth trying and prove what leads, until a plan is proven or time is out."""
        tuning, known, budget = self.tuning, self.known, self.budget
        self._compile_s = max(expected_s(one, Compile.default) or races.COMPILE_S for one in facts)
        self._whole_s = 0.0 if self.aim.memory else max(map(whole_model_s, facts))
        singles = candidates(self.hardware, facts[0], tuning.kept, facts[1:], tuning.objective)
        self._beside = next((one for one in singles if BESIDE in one.values), BASELINE)
        waiting = {plan.name: plan for plan in (*known.left, *self._first(singles))}
        known.left, proven = [*waiting.values()], set[str]()
        if self._goes_on:
            known.left = [plan for plan in known.left if known.is_new(plan)]
        while known.left and not tuning.helped and budget.allows(budget.step_s):
            is_tight = self._whole_s and budget.steps_are_long  # the whole model needs time, too
            room = max(min(budget.room(), 2 if is_tight else races.MOST_CANDIDATES), 1)
            asked, known.left = known.left[:room], known.left[room:]
            best = yield from self._raced(asked, singles)
            known.left = [plan for plan in known.left if known.is_new(plan)]
            if known.left and self._is_behind(best):
                known.left = best_first(known, self._warm, BASELINE, known.left)
                continue  # what lost narrowly is worth a proof only where nothing else waits
            if best.values and best.name not in proven:
                proven.add(best.name)
                yield from self.prove(best)
                if best in known.refused:  # what lost to it may be right
                    known.left = [*asked, *known.left]
                    for plan in asked:
                        known.tried.pop(plan.name, None)
            known.left = [plan for plan in known.left if known.is_new(plan)]
            if budget.proof_s(races.ALONE) > budget.left_s:  # nothing more could be proven
                break
        names = [plan.name for plan in known.left]
        if names and not tuning.helped:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            listed = f"{', '.join(names[:MOST_NAMES])}{more}"
            tuning.notes.append(f"Left out, since the budget is short: {listed}")

    def _measure_engines(self) -> Iterator[Progress]:
        """Measure those of float32 products, once for a machine, for a part of the budget."""
        budget, notes, known = self.budget, self.tuning.notes, self.hardware.cpu.gemm
        is_cpu = Facts.read(self.step.models[0]).device_type == "cpu"
        if not is_cpu or known is not None or self.hardware.pinned or budget.seconds < ENGINES_S:
            return
        doing = "measuring the engines of float32 products, once"
        yield Progress(budget.share, doing)
        begun_s = clock.now()
        self.hardware = self.hardware.with_gemm(ENGINES_SHARE * budget.seconds)
        took_s, rates = clock.now() - begun_s, self.hardware.cpu.gemm
        if rates is not None and rates.failure:
            notes.append(f"gemm was not tried: {rates.failure}")
        elif took_s > NOTICED_S:  # it was not known already
            notes.append(f"{took_s:.1f} s of it went into {doing} for this machine")

    def _first(self, singles: Sequence[Candidate]) -> list[Candidate]:
        """Return the strongest with and without compiling, what is near it, and single changes."""
        cheap = [single for single in singles if not single.costly]
        costly = [single for single in singles if single.costly]
        start = strongest(cheap)
        compiled = [start.joined(single) for single in costly]  # on GPUs its graphs, too
        alone = [start.part(name) for name in start.values]
        near = start.neighbours(cheap)
        # The few plans that there is time for where steps are long: what may be the best itself,
        # as with another part in the place of one. A proof has the plan without each of its parts.
        near.sort(key=lambda plan: len(plan.values) != len(start.values))
        rest = [*near, *alone] if self.budget.steps_are_long else [*alone, *near]
        return self._worth_trying([start, *compiled, *rest, *cheap, *costly])

    def _worth_trying(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """Return each once that is consistent and can pay; note why the others can't."""
        plans = [plan + self._beside for plan in plans]
        able = {plan.name: plan for plan in plans if plan.values and plan.is_consistent}
        if not (why := self.budget.why_not_compiled(self._compile_s, self.tuning.steps)):
            return list(able.values())
        for plan in filter(lambda plan: plan.costly, able.values()):
            self.known.refuse(plan.name, why)
        return [plan for plan in able.values() if not plan.costly]

    def _compiled_whole(self, plan: Candidate) -> list[Candidate]:
        """Return the plan with the whole model compiled, where that is new and may pay."""
        whole = compiled_whole(self.known, plan + self._beside) if self._whole_s else []
        why = self.budget.why_not_compiled(self._whole_s, self.tuning.steps, is_whole=True)
        if whole and why:
            self.known.refuse(whole[0].name, why)
        return [] if why else whole

    def _raced(
        self, asked: Sequence[Candidate], singles: Sequence[Candidate]
    ) -> Generator[Progress, None, Candidate]:
        """Return what leads, or lost narrowly, beside all that is near it; BASELINE without one."""
        known, leads, title = self.known, BASELINE, "what the machine suggests"
        near = list[Candidate]()
        for _ in range(MOST_RACES):
            known.tried |= {plan.name: plan for plan in asked}
            leads = asked[0] if len(asked) == 1 else leads
            if len(asked) == 1 and not (self._whole_s and leads.values.get("compile") is True):
                return leads  # it has only to be proven
            allowance, within = self.budget, self.aim.within
            policy = (
                races.Lightest(allowance, within) if self.aim.memory else races.PlanRace(allowance)
            )
            # Where each plan keeps memory the baseline does too: to toggle that is slow, and noisy.
            is_kept = all(BESIDE in plan.values for plan in asked)
            with heap.kept() if is_kept else nullcontext():
                comparison = yield from self._benchmark(title, asked, policy)
            best = best_of(self.aim, comparison, asked)
            for plan in asked:
                if plan.name != best.name:
                    why = self.aim.why_not(comparison, row_of(comparison, plan), best.name)
                    known.refuse(plan.name, why)
            is_long = self.budget.steps_are_long
            if best.name == BASELINE.name or (is_long and leads_by_far(comparison, best)):
                near = []  # its parts, and what is near it, are not worth their time
            elif best.name != leads.name:
                least = 0.0 if self.aim.memory else self._least or PROMISING
                near = best_first(known, self._warm, best, best.neighbours(singles), least)
                near = self._worth_trying(near)
            leads, title = best if best.values else leads, "what is near it"
            new = [*self._compiled_whole(leads), *filter(known.is_new, near)]
            new = new[: max(self.budget.room() - 1, 0)]
            if not new:
                break
            asked = [plan for plan in (leads, *new) if plan.values]
        return leads

    def _is_behind(self, plan: Candidate) -> bool:
        """Return whether it was not faster than the baseline when it raced."""
        rows = [row for row in self.known.rows() if row.record.name == plan.name]
        return not self.aim.memory and any(row.ratio.median <= 1 + SAME for row in rows)

    def prove(
        self, whole: Candidate, title: str = "confirming", with_parts: bool = True
    ) -> Iterator[Progress]:
        """Measure a plan in rounds that took no part in choosing it, beside it without each part,
        the next best, and what people write by hand; of long steps those that are warm.
        """
        known, warm, others = self.known, self._warm, list[Candidate]()
        if with_parts:
            beside = [*whole.without_each(), *rivals(known)]
            others = best_first(known, warm, whole, beside, self._least)
            others = [one for one in others if one.name in warm or not self._least]
        plans = [*{plan.name: plan for plan in (whole, *others)}.values()]
        known.tried |= {plan.name: plan for plan in plans}
        policy = races.Proof(plans, self.aim, self.budget.steps_are_long)
        comparison = yield from self._benchmark(title, plans, policy)
        rows = {plan.name: row_of(comparison, plan) for plan in plans}
        known.refused += [plan for plan in plans if is_out(comparison, rows[plan.name])]
        gains = {name: self.aim.gain(comparison, row, proven=True) for name, row in rows.items()}
        best = leader(plans, gains)
        if best is not whole or gains[best.name] <= 1:
            why = self.aim.why_not(comparison, rows[whole.name], best.name)
            known.refuse(whole.name, f"fresh rounds did not confirm it: {why}")
        if gains[best.name] > 1:
            self.tuning.take(best, comparison)

    def _benchmark(
        self, title: str, asked: Sequence[Candidate], policy: Policy
    ) -> Generator[Progress, None, Comparison]:
        """Compare the baseline and what is asked: a stage of the result, also if cut short."""
        variants, budget = [plan.variant() for plan in (BASELINE, *asked)], self.budget
        if self._pool is not None:
            first, *_ = asked
            kept = (BASELINE, *asked, *first.without_each(), *rivals(self.known))
            self._pool.keep({plan.name for plan in kept}, {variant.name for variant in variants})
        left_s = max(budget.left_s, 0.01)
        benchmark = Benchmark(
            self.step, variants, left_s, policy=policy, within=budget, pool=self._pool
        )
        is_known = False
        try:
            with closing(benchmark.run()) as run:
                for progress in run:
                    here = guard.in_progress()
                    paused_s = here.paused_s if here else 0.0
                    so_far = self.tuning.so_far(benchmark.result())
                    text = progress.text.removeprefix(f"{BUSY}; " if so_far else "")
                    yield Progress(budget.share, f"{so_far}{title}: {text}", progress.known)
                    if here:  # turns that were given up
                        budget.exclude(here.paused_s - paused_s)
                    times_s = benchmark.result().baseline.times_s
                    # Where memory is kept the step is not the user's.
                    if not (is_known or heap.is_kept()) and len(times_s) >= races.RACE_ROUNDS:
                        is_known = True
                        budget.follow(times_s, bool(benchmark.result().busy))
        finally:
            self.tuning.compiling_s += benchmark.budget.excluded_s
            comparison = benchmark.result()
            budget.follow(is_busy=bool(comparison.busy))
            if benchmark.has_results():
                self.known.stages.append(Stage(title, comparison))
        return comparison

    def _keep(self, seen: learning.TaskFacts) -> None:
        """Remember the plan, or that nothing helps; not if what was to be kept may help."""
        tuning, winner = self.tuning, self.tuning.winner
        if tuning.helped or not (tuning.unclear or tuning.kept):
            plans = [planning.plan(tuning.config, self.hardware, one) for one in seen.facts]
            about = (seen.setting, seen.task, planning.together(plans), winner.values, winner.name)
            proof = (tuning.proven, self._bundle(), bool(tuning.where))
            try:
                learning.keep(*about, *proof)
            except SpeedKitError as error:
                tuning.notes.append(f"the plan was not kept for the next time: {error}")

    def _bundle(self) -> dict[str, Any] | None:
        """Keep the winner's compiled code, if it has some; return its manifest."""
        winner = self.tuning.winner
        if not winner.values.get("compile"):
            return None
        rows = [row.record for row in self.known.rows() if row.record.name == winner.name]
        cold_s = max((one.first_call_s or 0.0 for one in rows), default=0.0)
        return bundles.collect(self.step, self.tuning.config, cold_s, self._step_facts)
