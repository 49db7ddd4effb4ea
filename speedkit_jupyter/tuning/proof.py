"""The proof: the winner against baseline in fresh rounds, and what each of its parts is worth."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.budget import LONGER
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.tuning import parts
from speedkit_jupyter.tuning.candidates import BASELINE, Candidate
from speedkit_jupyter.tuning.parts import Part
from speedkit_jupyter.tuning.policies import BEHIND, WORTH_IT, Grid, is_behind
from speedkit_jupyter.tuning.stages import Stages

# The whole plan's interval has to be as narrow as this share of its median, or as this one of what
# it gains: of a plan that is 3 times as fast nobody asks for the second digit.
PRECISE, PRECISE_GAIN = 0.05, 0.1
# Two rounds are no proof, and say more than nothing.
FEW_STEPS = 4


def confirm(
    stages: Stages, best: Candidate, title: str = "confirming", with_parts: bool = True
) -> Generator[Progress, None, None]:
    """Measure the baseline and the winner in rounds that took no part in choosing it.

    The same plan without each of its parts goes along, so that what each is worth is known too,
    and what is left of it where the whole is not confirmed.
    """
    __tracebackhide__ = True
    tuning, allowance = stages.tuning, stages.allowance
    others = [plan for plan in parts.without_each(best) if plan.values] if with_parts else []
    allowance.leave_time_for_a_proof(2 + len(others))
    tuning.parts_found = []
    if not allowance.budget.allows(FEW_STEPS * allowance.step_s):
        tuning.winner, tuning.comparison = BASELINE, None
        tuning.unclear = f"no time was left to prove {best.name}; {LONGER}"
        return
    plans = [best, *others]
    policy = _Whole(stages, plans)
    comparison = yield from stages.benchmark(title, plans, allowance.budget.left_s, policy)
    record = next(row for row in comparison.records if row.name == best.name)
    held = [plan for plan in plans if _score(stages, comparison, plan) > 1]
    tuning.winner = held[0] if held else BASELINE
    tuning.comparison, tuning.confirmed = comparison, bool(held)
    if tuning.winner.name != best.name:
        why = stages.aim.why_not(comparison, record, tuning.winner.name)
        stages.refuse(best.name, f"fresh rounds did not confirm it: {why}")
        tuning.unclear = "" if held else _why_unclear(stages, comparison, record)
    if held and with_parts:
        tuning.parts_found = parts.parts(tuning.winner, comparison)
        yield from _drop_idle_parts(stages, tuning.winner, comparison)
    if held:
        tuning.unclear, taken = "", tuning.winner.name
        tuning.rejected = [plan for plan in tuning.rejected if plan.name != taken]


def _score(stages: Stages, comparison: Comparison, plan: Candidate) -> float:
    record = next(row for row in comparison.records if row.name == plan.name)
    return stages.aim.score(comparison, record)


def _why_unclear(stages: Stages, comparison: Comparison, record: Record) -> str:
    """Say why the rounds tell neither yes nor no; empty where they say no."""
    ratio = comparison.ratio(record)
    told = comparison.verdict(record) in ("failed", "declined", "wrong")
    behind = is_behind(comparison.baseline.times_s, record.times_s, BEHIND)
    if told or behind or "dropped" in record.notes or (ratio and ratio.high < WORTH_IT):
        return ""
    if ratio is None:
        return f"too few rounds for {record.name}; {LONGER}"
    if not record.is_checked and record.accuracy:
        return (
            f"{record.name} looks {ratio}, and was not checked: {record.accuracy.reason}; {LONGER}"
        )
    return f"{record.name} may help, and was not proven: {ratio}; {LONGER}"


def _drop_idle_parts(
    stages: Stages, whole: Candidate, comparison: Comparison
) -> Generator[Progress, None, None]:
    """A part stays only where leaving it out costs something that is proven, or where it seems to
    cost much and the rounds were too few to prove it.

    Where that is so of no part, the one that brings most is what helps. Several that are idle are
    left out together only after rounds of their own: together they may be worth something.
    """
    __tracebackhide__ = True
    tuning, allowance = stages.tuning, stages.allowance
    found = sorted(tuning.parts_found, key=lambda part: part.ratio.median if part.ratio else 0.0)
    idle = _idle_names(found)
    if not idle or stages.aim.memory:
        return
    shorter = comparison
    if len(idle) > 1:
        rest = whole.without(*idle)
        shorter = comparison
        if allowance.has_time(4):
            policy = _Whole(stages, [rest, whole])
            shorter = yield from stages.benchmark(
                "without what is not proven", [rest, whole], allowance.budget.left_s, policy
            )
        lead = parts.lead(shorter, rest, whole)
        is_idle = lead is not None and lead.low <= 1 and lead.median < parts.MUCH
        if not is_idle or _score(stages, shorter, rest) <= 1:
            idle, shorter = idle[:1], comparison  # these rounds have the plan without it
    rest = whole.without(*idle)
    if not rest.values or _score(stages, shorter, rest) <= 1:
        idle = []
    else:
        tuning.winner, tuning.comparison = rest, shorter
        for part in found:
            if part.name in idle:
                stages.refuse(part.word, f"left out: with it the plan is {part.ratio} as fast")
        now = {part.name: part for part in parts.parts(rest, shorter) if part.ratio}
        before = {part.name: part for part in tuning.parts_found if part.name not in idle}
        tuning.parts_found = list((before | now).values())
    unproven = [part.word for part in tuning.parts_found if part.ratio and not part.is_proven]
    if unproven and len(tuning.winner.values) > 1:
        names = " and ".join(unproven)
        tuning.notes.append(f"The plan is proven as a whole; what {names} adds to it is not")


def _idle_names(found: Sequence[Part]) -> list[str]:
    """The idle parts, what brings least first; but for the one that brings most, if all are."""
    names = [part.name for part in found if part.is_idle]
    return names[:-1] if len(names) == len(found) else names


class _Whole(Grid):
    """Until the first plan is precise, and its parts clear, or beyond what time is left."""

    checked = 2

    def __init__(self, stages: Stages, plans: Sequence[Candidate]) -> None:
        self._stages, self._plans = stages, plans
        self.weighs = stages.aim.memory

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return what is slower than the baseline, at a look also a whole that gains nothing."""
        if self._stages.aim.memory:
            return ()
        gone = [row for row in racing[1:] if is_behind(racing[0].times_s, row.times_s, BEHIND)]
        for row in racing[1:] if comparison else ():
            ratio = comparison.ratio(row) if comparison else None
            if ratio and ratio.median <= 1 and row.name == self._plans[0].name:
                gone.append(row)
        return gone

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether nothing is left to prove that the rest of the budget could."""
        if comparison is None or len(racing) == 1:
            return len(racing) == 1
        record = next((row for row in racing[1:] if row.name == self._plans[0].name), None)
        if record is None:
            return super().is_over(racing, comparison)
        ratio = comparison.ratio(record)
        if ratio is None or ratio.verdict == "too noisy":
            return False
        left = self._stages.allowance.budget.left_s / max(comparison.round_s or 0.0, 1e-9)
        unclear = [part for part in self._parts(comparison) if part.ratio and not part.is_clear]
        precise = max(PRECISE, PRECISE_GAIN * (ratio.median - 1))
        return ratio.is_precise(precise) and all(
            part.rounds_needed() > ratio.pairs + left for part in unclear
        )

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the first plan, and what may be left of it, until something is right."""
        records = {record.name: record for record in comparison.records}
        idle = _idle_names([part for part in self._parts(comparison) if part.ratio])
        rest = [self._plans[0].without(name).name for name in idle[:1]]
        yield from (records[name] for name in (self._plans[0].name, *rest) if name in records)
        aim = self._stages.aim
        for plan in self._plans:
            done = any(aim.score(comparison, records[other.name]) > 1 for other in self._plans)
            if not done and records[plan.name].accuracy is None and records[plan.name].times_s:
                yield records[plan.name]

    def _parts(self, comparison: Comparison) -> list[Part]:
        whole = self._plans[0]
        return parts.parts(whole, comparison) if len(whole.values) > 1 else []
