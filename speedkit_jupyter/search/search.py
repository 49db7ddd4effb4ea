"""Search for a plan: short races choose a plan, and a proof in fresh rounds decides.

A race times several plans in the same rounds and drops slow plans. The fastest plan may win by
luck, and some of its parts may add nothing, so a proof follows. A learned plan is proven first;
races follow if this fails. Races are Benchmarks with the policy `PlanRace`, proofs with `Proof`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace

import torch

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.compile import whole_model_s
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans import planning
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S, Budget
from speedkit_jupyter.rounds.comparison import Comparison, Progress, drained
from speedkit_jupyter.rounds.pool import Pool, pooled
from speedkit_jupyter.rounds.sampler import Policy
from speedkit_jupyter.rounds.statistics import SAME
from speedkit_jupyter.search import candidates, learning, races, thresholds
from speedkit_jupyter.search.candidates import BASELINE, Candidate
from speedkit_jupyter.search.outcome import INTERRUPTED, MEMORY, Tuning
from speedkit_jupyter.search.races import Proof
from speedkit_jupyter.search.tried_plans import Stage, TimedPlan
from speedkit_jupyter.step.step import Step, step_of
from speedkit_jupyter.support import arguments, database, units
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.torchglue import heap
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code

# Phase numbers, as shown in a search's progress.
FIRST_STEP, RACING, PROVING = range(1, 4)


class PlanSearch:
    """Search for a plan: exhaust or close `run()`, then read the result so far from `result()`.

    Arguments and errors are as in `tune`. The budget begins at `begun_s`, by default with `run`.
    """

    def __init__(
        self,
        step: Step,
        budget_s: float | None = None,
        fresh: bool = False,
        keep: Collection[str] = (),
        begun_s: float | None = None,
        at_most_s: float | None = None,
    ) -> None:
        step.refuse_unfit("tune")
        arguments.seconds("budget_s", budget_s)
        every = [entry.name for entry in CATALOG]
        if unknown := [name for name in keep if name not in every]:
            there_are = f"there are {', '.join(every)}"
            raise StepError(f"keep: no optimization {unknown[0]!r:.100}; {there_are}")
        self.step, self.hardware, self._fresh = step, Hardware.current(), fresh
        self.tuning = Tuning(step, tuple(name for name in every if name in keep))
        self.tried, self.begun_s, self._compiling_s = self.tuning.tried, begun_s, 0.0
        self._at_most_s = at_most_s
        self._budget_s, self.budget = budget_s, races.SearchBudget(budget_s)
        self._pool: Pool | None = None
        self._always = BASELINE  # joined to every plan that races
        self._whole_s = 0.0  # estimated seconds of compiling the whole model instead of blocks
        self._phase = FIRST_STEP

    def result(self) -> Tuning:
        return self.tuning

    def has_results(self) -> bool:
        return self.budget.step_s > 0

    def run(self) -> Generator[Progress, None, None]:
        """Prove the learned plan, if there is one; otherwise search, and store the answer."""
        tuning, start_s, why = self.tuning, clock.now(), INTERRUPTED
        begun_s = start_s if self.begun_s is None else self.begun_s
        try:
            yield from self._measure_libraries()
            yield self._progress(FIRST_STEP, "looking at one step")
            with pooled(self.step, thresholds.MOST_CANDIDATES) as self._pool:
                guard = self._pool.guard  # pauses for other cells don't count
                now = lambda: clock.now() - guard.paused_s  # noqa: E731
                self.budget = races.SearchBudget(self._budget_s, begun_s, now, guard.taking_s)
                seen = self._read_step(self._pool)
                step_s, about_s = self.budget.step_s, self.budget.seconds
                ahead = f"one step takes {step_s:.2g} s: about {about_s:.0f} s, more for compiling"
                yield self._progress(FIRST_STEP, ahead)
                learned = None if self._fresh else learning.find(seen.setting, seen.task)
                if learned is not None and learned.value["values"]:  # empty if nothing helped
                    yield from self._check_learned(learned)
                waiting = [] if tuning.helped else (yield from self._search(seen.facts))
            why = self.tried.why_unclear(step_s, waiting)
        finally:
            self._pool = None
            tuning.conclude(why, clock.now() - start_s, self._compiling_s)
            if self.has_results():
                MEMORY.add(tuning)
        if tuning.learned is None and not (tuning.where or self._at_most_s):
            self._store(seen)

    def _progress(self, phase: int, text: str, known: Comparison | None = None) -> Progress:
        """Return the progress, whose phase never decreases."""
        self._phase = max(self._phase, phase)
        return Progress(self.budget.share, f"phase {self._phase} of {PROVING}, {text}", known)

    def _measure_libraries(self) -> Iterator[Progress]:
        """Measure the CPU's matrix-multiply rates, unless they are known or time is short."""
        is_cpu = Facts.read(self.step.models[0]).device_type == "cpu"
        is_known = self.hardware.pinned or self.hardware.cpu.gemm is not None
        most_s = thresholds.RACE_SHARE * self.budget.seconds
        if not is_cpu or is_known or most_s < 2:  # measuring takes two seconds
            return
        yield self._progress(FIRST_STEP, "measuring this machine's matrix-multiply libraries, once")
        self.hardware = self.hardware.with_gemm(most_s)
        rates = self.hardware.cpu.gemm
        if rates is not None and rates.failure:
            self.tuning.notes.append(f"gemm was not tried: {rates.failure}")

    def _read_step(self, pool: Pool) -> learning.TaskFacts:
        """Warm up the baseline, fit the budget to its steps, and return the facts of the step."""
        tuning, budget = self.tuning, self.budget
        reader = learning.StepReader(self.step, self.hardware)
        part = Budget(DEFAULT_BUDGET_S, within=budget)
        deque(pool.baseline([BASELINE.variant()], part, reader.watching), maxlen=0)
        self._compiling_s += part.excluded_s
        first = pool.runners[BASELINE.name]
        seen = reader.facts(first)
        budget.follow(first.recent_s or [first.step_s], first.was_disturbed)
        if seen.autocast and "precision" not in tuning.kept:
            tuning.kept += ("precision",)
            tuning.notes.append("The step uses its own autocast: no other precision was tried")
        return seen._replace(task=replace(seen.task, kept=tuning.kept))

    def _check_learned(self, learned: database.Kept) -> Iterator[Progress]:
        """Prove a learned plan again and note the outcome; remove a refuted plan from the store."""
        plan, tuning = Candidate(learned.value["values"]), self.tuning
        yield from self.prove(plan, learned=True)
        if tuning.helped:
            told = f"Learned before ({units.day(learned.saved_at)}) and checked again now"
            tuning.notes.append(f"{told}; --fresh searches again.")
            tuning.learned = learned
            return
        row = self.tried.row_of(plan)
        self.tried.raced.discard(plan.name)  # it may race again
        is_refuted = row is not None and not (row.is_likely or row.is_undecided)
        if is_refuted:
            with suppress(SpeedKitError):  # an unwritable store must not stop the search
                database.unlearn([learned.number])
        outcome = "was dropped" if is_refuted else "could not be checked"
        tuning.notes.append(f"The learned plan {plan.name} {outcome}")

    def _search(self, facts: Sequence[Facts]) -> Generator[Progress, None, list[Candidate]]:
        """Race candidates and prove leaders, until a plan is proven, or time or plans run out.

        Returns the plans that did not race because time ran out or another plan was proven.
        """
        tried, budget = self.tried, self.budget
        self._whole_s = max(map(whole_model_s, facts))
        singles = candidates.candidates(self.hardware, facts, self.tuning.kept)
        self._always = next((one for one in singles if candidates.ALWAYS in one.values), BASELINE)
        waiting = self._worth_trying(candidates.first_plans(singles, budget.steps_are_long))
        while waiting and not self.tuning.helped and budget.allows(budget.step_s):
            is_tight = self._whole_s and budget.steps_are_long  # the whole model compiles slowly
            room = max(min(budget.room(), 2 if is_tight else thresholds.MOST_CANDIDATES), 1)
            asked, waiting = waiting[:room], waiting[room:]
            best = yield from self._race(asked, singles)
            waiting = list(filter(tried.is_new, waiting))
            row = tried.row_of(best)
            if waiting and row and row.ratio.median <= 1 + SAME:
                waiting = tried.best_first(BASELINE, waiting)
                continue  # a plan without a gain is worth a proof only if no plan is waiting
            if best.values:
                yield from self.prove(best)
                if best in tried.refused:  # plans that lost to `best` race again
                    tried.raced.difference_update(plan.name for plan in asked)
                    waiting = [*asked, *waiting]
                waiting = list(filter(tried.is_new, waiting))
            if budget.proof_s > budget.left_s:  # no time for another proof
                break
        seen = None if waiting or self.tuning.helped else tried.best()
        has_time = budget.proof_s <= budget.left_s
        if seen and has_time and seen.range[1] >= thresholds.LEAST_WORTH_FINDING:
            yield from self.prove(tried.plans[seen.name])  # few rounds may have underrated it
        why = "a faster plan is proven" if self.tuning.helped else "the budget is short"
        for plan in waiting:
            tried.set_reason(plan.name, f"left out, since {why}")
        return waiting

    def _worth_trying(self, near: Iterable[Candidate]) -> list[Candidate]:
        """Join plans with `_always`; return the new plans, except those that compile too long."""
        plans = {plan.name: plan for plan in (one + self._always for one in near) if plan.values}
        able, given_s, whole = [], self._budget_s, candidates.WHOLE.values.items()
        is_long = self._whole_s > max(thresholds.MOST_WHOLE_S, self.budget.seconds)
        for plan in filter(self.tried.is_new, plans.values()):
            if is_long and whole <= plan.values.items():
                takes = f"compiling the whole model takes about {self._whole_s:.0f} s"
                why = f"{takes}: --budget {math.ceil(self._whole_s)} tries it"
                self.tried.set_reason(plan.name, why)
            elif plan.costly and given_s and given_s < thresholds.LEAST_COMPILING_S:
                takes = f"compiling takes over {units.seconds(given_s)}"
                self.tried.set_reason(plan.name, f"{takes}: --budget 30 tries it")
            else:
                able.append(plan)
        return able

    def _race(
        self, asked: Sequence[Candidate], singles: Sequence[Candidate]
    ) -> Generator[Progress, None, Candidate]:
        """Race plans, then variations of the best as time allows; return the best, or BASELINE.

        `tried` gets reasons against other plans. A single plan races only if it compiles blocks.
        """
        tried, best, title = self.tried, BASELINE, "racing the suggested plans"
        for _ in range(thresholds.MOST_RACES):
            tried.add(asked)
            if len(asked) == 1 and not (self._whole_s and asked[0].costly):
                return asked[0]  # a single plan only needs a proof
            # If all plans keep freed memory, so does the baseline: rounds needn't toggle the flag.
            is_kept = all(candidates.ALWAYS in plan.values for plan in asked)
            policy = races.PlanRace(self.budget)
            with heap.kept() if is_kept else nullcontext():
                comparison = yield from self._measured(RACING, title, asked, policy)
            leads = races.leader_of_race(comparison, asked)
            for plan in [plan for plan in asked if plan is not leads]:
                tried.set_reason(plan.name, TimedPlan.of(comparison, plan).why_not(leads.name))
            best, near = leads if leads.values else best, list[Candidate]()
            # Compiling the whole model comes first if compiled blocks were not clearly slower.
            compiled = tried.gains_of_parts().get("compile", 0.0)
            if self._whole_s and compiled >= thresholds.MAY_BE_BEST:
                near.append(best.joined(candidates.WHOLE))
            if best.values:
                least = 1 / thresholds.CLEARLY_SLOWER  # slower plans would be dropped
                row, most_s = tried.row_of(best), thresholds.RACE_SHARE * self.budget.seconds
                compiles = row is not None and (row.record.first_call_s or 0.0) <= most_s
                near += tried.best_first(best, best.neighbours(singles), least, compiles)
            room = max(self.budget.room() - bool(best.values), 0)
            if not (new := self._worth_trying(near)[:room]):
                break
            title, asked = "racing variations of the best", [p for p in (best, *new) if p.values]
        return best

    def prove(self, whole: Candidate, learned: bool = False) -> Iterator[Progress]:
        """Prove a plan in fresh rounds, set a proven winner, and add refused plans to `tried`.

        Unless the plan is `learned`, other plans are timed, too, and may win: the plans that lack
        one of its parts, and the best plans so far. If steps are long, only plans that have raced
        and may be the best are timed.
        """
        tried, is_long, others = self.tried, self.budget.steps_are_long, list[Candidate]()
        if not learned:
            near = [*whole.without_each(), *tried.rivals()]
            others = tried.best_first(whole, near, thresholds.MAY_BE_BEST if is_long else 0.0)
            others = [one for one in others if one.name in tried.raced or not is_long]
        plans = [*{plan.name: plan for plan in (whole, *others)}.values()]
        tried.add(plans)
        phase, title = PROVING, "proving the best plan"
        if learned:
            phase, title = FIRST_STEP, "checking the learned plan"
        comparison = yield from self._measured(phase, title, plans, Proof(plans, self.budget))
        rows = {plan.name: TimedPlan.of(comparison, plan) for plan in plans}
        tried.refused.extend(plan for plan in plans if rows[plan.name].is_refused)
        gains = races.proven_gains(rows)
        best = races.leader(plans, gains)
        if best is not whole or gains[best.name] <= 1:
            why = rows[whole.name].why_not(best.name).removeprefix("not proven faster: ")
            tried.set_reason(whole.name, f"not proven: {why}")
        if gains[best.name] > 1:
            self.tuning.take(best, comparison)

    def _measured(
        self, phase: int, title: str, asked: Sequence[Candidate], policy: Policy
    ) -> Generator[Progress, None, Comparison]:
        """Free idle runners, benchmark plans, adapt the budget; store and return the comparison."""
        variants = [plan.variant() for plan in (BASELINE, *asked)]
        budget, pool, limit_s = self.budget, self._pool, self._at_most_s
        if pool is not None:
            kept = (BASELINE, *asked, *asked[0].without_each(), *self.tried.rivals())
            pool.retain({plan.name for plan in kept}, {variant.name for variant in variants})
        given = self.step, variants, max(budget.left_s, 0.01)
        benchmark = Benchmark(*given, policy=policy, within=budget, pool=pool, at_most_s=limit_s)
        try:
            with closing(benchmark.run()) as run:
                for progress in run:
                    yield self._progress(phase, f"{title}: {progress.text}", progress.known)
        finally:
            self._compiling_s += benchmark.budget.excluded_s
            comparison = benchmark.result()
            # While freed memory is kept, steps take less time than the user's steps.
            times_s = () if heap.is_kept() else comparison.baseline.times_s
            budget.follow(times_s, bool(comparison.busy))
            if benchmark.has_results():
                self.tried.stages.append(Stage(title, comparison))
        return comparison

    def _store(self, seen: learning.TaskFacts) -> None:
        """Store the winner, or an empty plan if clearly no plan helps and no options are kept."""
        tuning, winner = self.tuning, self.tuning.winner
        if tuning.helped or not (tuning.unclear or tuning.kept):
            plans = [planning.plan(tuning.config, self.hardware, one) for one in seen.facts]
            kept = planning.together(plans), winner.values, winner.name, tuning.ratio
            try:
                learning.store(seen.setting, seen.task, *kept)
                tuning.is_stored = True
            except SpeedKitError as error:
                tuning.notes.append(f"the plan could not be stored: {error}")


