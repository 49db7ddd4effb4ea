"""The rounds of a search: how long they last, which plans leave them, and which are checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from speedkit_jupyter.rounds import budget
from speedkit_jupyter.rounds.budget import DEFAULT_S
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.sampler import BLOCK_STEPS, LONG_S, Policy
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S
from speedkit_jupyter.rounds.statistics import LEAST_PAIRS, NORMAL, PROCESSES, SAME
from speedkit_jupyter.search import objective
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.objective import FEW_ROUNDS, WORTH_IT, PlanPart, is_behind

# After FEW_ROUNDS a plan leaves a race if it is behind the fastest by RACE_BEHIND, or by this many
# standard errors of the median (RACE_ERRORS). Plans tie once these are no more than TIE, so that
# 3 % would be seen, or after twice as many rounds. A plan that is behind the baseline by
# RACE_BEHIND in each of several rounds leaves a proof.
RACE_BEHIND, RACE_ERRORS, TIE = 1.25, 3.0, 0.045
# Nothing leaves before a step of each block, all together, took this long: else a moment's
# disturbance decides.
LEAST_RACE_S = 0.03
# A proof ends when the plan's interval is as narrow as PRECISE, to both sides, or as what another
# process may differ by anyway. After ENOUGH_ROUNDS the order of the rivals is taken as it is: where
# their ratios scatter by 5 %, medians are off by some 3 %. After half as many more so are the
# parts, and an interval twice as wide will do.
PRECISE, ENOUGH_ROUNDS = 0.08, 10
# A search needs about ENOUGH_STEPS. In a round of a proof, alone with the baseline, a plan takes
# ALONE of the baseline's time.
ENOUGH_STEPS, ALONE = 60, 0.5
# The default budget grows with the steps up to this many seconds.
MOST_GROWN_S = 900.0
# The whole model is not compiled in place of its blocks if that takes longer than this, which is
# three times the default budget, and than the budget.
MOST_WHOLE_S = 30.0
# The most candidates of one race. A race may take RACE of the budget, and leaves PROOF of it.
MOST_CANDIDATES, RACE, PROOF = 5, 0.25, 0.3


class PlanRace(Policy):
    """Chooses the fastest by successive halving; proves and checks nothing."""

    far_slower = objective.FAR_SLOWER
    checked = 0
    has_limits = False

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance

    @property
    def rounds_s(self) -> float:
        """Return the seconds for rounds, which is known once all are warmed up."""
        return self._allowance.race_s

    def least_rounds(self, others: int) -> int:
        return FEW_ROUNDS

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        return [] if _is_early(racing) else fallen_behind(racing)

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether one plan is left, or more rounds would choose no other."""
        if _is_early(racing):
            return False
        is_enough = len(racing) <= 2 or len(racing[0].times_s) >= 2 * FEW_ROUNDS
        return is_enough or is_order_clear(racing)

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        yield from ()


