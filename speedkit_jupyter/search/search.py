"""The search: the strongest combination and variations of the best race; the winner is proven.

A race chooses by successive halving and proves nothing. The plan that leads is confirmed against
the baseline in fresh rounds, next to the plan without each of its parts: a figure must not win by
luck, nor a part stay for nothing. A plan that was learned for this very step is only confirmed.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace

from speedkit_jupyter.catalog.compile import whole_model_s
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans import planning
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.runner import Pool, pooled
from speedkit_jupyter.rounds.sampler import Policy, Progress
from speedkit_jupyter.rounds.statistics import SAME
from speedkit_jupyter.search import learning, objective, races
from speedkit_jupyter.search.candidates import (
    ALWAYS,
    BASELINE,
    WHOLE,
    Candidate,
    candidates,
    first_plans,
    in_catalog,
)
from speedkit_jupyter.search.knowledge import Stage
from speedkit_jupyter.search.outcome import INTERRUPTED, MEMORY, Tuning
from speedkit_jupyter.state import guard
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import Variant
from speedkit_jupyter.support import database, units
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.torchglue import heap

# Number of races that choose: the first of suggested plans, the others of variants of the best.
MOST_RACES = 3
# Compiled blocks tie with the plan without compiling if they have this share of its speed: a ViT's
# had 0.976, where the whole model led by 1.04×, and three rounds are off by some 2 %.
BLOCKS_TIE = 0.93


class PlanSearch:
    """Drain `run()`, then read `result()`; closing the generator keeps the result so far.

    The arguments are those of `tune`; `named` and `to_apply` are as in a Tuning. The budget
    begins when the search runs, or at `begun_s` on the clock. Raises StepError.
    """

    def __init__(
        self,
        step: Step,
        budget_s: float | None = None,
        fresh: bool = False,
        keep: Collection[str] = (),
        named: tuple[str, ...] = (),
        to_apply: bool = False,
        begun_s: float | None = None,
    ) -> None:
        if not step.models:
            raise StepError(step.why_no_model("tune"))
        Benchmark(step, [Variant("baseline")], budget_s)  # raises for what can't be measured
        self.step, self.hardware = step, Hardware.current()
        self._fresh = fresh
        self.tuning = Tuning(step, in_catalog(keep), named, to_apply)
        self.known = self.tuning.known
        self.begun_s = begun_s
        self._pool: Pool | None = None
        self._always = BASELINE  # the part of every plan that is tried
        self._whole_s = 0.0  # what compiling the whole model takes in place of its blocks
        self._budget_s, self.budget = budget_s, races.Allowance(budget_s)

    def result(self) -> Tuning:
        return self.tuning

    @property
    def _warm(self) -> Collection[str]:
        return () if self._pool is None else self._pool.runners

    @property
    def _least(self) -> float:
        """Return the share of the best plan's speed that a plan must promise to be proven too."""
        return objective.NARROW if self.budget.steps_are_long else 0.0

    def has_results(self) -> bool:
        return self.budget.step_s > 0

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        tuning, start_s, why = self.tuning, clock.now(), INTERRUPTED
        self.budget = races.Allowance(self._budget_s, self.begun_s)
        try:
            yield from self._measure_libraries()
            yield Progress(self.budget.share, "looking at one step")
            with pooled(self.step, races.MOST_CANDIDATES) as self._pool:
                seen = self._read_step(self._pool)
                yield Progress(self.budget.share, self.budget.ahead())
                if tuning.learned is not None:
                    yield from self._check_learned(tuning.learned)
                if not tuning.helped:
                    yield from self._search(seen.facts)
            why = self.known.why_unclear(self.budget.step_s)
        finally:
            self._pool = None
            tuning.conclude(why, clock.now() - start_s)
            if self.has_results():
                MEMORY.last = tuning
            if tuning.is_settled:
                MEMORY.keep(tuning)
        if tuning.learned is None and not tuning.where:
            self._keep(seen)

    def _read_step(self, pool: Pool) -> learning.TaskFacts:
        """Return the facts of a step; note its seconds, and the plan that was learned for it."""
        tuning, budget = self.tuning, self.budget
        budget.reserved_s = pool.guard.taking_s
        reader = learning.StepReader(self.step, self.hardware)
        one = Benchmark(self.step, [BASELINE.variant()], within=budget, pool=pool)
        for _ in one.warm_up(pool, reader.watching):
            pass
        tuning.compiling_s += one.budget.excluded_s
        first = pool.runners[BASELINE.name]
        seen = reader.facts(first.facts.made)
        budget.follow(first.recent_s or [first.step_s], first.was_disturbed)
        if seen.autocast and "precision" not in tuning.kept:
            tuning.kept += ("precision",)
            tuning.notes.append("The step enters an autocast of its own: no other one was tried")
        task = replace(seen.task, kept=tuning.kept)
        learned = None if self._fresh else learning.find(seen.setting, task)
        step_s, fresh = first.usual_s, first.fresh_bytes.get(False, 0)
        facts = [replace(one, step_s=step_s, fresh_bytes=fresh) for one in seen.facts]
        if learned is not None and learned.value["values"]:  # where nothing helped, search again
            tuning.learned = learned
        return seen._replace(task=task, facts=facts)

    def _check_learned(self, learned: database.Kept) -> Iterator[Progress]:
        plan, tuning = Candidate(learned.value["values"]), self.tuning
        yield from self.prove(plan, "checking the learned plan", with_parts=False)
        if tuning.helped:
            told = f"Learned before ({units.day(learned.saved_at)}) and checked again now"
            tuning.notes.append(f"{told}; --fresh searches again.")
            return
        row = self.known.row_of(plan)
        is_refuted = row is not None and not (row.is_likely or row.is_undecided)
        if is_refuted:
            with suppress(SpeedKitError):  # a store that can't be written is no reason to stop
                database.unlearn([learned.number])
        outcome = "was dropped" if is_refuted else "could not be checked"
        tuning.notes.append(f"The learned plan {plan.name} {outcome}")
        tuning.learned = None

    def _search(self, facts: Sequence[Facts]) -> Iterator[Progress]:
        """Race the candidates and prove the leaders, until a plan is proven or time is out."""
        tuning, known, budget = self.tuning, self.known, self.budget
        self._whole_s = max(map(whole_model_s, facts))
        singles = candidates(self.hardware, facts[0], tuning.kept, facts[1:])
        self._always = next((one for one in singles if ALWAYS in one.values), BASELINE)
        known.left = self._worth_trying(first_plans(singles, budget.steps_are_long))
        proven = set[str]()
        while known.left and not tuning.helped and budget.allows(budget.step_s):
            is_tight = self._whole_s and budget.steps_are_long  # the whole model needs time, too
            room = max(min(budget.room(), 2 if is_tight else races.MOST_CANDIDATES), 1)
            asked, known.left = known.left[:room], known.left[room:]
            best = yield from self._raced(asked, singles)
            known.drop_known()
            row = known.row_of(best)
            if known.left and row and row.ratio.median <= 1 + SAME:
                known.left = known.best_first(self._warm, BASELINE, known.left)
                continue  # a plan that lost narrowly is worth a proof only where nothing else waits
            if best.values and best.name not in proven:
                proven.add(best.name)
                yield from self.prove(best)
                if best in known.refused:  # the plans that lost to it may be right
                    known.left = [*asked, *known.left]
                    for plan in asked:
                        known.tried.pop(plan.name, None)
            known.drop_known()
            if budget.proof_s(races.ALONE) > budget.left_s:  # nothing more could be proven
                break
        for plan in known.left:
            known.refuse(plan.name, "left out, since the budget is short")

    def _measure_libraries(self) -> Iterator[Progress]:
        """Measure the libraries that multiply matrices, once for a machine."""
        budget, notes, known = self.budget, self.tuning.notes, self.hardware.cpu.gemm
        is_cpu = Facts.read(self.step.models[0]).device_type == "cpu"
        most_s = races.RACE * budget.seconds  # of the two that measuring takes
        if not is_cpu or known is not None or self.hardware.pinned or most_s < 2:
            return
        doing = "measuring this machine's matrix-multiply libraries, once"
        yield Progress(budget.share, doing)
        self.hardware = self.hardware.with_gemm(most_s)
        rates = self.hardware.cpu.gemm
        if rates is not None and rates.failure:
            notes.append(f"gemm was not tried: {rates.failure}")

    def _worth_trying(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """Return each consistent plan that can pay, once; note why the others can't."""
        plans = [plan + self._always for plan in plans]
        able = {plan.name: plan for plan in plans if plan.values and plan.is_consistent}
        if why := self.budget.why_not_compiled():
            for plan in [plan for plan in able.values() if plan.costly]:
                self.known.refuse(able.pop(plan.name).name, why)
        return list(able.values())

    def _compiled_whole(self, plan: Candidate) -> list[Candidate]:
        """Return the plan with the whole model compiled, if that is new and may pay, and compiled
        blocks tied with the plan without compiling, or led; else nothing.
        """
        known, whole = self.known, (plan + self._always).joined(WHOLE)
        gain = known.gains_of_parts().get("compile", 0.0)
        if not self._whole_s or gain < BLOCKS_TIE or not known.is_new(whole):
            return []
        if why := self.budget.why_not_compiled(self._whole_s):
            known.refuse(whole.name, why)
        return [] if why else [whole]

    def _raced(
        self, asked: Sequence[Candidate], singles: Sequence[Candidate]
    ) -> Generator[Progress, None, Candidate]:
        """Return the plan that leads its variations, or lost narrowly; BASELINE without one."""
        known, leads, title = self.known, BASELINE, "the machine's suggestions"
        near = list[Candidate]()
        for _ in range(MOST_RACES):
            known.tried |= {plan.name: plan for plan in asked}
            leads = asked[0] if len(asked) == 1 else leads
            if len(asked) == 1 and not (self._whole_s and leads.values.get("compile") is True):
                return leads  # it has only to be proven
            # If each plan keeps memory the baseline does too: toggling that is slow, and noisy.
            is_kept = all(ALWAYS in plan.values for plan in asked)
            with heap.kept() if is_kept else nullcontext():
                comparison = yield from self._benchmark(title, asked, races.PlanRace(self.budget))
            best = objective.best_of(comparison, asked)
            for plan in asked:
                if plan.name != best.name:
                    why = objective.why_not(
                        comparison, objective.row_of(comparison, plan), best.name
                    )
                    known.refuse(plan.name, why)
            if not best.values:
                near = []
            elif best.name != leads.name:
                least = self._least or 1 / races.RACE_BEHIND  # others would leave at once
                near = known.best_first(self._warm, best, best.neighbours(singles), least)
                near = self._worth_trying(near)
            leads, title = best if best.values else leads, "variations of the best"
            new = [*self._compiled_whole(leads), *filter(known.is_new, near)]
            new = new[: max(self.budget.room() - bool(leads.values), 0)]
            if not new:
                break
            asked = [plan for plan in (leads, *new) if plan.values]
        return leads

    def prove(
        self, whole: Candidate, title: str = "confirming", with_parts: bool = True
    ) -> Iterator[Progress]:
        """Measure a plan in rounds that took no part in choosing it, next to the plan without each
        of its parts, the next best plans and plans that people write by hand; where steps are long,
        only to plans that are warm.
        """
        known, warm, others = self.known, self._warm, list[Candidate]()
        if with_parts:
            near = [*whole.without_each(), *known.rivals()]
            others = known.best_first(warm, whole, near, self._least)
            others = [one for one in others if one.name in warm or not self._least]
        plans = [*{plan.name: plan for plan in (whole, *others)}.values()]
        known.tried |= {plan.name: plan for plan in plans}
        policy = races.Proof(plans, self.budget.steps_are_long)
        comparison = yield from self._benchmark(title, plans, policy)
        rows = {plan.name: objective.row_of(comparison, plan) for plan in plans}
        known.refused += [plan for plan in plans if objective.is_out(comparison, rows[plan.name])]
        gains = {
            name: objective.gain_of(comparison, row, proven=True) for name, row in rows.items()
        }
        best = objective.leader(plans, gains)
        if best is not whole or gains[best.name] <= 1:
            why = objective.why_not(comparison, rows[whole.name], best.name)
            known.refuse(whole.name, f"not proven: {why.removeprefix('not proven faster: ')}")
        if gains[best.name] > 1:
            self.tuning.take(best, comparison)

    def _benchmark(
        self, title: str, asked: Sequence[Candidate], policy: Policy
    ) -> Generator[Progress, None, Comparison]:
        """Compare the baseline and these plans: a stage of the result, also if cut short."""
        variants, budget = [plan.variant() for plan in (BASELINE, *asked)], self.budget
        if self._pool is not None:
            first, *_ = asked
            kept = (BASELINE, *asked, *first.without_each(), *self.known.rivals())
            self._pool.keep({plan.name for plan in kept}, {variant.name for variant in variants})
        left_s = max(budget.left_s, 0.01)
        benchmark = Benchmark(
            self.step, variants, left_s, policy=policy, within=budget, pool=self._pool
        )
        try:
            with closing(benchmark.run()) as run:
                for progress in run:
                    here = guard.in_progress()
                    paused_s = here.paused_s if here else 0.0
                    yield Progress(budget.share, f"{title}: {progress.text}", progress.known)
                    if here:  # turns that were given up
                        budget.exclude(here.paused_s - paused_s)
                    times_s = benchmark.result().baseline.times_s
                    # While memory is kept the step is not the user's.
                    if len(times_s) == objective.FEW_ROUNDS and not heap.is_kept():
                        budget.follow(times_s, bool(benchmark.result().busy))
        finally:
            self.tuning.compiling_s += benchmark.budget.excluded_s
            comparison = benchmark.result()
            budget.follow(is_busy=bool(comparison.busy))
            if benchmark.has_results():
                self.known.stages.append(Stage(title, comparison))
        return comparison

    def _keep(self, seen: learning.TaskFacts) -> None:
        """Remember the plan, or that nothing helps; not where a kept optimization may help."""
        tuning, winner = self.tuning, self.tuning.winner
        if tuning.helped or not (tuning.unclear or tuning.kept):
            plans = [planning.plan(tuning.config, self.hardware, one) for one in seen.facts]
            about = (seen.setting, seen.task, planning.together(plans), winner.values, winner.name)
            try:
                learning.keep(*about, tuning.ratio)
            except SpeedKitError as error:
                tuning.notes.append(f"the plan was not kept for the next time: {error}")