@interruptible_in_users_code
def tune(
    step: Callable[..., object],
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float | None = None,
    fresh: bool = False,
    keep: str | Sequence[str] = (),
    at_most_s: float | None = None,
) -> Tuning:
    """Search for the fastest safe plan for `step()` on this machine, by measuring.

    The search applies no plan; call `Tuning.apply()` for that. All changes by the step are undone.

    Args:
        step: a function that runs one training or inference step: `step()` or `step(ctx)`.
        model: the model or models that get the plans (default: all that the step reaches).
        optimizer: the optimizers (default: all that the step reaches).
        budget_s: seconds for the whole search, not counting compiling (default: 10 s, or 60 steps
            if these take longer).
        fresh: search again even if a plan was learned for this step (default: check that plan).
        keep: names of optimizations to leave unchanged; `("precision", "tf32")` keeps full float32.
        at_most_s: limit in seconds that 99 % of the winner's steps must meet, or 99 % of its tokens
            if the step generates text. With a limit, the plan is not stored.

    Returns:
        A Tuning: the `winner` with its proof, a `likely` plan, or neither.

    Raises:
        StepError: the step can't be measured, or an argument is invalid.
        ArgumentError: `optimizer` is not a torch optimizer, or `keep` has the wrong type.
        KeyboardInterrupt: after Ctrl-C; its attribute `tuning` is the result so far.

    Example::

        tuning = tune(train_step, budget_s=30)
        ctx, *_ = tuning.apply()
    """
    begun_s = clock.now()
    measured, budget_s = step_of(step, model, optimizer), arguments.seconds("budget_s", budget_s)
    arguments.of_kind("keep", keep, Collection, optional=False)
    names = [keep] if isinstance(keep, str) else keep
    at_most_s, fresh = arguments.seconds("at_most_s", at_most_s), arguments.flag("fresh", fresh)
    search = PlanSearch(measured, budget_s, fresh, names, begun_s, at_most_s)
    try:
        return drained(search)
    except KeyboardInterrupt as interrupt:
        interrupt.tuning = search.result()  # type: ignore[attr-defined]
        raise