class Proof(Policy):
    """Continue until the first plan's interval is precise, and its parts and its rank are clear.

    The rounds end after ENOUGH_ROUNDS, or once the plan can't gain. Then the best plan is checked,
    and further plans until one is right.

    Rivals leave when they fall behind. A plan without one part leaves once that part is proven;
    with long steps, when it falls behind.
    """

    proves, checked, has_limits = True, 2, False

    def __init__(self, plans: Sequence[Candidate], steps_are_long: bool) -> None:
        self._plans, self._whole = plans, plans[0]
        parts = () if steps_are_long else plans[0].without_each()
        self._staying = {plans[0].name, *(plan.name for plan in parts)}

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return plans slower than the baseline or far behind; at a planned look also plans
        without a proven part, and the whole plan where it gains nothing.
        """
        first, whole = racing[0].times_s, self._row(racing)
        gone = [row for row in racing[1:] if is_behind(first, row.times_s, RACE_BEHIND)]
        if not _is_early(racing):
            gone += [row for row in fallen_behind(racing) if row.name not in self._staying]
        if comparison and whole:
            parts = [part for part in self._parts(comparison) if part.is_proven]
            proven = {self._whole.without(part.name).name for part in parts}
            gone += [row for row in racing[1:] if row.name in proven]
            ratio = comparison.ratio(whole)
            gone += [whole] if ratio and ratio.median <= 1 and ratio.pairs >= LEAST_PAIRS else []
        return gone

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        if comparison is None or len(racing) == 1:
            return len(racing) == 1
        if (whole := self._row(racing)) is None:
            return super().is_over(racing, comparison)
        ratio = comparison.ratio(whole)
        if ratio is None or ratio.verdict == "too noisy":
            return ratio is not None and ratio.high < objective.LIKELY
        precise = max(PRECISE, NORMAL * PROCESSES * math.log(max(ratio.median, 1)))
        rounds, names = len(racing[0].times_s), {row.name for row in racing}
        has_enough = rounds >= 1.5 * ENOUGH_ROUNDS
        parts = self._parts(comparison)
        left = [part for part in parts if self._whole.without(part.name).name in names]
        rivals = [row for row in racing[1:] if row is whole or row.name not in self._staying]
        are_clear = has_enough or all(part.is_clear for part in left)
        is_ordered = rounds >= ENOUGH_ROUNDS or is_order_clear(rivals)
        return are_clear and is_ordered and ratio.is_precise(precise * (1 + has_enough))

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the best, then others until one is right."""
        records = {record.name: record for record in comparison.records[1:]}

        def gain(record: Record, checked: bool) -> float:
            return objective.gain_of(comparison, record, proven=True, checked=checked)

        gains = {name: gain(record, False) for name, record in records.items()}
        while gains[(best := objective.leader(self._plans, gains)).name] > 1:
            yield records[best.name]
            if gain(records[best.name], checked=True) > 1:
                return
            gains[best.name] = 0.0

    def _parts(self, comparison: Comparison) -> list[PlanPart]:
        return objective.parts_of(self._whole, comparison) if len(self._whole.values) > 1 else []

    def _row(self, racing: Sequence[Record]) -> Record | None:
        return next((row for row in racing[1:] if row.name == self._whole.name), None)


def _is_early(records: Sequence[Record]) -> bool:
    rounds = len(records[0].times_s)
    raced_s = sum(sum(record.times_s) for record in records)
    return rounds < FEW_ROUNDS or (raced_s < LEAST_RACE_S and rounds < 2 * FEW_ROUNDS)


def fallen_behind(records: Sequence[Record]) -> list[Record]:
    behind, margin = _behind(records)
    return [record for record, share in zip(records, behind, strict=True) if share > margin]


def is_order_clear(records: Sequence[Record]) -> bool:
    """Return whether each other record is clearly behind the fastest, or ties with it."""
    behind, margin = _behind(records)
    return margin <= TIE or not any(0 < share <= margin for share in behind)


def _behind(records: Sequence[Record]) -> tuple[list[float], float]:
    """Return each record's lag behind the fastest, and the lag from which on it is clear.

    Both are logarithms of ratios of times that are paired within the rounds. Rounds that other
    programs delayed are left out if enough remain.
    """
    logs = np.log(np.array([record.times_s for record in records]))
    held_up = np.array([any(row) for row in zip(*(r.interrupted for r in records), strict=False)])
    if len(held_up) == logs.shape[1] and (~held_up).sum() >= FEW_ROUNDS:
        logs = logs[:, ~held_up]
    # A compiled plan has to lead by WORTH_IT, so it counts as that much slower than it is.
    logs += np.log([WORTH_IT if record.is_compiled else 1.0 for record in records])[:, None]
    behind = logs - logs[np.argmin(np.median(logs, axis=1))]
    medians = np.median(behind, axis=1)
    deviations = np.median(np.abs(behind - medians[:, None]), axis=1)[medians > 0]
    # Three rounds may agree by chance, so a smaller scatter than half a percent is not believed.
    scatter = max(1.48 * float(np.median(deviations)) if len(deviations) else 0.0, SAME / 2)
    margin = max(RACE_ERRORS * 1.25 * scatter / logs.shape[1] ** 0.5, SAME)
    return medians.tolist(), min(margin, math.log(RACE_BEHIND))


