"""The benchmarks that a search is made of, and what they leave in its result."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from statistics import median

from speedkit_jupyter.measure.checks.accuracy import is_right
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import SAME, Ratio
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.policy import Policy
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo import guard
from speedkit_jupyter.tuning.allowance import Allowance
from speedkit_jupyter.tuning.candidates import BASELINE, Candidate
from speedkit_jupyter.tuning.outcome import Rejected, Stage, Tuning
from speedkit_jupyter.tuning.parts import pays
from speedkit_jupyter.tuning.policies import RACE_ROUNDS, WORTH_IT, Lightest, Race
from speedkit_jupyter.tuning.reasons import Aim


class Stages:
    """Each stage is a benchmark of `step` within what is left of the `allowance`.

    `tuning` gets the stages, what was rejected, and the best so far; `aim` says what is better.
    """

    def __init__(self, step: Step, tuning: Tuning, allowance: Allowance) -> None:
        self._step, self.tuning, self.allowance = step, tuning, allowance
        self.aim = Aim(tuning.objective == "memory", tuning.within, tuning.steps)
        self.tried: dict[str, Candidate] = {}

    def race(
        self, title: str, asked: Sequence[Candidate]
    ) -> Generator[Progress, None, tuple[Candidate, Comparison]]:
        """Return the one that leads at the end, or BASELINE, and the comparison.

        Where a plan that led is refused by its check, those that don't hold all of it race again.
        """
        __tracebackhide__ = True
        while True:
            self.tried.update({candidate.name: candidate for candidate in asked})
            policy = Lightest(self.tuning.within) if self.aim.memory else Race()
            comparison = yield from self.benchmark(title, asked, self.allowance.race_s, policy)
            records = {record.name: record for record in comparison.records}
            best = self.best_of(comparison, asked)
            for candidate in asked:
                self.reject(comparison, records[candidate.name], best.name)
            refused = [plan for plan in asked if _is_refused(comparison, records[plan.name])]
            rest = [
                plan
                for plan in asked
                if not any(wrong.values.items() <= plan.values.items() for wrong in refused)
            ]
            if best.values or not refused or not rest or not self.allowance.has_time(len(rest)):
                return best, comparison
            asked = rest

    def benchmark(
        self,
        title: str,
        tried: Sequence[Candidate],
        seconds: float,
        policy: Policy,
        accuracy: NamedAccuracy | None = None,
    ) -> Generator[Progress, None, Comparison]:
        """Compare the baseline and what is tried: a stage of the result, also if cut short."""
        __tracebackhide__ = True
        variants, budget = [plan.variant() for plan in (BASELINE, *tried)], self.allowance.budget
        benchmark = Benchmark(
            self._step, variants, max(seconds, 0.01),
            policy=policy, within=budget, accuracy=accuracy,
        )  # fmt: skip
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
            self.tuning.compiling_s += benchmark.budget.excluded_s - benchmark.judging_s
            comparison = benchmark.result()
            if benchmark.has_results():
                self.tuning.stages.append(Stage(title, comparison))
                self._lead(tried, comparison)
        return comparison

    def _lead(self, tried: Sequence[Candidate], comparison: Comparison) -> None:
        """Note the best so far, not confirmed yet: what an interrupted search ends with."""
        records = {record.name: record for record in comparison.records}
        best = self.best_of(comparison, tried)
        right = [set(name.split("+")) for name, row in records.items() if is_right(row.accuracy)]
        is_right_so_far = any(words.issuperset(best.name.split("+")) for words in right)
        if best.values and is_right_so_far and not self.tuning.confirmed:
            self.tuning.winner, self.tuning.comparison = best, comparison

    def best_of(self, comparison: Comparison, tried: Sequence[Candidate]) -> Candidate:
        """Return the best by its value, or BASELINE; of those that are as good, the one of fewest
        parts. Each part has to bring what it costs, compiling more.
        """
        records = {record.name: record for record in comparison.records}
        values = {plan.name: self.aim.value(comparison, records[plan.name]) for plan in tried}
        plain = max([1.0, *(values[plan.name] for plan in tried if not plan.costly)])
        able = [
            plan
            for plan in tried
            if values[plan.name] > (WORTH_IT * plain if plan.costly else 1)
            and pays(plan, values, tried)
        ]
        most = max([1.0, *(values[plan.name] for plan in able)])
        equal = [plan for plan in able if values[plan.name] * (1 + SAME) > most]
        return min(equal, key=lambda plan: len(plan.values), default=BASELINE)

    def so_far(self) -> str:
        """Say what an interrupted search knows."""
        known = [
            (ratio.median, record.name, ratio)
            for stage in self.tuning.stages
            for record in stage.comparison.records[1:]
            if (ratio := self.ratio_if_able(stage.comparison, record)) is not None
        ]
        if not known:
            return "interrupted before anything was timed"
        _, name, ratio = max(known, key=lambda one: one[0])
        return f"interrupted: the best so far is {name}, not proven: {ratio}"

    @staticmethod
    def ratio_if_able(comparison: Comparison, record: Record) -> Ratio | None:
        """Return its speed-up, unless it is refused or changes nothing."""
        if record.same_as_baseline or _is_refused(comparison, record):
            return None
        return comparison.ratio(record)

    def reject(self, comparison: Comparison, record: Record, best: str) -> None:
        """Note why it is not in the plan, in place of an earlier reason; not so the best."""
        tuning = self.tuning
        tuning.rejected = [candidate for candidate in tuning.rejected if candidate.name != best]
        if record.name != best:
            self.refuse(record.name, self.aim.why_not(comparison, record, best))

    def refuse(self, name: str, reason: str) -> None:
        """Note why it is not in the plan."""
        rest = [candidate for candidate in self.tuning.rejected if candidate.name != name]
        self.tuning.rejected = [*rest, Rejected(name, reason)]


def _is_refused(comparison: Comparison, record: Record) -> bool:
    """Whether its check speaks against it, or it does not run."""
    verdict = comparison.verdict(record)
    return verdict in ("wrong", "failed", "declined") or not record.is_checked
