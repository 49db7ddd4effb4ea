"""The proof: the winner against baseline in fresh rounds, and what each of its parts is worth."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.tuning import ablation, early_stopping, scoring
from speedkit_jupyter.tuning.ablation import Part
from speedkit_jupyter.tuning.allowance import PROOF
from speedkit_jupyter.tuning.candidates import Candidate
from speedkit_jupyter.tuning.policies import Checking, Worthwhile
from speedkit_jupyter.tuning.stages import BASELINE, Stages

# The whole plan's interval has to be as narrow as this share of its median, or as this one of what
# it gains: of a plan that is 3 times as fast nobody asks for the second digit.
PRECISE, PRECISE_GAIN = 0.05, 0.1
# Two plans and baseline are told apart in about so many steps.
LEAST_STEPS = 45


class Proof:
    """Takes what is left of the budget, and less where all is clear before."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages

    def confirm(
        self, best: Candidate, title: str, parts: bool = True
    ) -> Generator[Progress, None, None]:
        """Baseline against the winner in rounds that took no part in choosing it.

        The same plan without each of its parts goes along, so that what each is worth is known
        too, and what is left of it where the whole is not confirmed.
        """
        __tracebackhide__ = True
        tuning = self.stages.tuning
        plans = [plan for plan in ablation.plans(best) if plan.values] if parts else []
        self.stages.allowance.leave_time_for(2 + len(plans))
        if not self.stages.allowance.has_time(1):
            tuning.winner, tuning.comparison = BASELINE, None
            tuning.unclear = (
                f"no time was left to prove {best.name}; {self.stages.allowance.more()}"
            )
            return
        whole = _Whole(self, best, plans, parts)
        comparison = yield from self.stages.benchmark(
            title, [best, *plans], self.stages.left_s, whole
        )
        records = {record.name: record for record in comparison.records}
        held = [plan for plan in (best, *plans) if self._is_proven(comparison, plan)]
        tuning.comparison, tuning.confirmed = comparison, bool(held)
        tuning.winner = held[0] if held else BASELINE
        tuning.parts_found = ablation.parts(tuning.winner, comparison) if parts else []
        if tuning.winner.name != best.name:
            why = scoring.why_not(
                comparison,
                records[best.name],
                tuning.winner.name,
                tuning.objective,
                tuning.within,
            )
            self.stages.refuse(best.name, f"fresh rounds did not confirm it: {why}")
            tuning.unclear = "" if held else self._why_unclear(comparison, records[best.name])
        elif parts:
            yield from self._drop_what_is_idle(best, comparison)
        # It may have fallen behind a longer plan, in a race.
        tuning.rejected = [
            candidate for candidate in tuning.rejected if candidate.name != tuning.winner.name
        ]

    def look_again(self, losers: Sequence[Candidate]) -> Generator[Progress, None, Candidate]:
        """At what lost narrowly: with rounds enough to tell whether it helps after all.

        The best of those that do; where it can't be told about one, that makes the answer unclear.
        """
        __tracebackhide__ = True
        stages, tuning = self.stages, self.stages.tuning
        if not stages.allowance.has_time(len(losers)):
            names = " and ".join(loser.name for loser in losers)
            tuning.unclear = f"no time was left to look at {names} again; {stages.allowance.more()}"
            return BASELINE
        seconds = (1 - PROOF) * stages.left_s
        comparison = yield from stages.benchmark(
            "what lost narrowly", list(losers), seconds, Worthwhile()
        )
        best = stages.ahead_of_all(comparison, losers)
        records = {record.name: record for record in comparison.records}
        for loser in losers:
            stages.reject(comparison, records[loser.name], best.name)
            tuning.unclear = tuning.unclear or self._why_unclear(comparison, records[loser.name])
        return best

    def _drop_what_is_idle(
        self, best: Candidate, comparison: Comparison
    ) -> Generator[Progress, None, None]:
        """A part stays only where leaving it out costs something that is proven, or where it seems
        to cost much and the rounds were too few to prove it.

        Where that is so of none of them, the one that brings most is what helps.
        """
        __tracebackhide__ = True
        parts = self.stages.tuning.parts_found
        unproven, idle = self.unproven(best, parts), self.idle(best, parts)
        if self.stages.tuning.objective == "memory":
            return
        gone = idle if len(idle) > 1 and (yield from self._drop_together(best, idle)) else []
        rest = best.without(*idle[:1])  # which brings least; the rounds have the plan without it
        if idle and not gone and self._is_proven(comparison, rest):
            gone = idle[:1]
            self._settle_for(rest, comparison, gone)
        self._say_not_alone(best, [name for name in unproven if name not in gone])

    def _drop_together(
        self, best: Candidate, idle: Sequence[str]
    ) -> Generator[Progress, None, bool]:
        """Whether they could go: none of them is proven alone, but they may be together."""
        __tracebackhide__ = True
        stages, rest = self.stages, best.without(*idle)
        enough_s = LEAST_STEPS * stages.allowance.step_s
        if stages.left_s < enough_s or not stages.allowance.has_time(2):
            return False
        shorter = yield from stages.benchmark(
            "without what is not proven",
            [rest, best],
            stages.left_s,
            Checking(stages.right, [rest.name]),
        )
        together = ablation.lead(shorter, rest, best)
        if together is None or together.low > 1 or ablation.seems_much(together):
            return False
        if not self._is_proven(shorter, rest):
            return False
        self._settle_for(rest, shorter, idle)
        return True

    def _settle_for(self, rest: Candidate, comparison: Comparison, idle: Sequence[str]) -> None:
        """The winner is what is left without the idle parts."""
        tuning = self.stages.tuning
        tuning.winner, tuning.comparison, tuning.confirmed = rest, comparison, True
        for part in tuning.parts_found:
            if part.name in idle and part.ratio is not None:
                self.stages.refuse(part.word, f"left out: {part.describe()}")
        before = {part.name: part for part in tuning.parts_found if part.name not in idle}
        now = [part for part in ablation.parts(rest, comparison) if part.ratio is not None]
        tuning.parts_found = list((before | {part.name: part for part in now}).values())

    def unproven(self, best: Candidate, parts: Sequence[Part]) -> list[str]:
        """The names of parts that are not proven, but for the one that brings most of these."""
        names = ablation.unproven(parts)
        return names[:-1] if len(names) == len(best.values) else names

    def idle(self, best: Candidate, parts: Sequence[Part]) -> list[str]:
        """Those of them that don't seem to bring much either."""
        much = [part.name for part in parts if ablation.seems_much(part.ratio)]
        return [name for name in self.unproven(best, parts) if name not in much]

    def helps(self, comparison: Comparison, candidate: Candidate) -> bool:
        """Whether it is proven better, and not wrong as far as it was checked."""
        record = next(row for row in comparison.records if row.name == candidate.name)
        return self.stages.score(comparison, record) > 1

    def _is_proven(self, comparison: Comparison, candidate: Candidate) -> bool:
        """Better, and checked."""
        record = next(row for row in comparison.records if row.name == candidate.name)
        return record.accuracy is not None and self.helps(comparison, candidate)

    def _say_not_alone(self, best: Candidate, idle: Sequence[str]) -> None:
        """What stays unproven, since without it the plan is not proven either."""
        words = " and ".join(best.part(name).name for name in idle)
        if words:
            self.stages.tuning.notes.append(
                f"The plan is proven as a whole; what {words} adds to it is not"
            )

    def _why_unclear(self, comparison: Comparison, record: Record) -> str:
        """Why the rounds say neither yes nor no; empty where they say no."""
        if "dropped" in record.notes or _is_behind(comparison.baseline, record):
            return ""
        value, ratio = self.stages.value(comparison, record), comparison.ratio(record)
        if ratio is None or math.isinf(ratio.high):
            told = comparison.verdict(record) in ("failed", "declined", "wrong")
            return (
                "" if told else f"too few rounds for {record.name}; {self.stages.allowance.more()}"
            )
        if scoring.is_clearly_no_gain(comparison, record) or 0 < value <= 1:
            return ""
        if comparison.verdict(record) in ("failed", "declined", "wrong"):
            return ""
        return f"{record.name} may help, and was not proven; {self.stages.allowance.more()}"


