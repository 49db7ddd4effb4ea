"""The search: single changes first, then combinations of what helped, costly ones last.

Every stage is an interleaved benchmark with an accuracy check. What is chosen is confirmed against
baseline in fresh rounds, so that the figure that is reported did not win by luck. A plan that was
learned for this very step earlier is only confirmed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing

from speedkit_jupyter.context import hidden
from speedkit_jupyter.exceptions import SpeedKitError, StepError
from speedkit_jupyter.facts import Facts
from speedkit_jupyter.hardware import Hardware
from speedkit_jupyter.measure.benchmark import Benchmark
from speedkit_jupyter.measure.comparison import Comparison, Record
from speedkit_jupyter.measure.dropping import Drop
from speedkit_jupyter.measure.sampler import Progress
from speedkit_jupyter.measure.statistics import spread
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.measure.variants import Variant
from speedkit_jupyter.tuning import learning, scoring
from speedkit_jupyter.tuning.candidates import Candidate, candidates, combined
from speedkit_jupyter.tuning.learning import Task
from speedkit_jupyter.tuning.result import Rejected, Stage, Tuning

# Shares of the budget that the rounds of a stage may take; most stages end earlier.
SINGLES, COMBINATIONS, COSTLY, CONFIRMED = 0.3, 0.25, 0.33, 0.25
# A costly candidate is compiled for about so long before it runs; less than that is not enough.
COMPILE_S = 10.0
BASELINE = Candidate({})


class Search:
    """Drain `run()`, then read `result()`; closing the generator keeps the best plan so far.

    `objective` is `time` or `memory`; with `steps` it is the total time of so many steps, what
    comes before the first one included. `fresh` searches although a plan is known. Raises
    StepError.
    """

    def __init__(
        self,
        step: Step,
        budget_s: float = 60.0,
        steps: int | None = None,
        objective: str = "time",
        fresh: bool = False,
    ) -> None:
        if objective not in ("time", "memory"):
            raise StepError(f"the objective is time or memory, not {objective!r}")
        if steps is not None and steps < 1:
            raise StepError(f"steps must be 1 or more, not {steps}")
        if not step.models:
            raise StepError("no model is used in this step, so there is nothing to tune")
        Benchmark(step, [Variant("baseline")], budget_s)  # raises for what can't be measured
        self.step, self.budget_s, self._fresh = step, budget_s, fresh
        model = step.models[0]
        with hidden(model):
            facts = Facts.read(model, step.holders(model))
        self._tuning = Tuning(step, Hardware.current(), facts, objective, steps)
        self._identity: tuple[str, Task] | None = None
        self._end = 0.0

    def result(self) -> Tuning:
        """What is known so far; a winner that was not confirmed says so."""
        return self._tuning

    def has_results(self) -> bool:
        """Whether there is anything to show already."""
        return bool(self._tuning.stages)

    def recall(self) -> Tuning:
        """The result with the plan that was learned for this step, if one was; not yet checked.

        Runs one step, which is undone. Raises what the step raises.
        """
        __tracebackhide__ = True
        tuning = self._tuning
        if self._identity is None:
            self._identity = learning.identify(
                self.step, tuning.hardware, tuning.objective, tuning.steps
            )
            known = None if self._fresh else learning.find(*self._identity)
            if known is not None and known.plan["values"]:  # where nothing helped, search again
                tuning.learned, tuning.winner = known, Candidate(known.plan["values"])
        return tuning

    def run(self) -> Generator[Progress, None, None]:
        """Search; yields after every block. Everything is as before whenever it yields nothing."""
        __tracebackhide__ = True
        start = time.perf_counter()
        self._end = start + self.budget_s
        tuning = self._tuning
        yield Progress(0.0, "looking at one step")
        known = self.recall().winner
        try:
            if known.values:
                yield from self._check(known)
            if not tuning.confirmed:
                yield from self._search()
        finally:
            tuning.seconds = time.perf_counter() - start
            self.step.kept.clear()

    def _check(self, known: Candidate) -> Generator[Progress, None, None]:
        """A short A/B of the plan that was learned; it is forgotten where it does not hold."""
        __tracebackhide__ = True
        yield from self._confirm(known, "checking the learned plan")
        learned, tuning = self._tuning.learned, self._tuning
        if tuning.winner.name != known.name and learned is not None:
            learning.forget(learned)
            reasons = [one.reason for one in tuning.rejected if one.name == known.name]
            tuning.notes.append("; ".join([f"The learned plan {known.name} was dropped", *reasons]))
            tuning.learned, tuning.comparison = None, None
            tuning.winner, tuning.confirmed = BASELINE, False

    def _search(self) -> Generator[Progress, None, None]:
        __tracebackhide__ = True
        tuning = self._tuning
        found = candidates(tuning.hardware, tuning.facts)
        cheap = [one for one in found if not one.costly]
        seconds = SINGLES * self.budget_s
        helped, unclear = yield from self._stage("single changes", cheap, seconds, BASELINE)
        best = [*helped, BASELINE][0]
        mixes = _mixes(best, _one_value_each([*helped, *unclear]))
        seconds = COMBINATIONS * self.budget_s
        better, _ = yield from self._stage("combinations", mixes, seconds, best)
        best = [*better, best][0]
        costly = [one for one in found if one.costly]
        for number, one in enumerate(costly):
            if self._can_still_win(one, best):
                tried = [one, best + one] if best.values else [one]
                seconds = min(COSTLY * self.budget_s, self._left() / (len(costly) - number))
                better, _ = yield from self._stage(f"with {one.name}", tried, seconds, best)
                best = [*better, best][0]
        if best.values:
            yield from self._confirm(best, "confirming")
        self._keep()

    def _stage(
        self, title: str, tried: Sequence[Candidate], seconds: float, best: Candidate
    ) -> Generator[Progress, None, tuple[list[Candidate], list[Candidate]]]:
        """What is proven better than `best`, best first, and what may be, but is not proven."""
        __tracebackhide__ = True
        if not tried:
            return [], []
        asked = {one.name: one for one in tried if one.name != best.name}
        comparison = yield from self._benchmark(
            title, [*asked.values()], seconds, "beaten" if best.values else "slower", best
        )
        records = [one for one in comparison.records if one.name in asked]
        scores = {one.name: self._score(comparison, one) for one in records}
        better = sorted((name for name in scores if scores[name] > 1), key=lambda n: -scores[n])
        winner = better[0] if better else best.name
        for record in records:
            self._reject(comparison, record, winner)
        unclear = [one.name for one in records if scoring.may_help(comparison, one)]
        return [asked[name] for name in better], [asked[name] for name in unclear]

    def _benchmark(
        self,
        title: str,
        tried: Sequence[Candidate],
        seconds: float,
        drop: Drop = "",
        best: Candidate = BASELINE,
        decisive: Sequence[str] = (),
    ) -> Generator[Progress, None, Comparison]:
        """`best` and what is tried, as a stage of the result, also where it is cut short."""
        __tracebackhide__ = True
        every = [BASELINE, *([best] if best.values else []), *tried]
        benchmark = Benchmark(
            self.step,
            [one.variant() for one in every],
            seconds,
            drop=drop,
            decisive=decisive or [one.name for one in tried],
            against=best.name,
        )
        try:
            with closing(benchmark.run()) as run:
                for one in run:
                    done = 1 - max(self._end - time.perf_counter(), 0.0) / self.budget_s
                    paused = time.perf_counter()
                    yield Progress(min(done, 1.0), f"{title}: {one.text}", one.known)
                    self._end += time.perf_counter() - paused  # the time of whoever drains this
        finally:
            comparison = benchmark.result()
            if benchmark.has_results():
                self._tuning.stages.append(Stage(title, comparison))
                self._lead(tried, comparison)
        return comparison

    def _lead(self, tried: Sequence[Candidate], comparison: Comparison) -> None:
        """The best so far, not confirmed yet: what an interrupted search ends with."""
        records = {one.name: one for one in comparison.records}
        known = [one for one in tried if one.name in records]
        scores = {one: self._score(comparison, records[one.name]) for one in known}
        best = max(known, key=lambda one: scores[one], default=None)
        if best is not None and scores[best] > 1:
            self._tuning.winner, self._tuning.comparison = best, comparison

    def _confirm(self, best: Candidate, title: str) -> Generator[Progress, None, None]:
        """Baseline against the winner in rounds that took no part in choosing it.

        Its parts go along, each added to those before it, so that what each adds is known too,
        and what is left of it where the whole is not confirmed.
        """
        __tracebackhide__ = True
        tuning, parts = self._tuning, best.cumulated()
        seconds = CONFIRMED * self.budget_s
        comparison = yield from self._benchmark(title, parts, seconds, decisive=[best.name])
        records = {one.name: one for one in comparison.records}
        held = [one for one in parts if self._score(comparison, records[one.name]) > 1]
        tuning.comparison, tuning.confirmed = comparison, bool(held)
        tuning.winner = held[-1] if held else BASELINE
        if tuning.winner.name != best.name:
            why = scoring.why_not(comparison, records[best.name], tuning.winner.name)
            tuning.rejected.append(Rejected(best.name, f"fresh rounds did not confirm it: {why}"))

    def _keep(self) -> None:
        """Remember what was found, also that nothing helped: rules shall not turn it on then.

        A store that can't be written is said, and no more.
        """
        tuning = self._tuning
        if self._identity is None:
            return
        winner = tuning.winner
        try:
            learning.keep(*self._identity, tuning.plan, winner.values, winner.name, tuning.ratio)
        except SpeedKitError as error:
            tuning.notes.append(f"the plan was not kept for the next time: {error}")

    def _score(self, comparison: Comparison, record: Record) -> float:
        return scoring.score(comparison, record, self._tuning.objective, self._tuning.steps)

    def _left(self) -> float:
        """Seconds until the winner has to be confirmed."""
        return self._end - time.perf_counter() - CONFIRMED * self.budget_s

    def _can_still_win(self, one: Candidate, best: Candidate) -> bool:
        """Whether there is time to compile, and anything left to gain that pays for it."""
        name = (best + one).name
        left = self._left()
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
        """With its reason, in place of an earlier one; not so the best."""
        tuning = self._tuning
        tuning.rejected = [one for one in tuning.rejected if one.name not in (best, record.name)]
        if record.name != best:
            why = scoring.why_not(comparison, record, best)
            tuning.rejected.append(Rejected(record.name, why))


def _one_value_each(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Of several values for one optimization the best."""
    return [
        one
        for number, one in enumerate(ranked)
        if not any(one.values.keys() & better.values.keys() for better in ranked[:number])
    ]


def _mixes(best: Candidate, others: Sequence[Candidate]) -> list[Candidate]:
    """The best with each other one, and all of them: two that help alone can hurt together, and
    two that are too small to be proven alone may be large enough together.
    """
    mixes = [*(best + other for other in others), combined(others)]
    return [one for name, one in {one.name: one for one in mixes}.items() if name != best.name]
