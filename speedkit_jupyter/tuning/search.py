"""The search: single changes first, then combinations of what helped, costly ones last.

Every stage is an interleaved benchmark with an accuracy check. What is chosen is confirmed against
baseline in fresh rounds, so that the figure that is reported did not win by luck.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from speedkit_jupyter.exceptions import StepError
from speedkit_jupyter.facts import Facts
from speedkit_jupyter.hardware import Hardware
from speedkit_jupyter.measure.benchmark import Benchmark
from speedkit_jupyter.measure.comparison import Comparison, Record
from speedkit_jupyter.measure.sampler import Progress
from speedkit_jupyter.measure.statistics import spread
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.measure.variants import Variant
from speedkit_jupyter.tuning.candidates import Candidate, candidates, combined
from speedkit_jupyter.tuning.result import Rejected, Stage, Tuning

# Shares of the budget that the rounds of a stage may take; early stops leave more to the next.
SINGLES, COMBINATIONS, COSTLY, CONFIRMED = 0.3, 0.25, 0.2, 0.25
# A costly candidate is compiled for about so long before it runs; less than that is not enough.
COMPILE_S = 15.0
# A plan that saves less memory than this share is not worth a change.
LEAST_SAVED = 0.01
BASELINE = Candidate({})


class Search:
    """Drain `run()`, then read `result()`; closing the generator keeps the best plan so far.

    `objective` is `time` or `memory`; with `steps` it is the total time of so many steps, what
    comes before the first one included. Raises StepError.
    """

    def __init__(
        self,
        step: Step,
        budget_s: float = 60.0,
        steps: int | None = None,
        objective: str = "time",
    ) -> None:
        if objective not in ("time", "memory"):
            raise StepError(f"the objective is time or memory, not {objective!r}")
        if steps is not None and steps < 1:
            raise StepError(f"steps must be 1 or more, not {steps}")
        if not step.models:
            raise StepError("no model is used in this step, so there is nothing to tune")
        Benchmark(step, [Variant("baseline")], budget_s)  # raises for what can't be measured
        self.step, self.budget_s = step, budget_s
        model = step.models[0]
        self._tuning = Tuning(
            step, Hardware.detect(), Facts.read(model, step.holders(model)), objective, steps
        )
        self._end = 0.0

    def result(self) -> Tuning:
        """What is known so far; a plan that was not confirmed is none."""
        return self._tuning

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return bool(self._tuning.stages)

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        __tracebackhide__ = True
        start = time.perf_counter()
        self._end = start + self.budget_s
        tuning = self._tuning
        found = candidates(tuning.hardware, tuning.facts)
        cheap = [one for one in found if not one.costly]
        best = BASELINE
        if cheap:
            best = yield from self._stage("single changes", cheap, SINGLES)
        helped = self._that_helped(cheap)
        if len(helped) > 1:
            best = yield from self._stage("combinations", _mixes(helped), COMBINATIONS, [best])
        for one in found:
            if one.costly and self._can_still_win(one, best):
                title = f"with {one.name}"
                mixes = [one, best + one] if best.values else [one]
                best = yield from self._stage(title, mixes, COSTLY, [best])
        if best.values:
            yield from self._confirm(best)
        tuning.seconds = time.perf_counter() - start

    def _stage(
        self,
        title: str,
        tried: Sequence[Candidate],
        share: float,
        known: Sequence[Candidate] = (),
    ) -> Generator[Progress, None, Candidate]:
        """The best of what is tried and known, or BASELINE."""
        __tracebackhide__ = True
        known = [one for one in known if one.values]
        every = {one.name: one for one in (*known, *tried)}
        variants = [BASELINE.variant(), *(one.variant() for one in every.values())]
        comparison = yield from self._benchmark(title, variants, share, drop_slower=True)
        self._tuning.stages.append(Stage(title, comparison))
        scores = {
            every[record.name]: self._score(comparison, record) for record in comparison.records[1:]
        }
        best = max(scores, key=lambda one: scores[one], default=BASELINE)
        best = best if scores.get(best, 0.0) > 1 else (known[0] if known else BASELINE)
        for record in comparison.records[1:]:
            if record.name not in (best.name, *(one.name for one in known)):
                self._reject(comparison, record, best.name)
        return best

    def _benchmark(
        self, title: str, variants: Sequence[Variant], share: float, drop_slower: bool
    ) -> Generator[Progress, None, Comparison]:
        __tracebackhide__ = True
        left = self._end - time.perf_counter()
        budget_s = max(min(share * self.budget_s, left), 0.5)
        benchmark = Benchmark(self.step, variants, budget_s, drop_slower=drop_slower)
        for one in benchmark.run():
            done = 1 - max(self._end - time.perf_counter(), 0.0) / self.budget_s
            yield Progress(min(done, 1.0), f"{title}: {one.text}")
        return benchmark.result()

    def _confirm(self, best: Candidate) -> Generator[Progress, None, None]:
        """Baseline against the winner in rounds that took no part in choosing it."""
        __tracebackhide__ = True
        variants = [BASELINE.variant(), best.variant()]
        comparison = yield from self._benchmark("confirming", variants, CONFIRMED, False)
        tuning = self._tuning
        tuning.comparison = comparison
        if self._score(comparison, comparison.records[1]) > 1:
            tuning.winner = best
        else:
            verdict = comparison.verdict(comparison.records[1])
            tuning.rejected.append(
                Rejected(best.name, f"the fresh rounds did not confirm it: {verdict}")
            )

    def _that_helped(self, tried: Sequence[Candidate]) -> list[Candidate]:
        """Best first; one value for each optimization."""
        if not self._tuning.stages:
            return []
        comparison = self._tuning.stages[0].comparison
        records = {one.name: one for one in comparison.records}
        scores = {one: self._score(comparison, records[one.name]) for one in tried}
        ranked = sorted((one for one in tried if scores[one] > 1), key=lambda one: -scores[one])
        return [
            one
            for number, one in enumerate(ranked)
            if not any(one.values.keys() & better.values.keys() for better in ranked[:number])
        ]

    def _score(self, comparison: Comparison, record: Record) -> float:
        """How many times better than baseline; 0 for what is not proven better, or wrong."""
        verdict = comparison.verdict(record)
        if record.same_as_baseline or verdict in ("failed", "wrong", "slower"):
            return 0.0
        if self._tuning.objective == "memory":
            return _memory_score(comparison, record)
        ratio = comparison.ratio(record)
        if ratio is None or verdict != "faster":
            return 0.0
        steps = self._tuning.steps
        if steps is None:
            return ratio.median
        baseline_s = spread(comparison.baseline.times_s).median_s
        return steps * baseline_s / (record.settling_s + steps * baseline_s / ratio.median)

    def _can_still_win(self, one: Candidate, best: Candidate) -> bool:
        """Whether there is time to compile, and anything left to gain that pays for it."""
        name = (best + one).name
        left = self._end - time.perf_counter() - CONFIRMED * self.budget_s
        if left < COMPILE_S:
            reason = f"{max(left, 0):.0f} s of the budget were left, compiling takes about"
            self._tuning.rejected.append(Rejected(name, f"{reason} {COMPILE_S:.0f}"))
            return False
        steps, stages = self._tuning.steps, self._tuning.stages
        if steps is None or not stages:
            return True
        baseline_s = spread(stages[-1].comparison.baseline.times_s).median_s
        if steps * baseline_s > COMPILE_S:
            return True
        reason = f"{steps} steps take {steps * baseline_s:.1f} s, compiling alone takes longer"
        self._tuning.rejected.append(Rejected(name, reason))
        return False

    def _reject(self, comparison: Comparison, record: Record, best: str) -> None:
        rejected = self._tuning.rejected
        if record.name in {one.name for one in rejected}:
            return
        rejected.append(Rejected(record.name, _why_not(comparison, record, best)))


def _mixes(helped: Sequence[Candidate]) -> list[Candidate]:
    """The best with each other, and all of them: two that help alone can hurt together."""
    whole = combined(helped)
    pairs = [helped[0] + other for other in helped[1:]]
    return list({one.name: one for one in (*pairs, whole)}.values())


def _memory_score(comparison: Comparison, record: Record) -> float:
    before, now = comparison.baseline.memory, record.memory
    if before is None or now is None or not now.peak_bytes:
        return 0.0
    saved = before.peak_bytes / now.peak_bytes
    return saved if saved > 1 + LEAST_SAVED else 0.0


def _why_not(comparison: Comparison, record: Record, best: str) -> str:
    verdict = comparison.verdict(record)
    if record.failure:
        return f"failed: {record.failure}"
    if verdict == "wrong" and record.accuracy is not None:
        return f"wrong: {record.accuracy.reason}"
    if record.same_as_baseline:
        return "changes nothing here"
    ratio = comparison.ratio(record)
    if ratio is None:
        return "not measured"
    number = f"{ratio.median:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]"
    if verdict == "faster":
        return f"helps ({number}), {best} more"
    return f"{verdict}: {number}"