class _Whole(Checking):
    """Until the whole plan is precise, and each of its parts clear, or beyond what time is left.

    What has to be right is the winner, and what is left of it without idle parts.
    """

    def __init__(
        self, proof: Proof, best: Candidate, others: Sequence[Candidate], parts: bool
    ) -> None:
        super().__init__(proof.stages.right, [best.name])
        self._proof, self._best, self._others, self._tells_parts = proof, best, others, parts
        self.weighs = proof.stages.tuning.objective == "memory"

    def hopeless(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """What is slower than without it; at a look also a whole that gains nothing."""
        if self._proof.stages.tuning.objective != "time":
            return ()
        return [
            row
            for row in racing[1:]
            if _is_behind(racing[0], row)
            or (
                comparison is not None
                and row.name == self._best.name
                and early_stopping.gains_nothing(comparison, row)
            )
        ]

    def is_settled(self, comparison: Comparison, racing: Sequence[Record]) -> bool:
        """What the rest of the budget can't tell either is not worth waiting for."""
        record = next(row for row in comparison.records if row.name == self._best.name)
        if record not in racing:
            return early_stopping.is_clear_enough(comparison, racing)
        ratio = comparison.ratio(record)
        if ratio is None or comparison.verdict(record) == "too noisy":
            return False
        left_s = self._proof.stages.left_s
        rounds = ratio.pairs + left_s / max(comparison.round_s or 0.0, 1e-9)
        parts = self._parts(self._best, comparison)
        unclear = [part for part in parts if part.ratio is not None and not part.is_clear]
        precise = max(PRECISE, PRECISE_GAIN * (ratio.median - 1))
        return ratio.is_precise(precise) and all(part.needed() > rounds for part in unclear)

    def is_over(self, racing: Sequence[Record]) -> bool:
        """Nothing is left to prove."""
        return len(racing) == 1

    def late(self, comparison: Comparison) -> Iterator[Record]:
        """The winner, as far as the rounds tell it, and what may be left of it."""
        plans = (self._best, *self._others)
        winner = next((plan for plan in plans if self._proof.helps(comparison, plan)), self._best)
        idle = self._proof.idle(winner, self._parts(winner, comparison))
        names = (winner.name, *(winner.without(*some).name for some in (idle, idle[:1])))
        yield from [record for record in comparison.records[1:] if record.name in names]

    def _parts(self, whole: Candidate, comparison: Comparison) -> list[Part]:
        return ablation.parts(whole, comparison) if self._tells_parts else []


def _is_behind(baseline: Record, record: Record) -> bool:
    return early_stopping.is_far_behind(baseline.times_s, record.times_s, early_stopping.BEHIND)
