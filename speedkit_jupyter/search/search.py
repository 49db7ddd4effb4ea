"""The search: the strongest combination and variations of the best race; the winner is proven.

A race chooses by successive halving and proves nothing. The plan that leads is confirmed against
the baseline in fresh rounds, next to the plan without each of its parts: a figure must not win by
luck, nor a part stay for nothing. A plan that was learned for this very step is only confirmed.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from speedkit_jupyter.catalog.compile import Compile, expected_s, whole_model_s
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans import planning
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.pool import Pool, pooled
from speedkit_jupyter.rounds.sampler import Policy, Progress
from speedkit_jupyter.rounds.statistics import BUSY
from speedkit_jupyter.search import bundles, learning, races
from speedkit_jupyter.search.candidates import (
    BASELINE,
    BESIDE,
    Candidate,
    candidates,
    first_plans,
    in_catalog,
)
from speedkit_jupyter.search.knowledge import SearchState, Stage
from speedkit_jupyter.search.objective import (
    FEW_ROUNDS,
    NARROW,
    best_of,
    check_aim,
    is_out,
    leader,
    leads_by,
    row_of,
)
from speedkit_jupyter.search.outcome import INTERRUPTED, MEMORY, Tuning
from speedkit_jupyter.state import guard
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import Variant
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.torchglue import heap

# The races that choose: one of the machine's suggestions, the others of variations of the best.
MOST_RACES = 3
# A plan that promises less than this share of the best one's speed does not race with it: it would
# leave at once (races.RACE_BEHIND).
PROMISING = 0.8
# Matrix-multiply libraries are measured, for at most races.RACE of the budget, if it has this many
# seconds: measuring takes two.
LIBRARIES_S = 8.0


class PlanSearch:
    """Drain `run()`, then read `result()`; closing the generator keeps the result so far.

    The arguments are the ones of `tune`, the `known` plans of an earlier search, and the names of
    the models in the notebook (`named`). The budget begins when the search runs, or at `begun_s` on
    the clock. Raises StepError.
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
        named: tuple[str, ...] = (),
    ) -> None:
        check_aim(objective, within, steps)
        kept = in_catalog(keep)
        if not step.models:
            raise StepError(step.why_no_model("tune"))
        Benchmark(step, [Variant("baseline")], budget_s)  # raises for what can't be measured
        self.step, self.hardware = step, Hardware.current()
        self._goes_on, self._fresh = known is not None, fresh or known is not None
        known = deepcopy(known) if known else SearchState()  # the earlier result stays as it is
        self.tuning = Tuning(step, objective, within, steps, kept, named, known)
        self.known, self.aim = self.tuning.known, self.tuning.wanted
        self.known.wait_again()
        self.begun_s: float | None = None
        self._pool: Pool | None = None
        self._beside = BASELINE  # the part of every plan that is tried
        self._budget_s, self.budget = budget_s, races.Allowance(budget_s)
        self._compile_s, self._whole_s = races.COMPILE_S, 0.0

    @classmethod
    def going_on(
        cls, step: Step, earlier: Tuning, budget_s: float | None, named: tuple[str, ...]
    ) -> PlanSearch:
        """Return a search that goes on with all that an earlier one knows; raises StepError."""
        if not earlier.is_of(step.models):
            why = "the earlier search was for another model; search anew for this one"
            raise StepError(f"more: {why}")
        asked = (earlier.steps, earlier.objective, False, earlier.kept, earlier.within)
        return cls(step, budget_s, *asked, known=earlier.known, named=named)

    def result(self) -> Tuning:
        return self.tuning

    @property
    def _warm(self) -> Collection[str]:
        """Return the names of the plans that are warmed up."""
        return () if self._pool is None else self._pool.runners

    @property
    def _least(self) -> float:
        """Return the share of the best plan's speed that a plan must promise to be proven too."""
        return NARROW if self.budget.steps_are_long else 0.0

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
                MEMORY.keep(tuning)
        if tuning.learned is None or "process" in tuning.learned.value:
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
        seen, self._step_facts = reader.facts(first.facts.made), first.facts
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
        row = self.known.row_of(plan)
        is_refuted = row is not None and not (row.is_likely(self.aim) or row.is_undecided)
        if is_refuted:
            with suppress(SpeedKitError):  # a store that can't be written is no reason to stop
                database.unlearn([learned.number])
        outcome = "was dropped" if is_refuted else "could not be checked"
        tuning.notes.append(f"The learned plan {plan.name} {outcome}")
        tuning.learned = None

    def _prove_likely(self) -> Iterator[Progress]:
        """Prove the best plan of an earlier search, then its likely ones, until one is proven."""
        known, asked = self.known, set[str]()
        while (best := known.best(self.aim)) and (
            best.is_likely(self.aim) or (not asked and self._goes_on and best.may_help)
        ):
            if self.tuning.helped or best.name in asked or not self.budget.can_check():
                return
            asked.add(best.name)
            yield from self.prove(known.plans[best.name])

    def _search(self, facts: Sequence[Facts]) -> Iterator[Progress]:
        """Race the candidates and prove the leaders, until a plan is proven or time is out."""
        tuning, known, budget = self.tuning, self.known, self.budget
        self._compile_s = max(expected_s(one, Compile.default) or races.COMPILE_S for one in facts)
        self._whole_s = 0.0 if self.aim.memory else max(map(whole_model_s, facts))
        singles = candidates(self.hardware, facts[0], tuning.kept, facts[1:], tuning.objective)
        self._beside = next((one for one in singles if BESIDE in one.values), BASELINE)
        first = self._worth_trying(first_plans(singles, budget.steps_are_long))
        waiting = {plan.name: plan for plan in (*known.left, *first)}
        known.left, proven = [*waiting.values()], set[str]()
        if self._goes_on:
            known.drop_known()
        while known.left and not tuning.helped and budget.allows(budget.step_s):
            is_tight = self._whole_s and budget.steps_are_long  # the whole model needs time, too
            room = max(min(budget.room(), 2 if is_tight else races.MOST_CANDIDATES), 1)
            asked, known.left = known.left[:room], known.left[room:]
            best = yield from self._raced(asked, singles)
            known.drop_known()
            if known.left and not self.aim.memory and known.was_no_faster(best):
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
        first, rest = known.left[:4], known.left[4:]
        if first and not tuning.helped:
            listed = ", ".join(plan.name for plan in first) + f" and {len(rest)} more" * bool(rest)
            tuning.notes.append(f"Left out, since the budget is short: {listed}")

    def _measure_libraries(self) -> Iterator[Progress]:
        """Measure the libraries that multiply matrices, once for a machine."""
        budget, notes, known = self.budget, self.tuning.notes, self.hardware.cpu.gemm
        is_cpu = Facts.read(self.step.models[0]).device_type == "cpu"
        is_short = budget.seconds < LIBRARIES_S
        if not is_cpu or known is not None or self.hardware.pinned or is_short:
            return
        doing = "measuring this machine's matrix-multiply libraries, once"
        yield Progress(budget.share, doing)
        begun_s = clock.now()
        self.hardware = self.hardware.with_gemm(races.RACE * budget.seconds)
        took_s, rates = clock.now() - begun_s, self.hardware.cpu.gemm
        if rates is not None and rates.failure:
            notes.append(f"gemm was not tried: {rates.failure}")
        elif took_s > 0.5:  # less where they were measured already
            notes.append(f"{took_s:.1f} s went into {doing}")

    def _worth_trying(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """Return each consistent plan that can pay, once; note why the others can't."""
        plans = [plan + self._beside for plan in plans]
        able = {plan.name: plan for plan in plans if plan.values and plan.is_consistent}
        if not (why := self.budget.why_not_compiled(self._compile_s, self.tuning.steps)):
            return list(able.values())
        for plan in filter(lambda plan: plan.costly, able.values()):
            self.known.refuse(plan.name, why)
        return [plan for plan in able.values() if not plan.costly]

    def _compiled_whole(self, plan: Candidate) -> list[Candidate]:
        """Return the plan with the whole model compiled, where that is new and may pay."""
        whole = self.known.compiled_whole(plan + self._beside) if self._whole_s else []
        why = self.budget.why_not_compiled(self._whole_s, self.tuning.steps, is_whole=True)
        if whole and why:
            self.known.refuse(whole[0].name, why)
        return [] if why else whole

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
            allowance, within = self.budget, self.aim.within
            policy = (
                races.Lightest(allowance, within) if self.aim.memory else races.PlanRace(allowance)
            )
            # If each plan keeps memory the baseline does too: toggling that is slow, and noisy.
            is_kept = all(BESIDE in plan.values for plan in asked)
            with heap.kept() if is_kept else nullcontext():
                comparison = yield from self._benchmark(title, asked, policy)
            best = best_of(self.aim, comparison, asked)
            for plan in asked:
                if plan.name != best.name:
                    why = self.aim.why_not(comparison, row_of(comparison, plan), best.name)
                    known.refuse(plan.name, why)
            is_long = self.budget.steps_are_long
            if not best.values or (is_long and leads_by(races.HOPELESS, comparison, best)):
                near = []  # its parts and variations are not worth their time
            elif best.name != leads.name:
                least = 0.0 if self.aim.memory else self._least or PROMISING
                near = known.best_first(self._warm, best, best.neighbours(singles), least)
                near = self._worth_trying(near)
            leads, title = best if best.values else leads, "variations of the best"
            new = [*self._compiled_whole(leads), *filter(known.is_new, near)]
            new = new[: max(self.budget.room() - 1, 0)]
            if not new:
                break
            asked = [plan for plan in (leads, *new) if plan.values]
        return leads

    def prove(
        self, whole: Candidate, title: str = "confirming", with_parts: bool = True
    ) -> Iterator[Progress]:
        """Measure a plan in rounds that took no part in choosing it.

        Next to it run the plan without each of its parts, the next best plans, and plans that
        people write by hand; where steps are long, only plans that are warm.
        """
        known, warm, others = self.known, self._warm, list[Candidate]()
        if with_parts:
            near = [*whole.without_each(), *known.rivals()]
            others = known.best_first(warm, whole, near, self._least)
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
            is_plain = gains[whole.name] > 1 or why.startswith("not proven")
            known.refuse(whole.name, why if is_plain else f"not proven: {why}")
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
                    # While memory is kept the step is not the user's.
                    if not (is_known or heap.is_kept()) and len(times_s) >= FEW_ROUNDS:
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
        """Remember the plan, or that nothing helps; not where a kept optimization may help."""
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
        row = self.known.row_of(winner)
        cold_s = row.record.first_call_s or 0.0 if row else 0.0
        return bundles.collect(self.step, self.tuning.config, cold_s, self._step_facts)
