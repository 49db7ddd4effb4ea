"""The proof: a plan against the baseline in fresh rounds, and what each of its parts is worth."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from statistics import median

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.sampler import Policy, Progress
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo import guard
from speedkit_jupyter.tuning.aim import Aim, is_out
from speedkit_jupyter.tuning.allowance import Allowance
from speedkit_jupyter.tuning.candidates import BASELINE, Candidate, without_each
from speedkit_jupyter.tuning.outcome import Stage, Tuning, row_of
from speedkit_jupyter.tuning.races import RACE_ROUNDS, Proof, idlest


class Prover:
    """Runs the benchmarks of a search within its `allowance`, and proves plans.

    `tuning` gets the stages, and what is proven; `aim` says what is better. `tried` are the plans
    that were timed, by name, `refused` those whose check speaks against them, or that fail.
    """

    def __init__(self, step: Step, tuning: Tuning, allowance: Allowance) -> None:
        self.step, self.tuning, self.allowance = step, tuning, allowance
        self.aim = Aim(tuning.objective == "memory", tuning.within, tuning.steps)
        self.tried: dict[str, Candidate] = {}
        self.refused: list[Candidate] = []

    def prove(
        self, whole: Candidate, title: str = "confirming", with_parts: bool = True
    ) -> Generator[Progress, None, None]:
        """Measure the baseline and a plan in rounds that took no part in choosing it, beside the
        plan without each of its parts: what each is worth, and what is left where the whole fails.
        """
        __tracebackhide__ = True
        tuning, allowance = self.tuning, self.allowance
        plans = [whole, *(without_each(whole) if with_parts else ())]
        self.tried |= {plan.name: plan for plan in plans}
        allowance.leave_time_for_a_proof(1 + len(plans))
        policy = Proof(plans, self.aim, checks=allowance.can_check())
        comparison = yield from self.benchmark(title, plans, allowance.budget.left_s, policy)
        rows = {plan.name: row_of(comparison, plan) for plan in plans}
        self.refused += [plan for plan in plans if is_out(comparison, rows[plan.name])]
        gains = {name: self.aim.gain(comparison, row, proven=True) for name, row in rows.items()}
        best = whole if gains[whole.name] > 1 else max(plans, key=lambda plan: gains[plan.name])
        if best is not whole or gains[best.name] <= 1:
            why = self.aim.why_not(comparison, rows[whole.name], best.name)
            tuning.refuse(whole.name, f"fresh rounds did not confirm it: {why}")
        if gains[best.name] > 1:
            tuning.take(best, comparison)
            yield from self._drop_idlest(comparison, gains)

    def _drop_idlest(
        self, comparison: Comparison, gains: Mapping[str, float]
    ) -> Generator[Progress, None, None]:
        """Leave out the part that brings least, if it brings nothing; where others do neither, the
        rest is proven anew, since together they may be worth something.
        """
        tuning, whole = self.tuning, self.tuning.winner
        name = "" if self.aim.memory else idlest(whole, comparison)
        rest = whole.without(name)
        if not name or gains.get(rest.name, 0.0) <= 1:
            return
        before = {part.name: part for part in tuning.parts_found}
        gone = before.pop(name)
        tuning.take(rest, comparison)
        tuning.refuse(gone.word, f"left out: with it the plan is {gone.ratio} as fast")
        now = {part.name: part for part in tuning.parts_found if part.ratio is not None}
        tuning.parts_found = list((before | now).values())
        again = len(rest.values) > 1 and any(part.is_idle for part in tuning.parts_found)
        if again and self.allowance.has_time(len(rest.values) + 1):
            yield from self.prove(rest, "without what is not proven")

    def benchmark(
        self,
        title: str,
        tried: Sequence[Candidate],
        seconds: float,
        policy: Policy,
    ) -> Generator[Progress, None, Comparison]:
        """Compare the baseline and what is tried: a stage of the result, also if cut short."""
        __tracebackhide__ = True
        variants, budget = [plan.variant() for plan in (BASELINE, *tried)], self.allowance.budget
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
                        self.allowance.is_known_to_take(median(times_s))
        finally:
            self.tuning.compiling_s += benchmark.budget.excluded_s
            comparison = benchmark.result()
            if benchmark.has_results():
                self.tuning.stages.append(Stage(title, comparison))
        return comparison
