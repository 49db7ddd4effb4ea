"""The benchmarks that a search is made of, and what they leave in its result."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from statistics import median

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import SAME
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.policy import Policy
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo import guard
from speedkit_jupyter.tuning import early_stopping, scoring
from speedkit_jupyter.tuning.ablation import pays
from speedkit_jupyter.tuning.allowance import MOST_CANDIDATES, Allowance
from speedkit_jupyter.tuning.candidates import Candidate
from speedkit_jupyter.tuning.culprits import Culprits
from speedkit_jupyter.tuning.early_stopping import BEHIND, RACE_ROUNDS, WORTH_IT
from speedkit_jupyter.tuning.outcome import Rejected, Stage, Tuning
from speedkit_jupyter.tuning.policies import Lightest, Look, Race
from speedkit_jupyter.tuning.right_parts import RightParts

BASELINE = Candidate({})


class Stages:
    """Each stage is a benchmark of `step` within what is left of the `allowance`.

    `tuning` gets the stages, what was rejected, and the best so far.
    """

    def __init__(self, step: Step, tuning: Tuning, allowance: Allowance) -> None:
        self._step, self.tuning, self.allowance = step, tuning, allowance
        self._tried: set[str] = set()
        self._left_out: dict[str, Candidate] = {}
        self._culprits, self.right = Culprits(), RightParts()
        self._raced: dict[str, Candidate] = {}

    @property
    def left_s(self) -> float:
        """Seconds of the budget."""
        return self.allowance.budget.left_s

    def race(
        self, title: str, tried: Sequence[Candidate], share: float, best: Candidate = BASELINE
    ) -> Generator[Progress, None, Candidate]:
        """The one that leads at its end, baseline and the `best` so far included."""
        __tracebackhide__ = True
        leaders = [best] if best.values else []
        tried = [candidate for candidate in tried if not self._is_blamed(candidate)]
        room = self.allowance.room(share, len(leaders), is_first=not self._tried)
        chosen = list(tried[:room])
        if room < min(len(tried), MOST_CANDIDATES):
            self._left_out.update({candidate.name: candidate for candidate in tried[room:]})
        if not chosen:
            return best
        self._tried |= {candidate.name for candidate in chosen}
        self._raced.update({candidate.name: candidate for candidate in chosen})
        races = self.tuning.objective == "time"
        if len(chosen) == 1 and not leaders:
            (only,) = chosen  # it is confirmed or not
            is_lost = races and self.left_out() and (yield from self._is_slower(title, only))
            return BASELINE if is_lost else only
        policy = Race(self.right, self._culprits) if races else Lightest(self.tuning.within)
        asked = [*leaders, *chosen]
        seconds = self.allowance.for_a_race(share)
        comparison = yield from self.benchmark(title, asked, seconds, policy)
        return self._leader(comparison, asked)

    def _is_slower(self, title: str, candidate: Candidate) -> Generator[Progress, None, bool]:
        """Whether it is not worth a proof: there is something else to spend the time on."""
        __tracebackhide__ = True
        comparison = yield from self.benchmark(title, [candidate], self.left_s, Look())
        first, record = comparison.records
        is_slower = early_stopping.is_far_behind(first.times_s, record.times_s, BEHIND)
        if is_slower or not _was_tried(comparison, record):
            self.reject(comparison, record, BASELINE.name)
        return is_slower or not record.times_s

    def _is_blamed(self, candidate: Candidate) -> bool:
        """Whether a part of it was far slower in an earlier race; that is its reason then."""
        why = self._culprits.why(candidate.name)
        if why:
            self.refuse(candidate.name, why)
        return bool(why)

    def new(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that have not raced yet."""
        return [candidate for candidate in candidates if candidate.name not in self._tried]

    def say_what_was_left_out(self) -> None:
        """As a note of the result."""
        names = [candidate.name for candidate in self.left_out()]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            listed = f"{', '.join(names[:4])}{more}"
            self.tuning.notes.append(f"Left out, since the budget is short: {listed}")

    def left_out(self) -> list[Candidate]:
        """What there was no time for, and no culprit speaks against either; the simplest first."""
        known = self._tried.union(plan.name for plan in self.tuning.rejected)
        left = [plan for name, plan in self._left_out.items() if name not in known]
        return sorted(left, key=lambda plan: (plan.costly, len(plan.values)))

    @property
    def has_raced(self) -> bool:
        """Whether there was time to try anything."""
        return bool(self._tried)

    def why_unclear(self) -> str:
        """Why the races say neither that something helps nor that nothing does; empty if they do.

        Nothing helps where the strongest combination and those without its parts fell behind.
        """
        comparisons = [stage.comparison for stage in self.tuning.stages]
        rounds = max((len(comparison.baseline.times_s) for comparison in comparisons), default=0)
        records = [record for comparison in comparisons for record in comparison.records[1:]]
        if rounds < RACE_ROUNDS and not any("dropped" in record.notes for record in records):
            return f"one step takes {self.allowance.step_s:.2g} s; {self.allowance.more()}"
        checks = [record.accuracy for record in records if record.accuracy]
        if checks and all(check.verdict == "not checked" for check in checks):
            return f"no plan can be proven right: {checks[0].reason}"
        left_out = len(self.left_out())
        if left_out > len(self._tried):
            return f"{left_out} plans were left out; {self.allowance.more()}"
        return ""

    def so_far(self) -> str:
        """What an interrupted search knows."""
        known = [
            (ratio.median, record.name, ratio)
            for stage in self.tuning.stages
            for record in stage.comparison.records[1:]
            if (ratio := stage.comparison.ratio(record)) is not None
            and stage.comparison.verdict(record) not in ("wrong", "failed", "declined")
            and not record.same_as_baseline
        ]
        if not known:
            return "interrupted before anything was timed"
        _, name, ratio = max(known, key=lambda one: one[0])
        return f"interrupted: the best so far is {name}, not proven: {ratio}"

    def narrow_losers(self) -> list[Candidate]:
        """What was right and close when a race gave it up, by rounds too few for an interval.

        The fewest parts first; without what is made of such alone, which says no more.
        """
        losers = []
        for stage in self.tuning.stages:
            for record in stage.comparison.records[1:]:
                if scoring.lost_narrowly(stage.comparison, record):
                    losers.append(self._raced[record.name])
        losers = sorted(
            {loser.name: loser for loser in losers}.values(), key=lambda loser: len(loser.values)
        )
        alone = {name for loser in losers if len(loser.values) == 1 for name in [loser.name]}
        return [
            loser
            for loser in losers
            if len(loser.values) == 1 or not alone.issuperset(loser.name.split("+"))
        ]

    def _leader(self, comparison: Comparison, asked: Sequence[Candidate]) -> Candidate:
        records = {record.name: record for record in comparison.records}
        best = self.ahead_of_all(comparison, asked)
        for candidate in asked:
            if _was_tried(comparison, records[candidate.name]):
                self.reject(comparison, records[candidate.name], best.name)
            else:
                self._tried.discard(candidate.name)
                self._left_out[candidate.name] = candidate
        return best

    def benchmark(
        self,
        title: str,
        tried: Sequence[Candidate],
        seconds: float,
        policy: Policy,
        accuracy: NamedAccuracy | None = None,
    ) -> Generator[Progress, None, Comparison]:
        """Baseline and what is tried, as a stage of the result, also where it is cut short."""
        __tracebackhide__ = True
        variants = [candidate.variant() for candidate in (BASELINE, *tried)]
        seconds, is_known = max(seconds, 0.01), False
        benchmark = Benchmark(
            self._step,
            variants,
            seconds,
            policy=policy,
            within=self.allowance.budget,
            accuracy=accuracy,
        )
        try:
            with closing(benchmark.run()) as run:
                for progress in run:
                    here = guard.in_progress()
                    paused_s = here.paused_s if here else 0.0
                    taken_s = here.taking_s if here else 0.0  # to put it back takes as long
                    self.allowance.goes_around_stages(2 * taken_s)
                    share = self.allowance.budget.share
                    yield Progress(share, f"{title}: {progress.text}", progress.known)
                    if here:  # turns that were given up
                        self.allowance.budget.exclude(here.paused_s - paused_s)
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
        """The best so far, not confirmed yet: what an interrupted search ends with."""
        records = {record.name: record for record in comparison.records}
        best = self.ahead_of_all(comparison, tried)
        was_checked = records[best.name].accuracy or self.right.are_all_of(best.name)
        if best.values and was_checked and not self.tuning.confirmed:
            self.tuning.winner, self.tuning.comparison = best, comparison

    def ahead_of_all(self, comparison: Comparison, tried: Sequence[Candidate]) -> Candidate:
        """The fastest, baseline included; of those that are as fast the one of fewest parts."""
        records = {record.name: record for record in comparison.records}
        values = {
            candidate.name: self.value(comparison, records[candidate.name]) for candidate in tried
        }
        most = max(values.values(), default=0.0)
        plain = max(
            [values[candidate.name] for candidate in tried if not candidate.costly], default=0.0
        )
        # Compiling costs seconds at every start, so it has to bring more.
        able = [
            candidate
            for candidate in tried
            if not candidate.costly or most > WORTH_IT * max(plain, 1.0)
        ]
        able = [candidate for candidate in able if pays(candidate, values, tried)]
        most = max([1.0, *(values[candidate.name] for candidate in able)])
        equal = [candidate for candidate in able if values[candidate.name] * (1 + SAME) > most]
        equal = [candidate for candidate in equal if values[candidate.name] > 1]
        return min(equal, key=lambda candidate: len(candidate.values), default=BASELINE)

    def score(self, comparison: Comparison, record: Record) -> float:
        """How many times better it is proven to be, by what is aimed at."""
        tuning = self.tuning
        return scoring.score(comparison, record, tuning.objective, tuning.steps, tuning.within)

    def value(self, comparison: Comparison, record: Record) -> float:
        """How many times better it looks."""
        tuning = self.tuning
        return scoring.value(comparison, record, tuning.objective, tuning.steps, tuning.within)

    def reject(self, comparison: Comparison, record: Record, best: str) -> None:
        """With its reason, in place of an earlier one; not so the best."""
        tuning = self.tuning
        tuning.rejected = [candidate for candidate in tuning.rejected if candidate.name != best]
        if record.name != best:
            why = scoring.why_not(comparison, record, best, tuning.objective, tuning.within)
            self.refuse(record.name, why)

    def refuse(self, name: str, reason: str) -> None:
        """Not in the plan, and why."""
        rest = [candidate for candidate in self.tuning.rejected if candidate.name != name]
        self.tuning.rejected = [*rest, Rejected(name, reason)]


def _was_tried(comparison: Comparison, record: Record) -> bool:
    """Whether anything is known of it; else the time was too short to begin with it."""
    known = record.times_s or record.same_as_baseline or "dropped" in record.notes
    return bool(known) or comparison.verdict(record) in ("failed", "declined", "wrong")