class Allowance(budget.Budget):
    """The budget of a whole search: the user's `budget_s`, or without one DEFAULT_S, and more where
    ENOUGH_STEPS take longer.

    `step_s` is about how long a step takes in seconds; 0 until one was timed.
    """

    def __init__(self, budget_s: float | None, begun_s: float | None = None) -> None:
        super().__init__(budget_s or DEFAULT_S, begun_s=begun_s)
        self.step_s, self._enough_s, self._grows, self._times = 0.0, 0.0, budget_s is None, 1.0

    def follow(self, times_s: Sequence[float] = (), is_busy: bool = False) -> None:
        """Note the seconds of some steps, by which a default budget grows.

        Once other programs are seen to delay the rounds, it goes by the fastest step, and doubles.
        """
        self._times = 2.0 if is_busy else self._times
        if times_s:
            self.step_s = median(times_s)
            self._enough_s = ENOUGH_STEPS * (min(times_s) if is_busy else self.step_s)
        if self._grows:
            enough_s = self._times * max(DEFAULT_S, self._enough_s)
            self.seconds = max(self.seconds, min(enough_s, MOST_GROWN_S))

    @property
    def _block(self) -> int:
        return 1 if self.step_s >= LONG_S else 1 + BLOCK_STEPS

    def proof_s(self, times: float) -> float:
        """Return about how many seconds a proof takes, with its check.

        The steps of its plans take `times` the baseline's time together.
        """
        block_s = max(self._block * self.step_s, BLOCK_S)
        rounds_s = ENOUGH_ROUNDS * (1 + times) * block_s
        return budget.CHECK_S + budget.CHECK_STEPS * self.step_s + rounds_s

    @property
    def steps_are_long(self) -> bool:
        """Return whether a proof of every part would take too much of the budget."""
        return 2 * self.proof_s(3 * ALONE) > self.seconds  # two parts, about

    def why_not_compiled(self, whole_s: float = 0.0) -> str:
        """Return why compiling, of the whole model in `whole_s`, is not tried; empty if it is."""
        if whole_s > max(MOST_WHOLE_S, self.seconds):
            takes = f"compiling the whole model takes about {whole_s:.0f} s"
            return f"{takes}: --budget {math.ceil(whole_s)} tries it"
        if self._grows or self.seconds >= 20:  # a small network compiles in that time
            return ""
        short = f"{budget.few_digits(self.seconds)} s are less than what compiling takes"
        return f"{short}: --budget 30 tries it"

    def room(self) -> int:
        """Return how many candidates a race can take next to the baseline."""
        # Candidates take about 0.7 of the baseline's time, and blocks with what surrounds them two
        # of the shortest blocks.
        steps = 0.7 * (budget.APART + self._block * FEW_ROUNDS)
        least_s = max(self.step_s * steps, 2 * BLOCK_S * FEW_ROUNDS)
        return max(min(int(self.race_s / least_s), MOST_CANDIDATES), 0)

    @property
    def race_s(self) -> float:
        """The seconds that a race may take, so that enough is left for a proof."""
        # 1.3: slack for overhead between the blocks of a proof, and for other programs.
        left_s = self.left_s - max(1.3 * self.proof_s(ALONE), PROOF * self.seconds)
        return min(RACE * self.seconds, max(left_s, 0.0))

    def ahead(self) -> str:
        """Return the line before the search: how long it takes, and whether that is enough."""
        step = f"one step takes {self.step_s:.2g} s"
        is_short = self.seconds < ENOUGH_STEPS * self.step_s / 2
        text = f"{step}: about {self.seconds:.0f} s and what compiling takes"
        return f"{text}; {budget.LONGER}" if is_short else text
