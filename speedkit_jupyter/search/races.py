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
from speedkit_jupyter.search import objective as aim
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.search.objective import FEW_ROUNDS
from speedkit_jupyter.support import units

# After FEW_ROUNDS a plan leaves a race if it is behind the fastest by RACE_BEHIND, or by this many
# standard errors of the median (RACE_ERRORS). Plans tie once these are no more than TIE, so that
# 3 % would be seen, or after twice as many rounds.
RACE_BEHIND, RACE_ERRORS, TIE = 1.2, 3.0, 0.045
# Where steps are long, a plan leaves that is HOPELESS times slower in each of LONG_ROUNDS; or
# HOPELESS_AT_ONCE times in the first round, which is a warm-up: only compiled code ran before.
HOPELESS, LONG_ROUNDS, HOPELESS_AT_ONCE = 1.5, 2, 2.0
# Nothing leaves before a step of each block, all together, took this long: else a moment's
# disturbance decides.
LEAST_RACE_S = 0.03
# A plan that is this many times slower than the baseline in each of several rounds leaves a proof.
BEHIND = 1.1
# A proof ends when the plan's interval is as narrow as PRECISE, to both sides, or as what another
# process may differ by anyway. After ORDER_ROUNDS the order of the rivals is taken as it is: where
# their ratios scatter by 5 %, medians are off by some 3 %. After ENOUGH_ROUNDS so are the parts,
# and an interval twice as wide will do.
PRECISE, ORDER_ROUNDS, ENOUGH_ROUNDS = 0.08, 10, 14
# A search needs about this many steps. A round of a proof has one of the baseline and of the plans:
# alone, a plan takes ALONE of the baseline's time, and PROVEN with the plans that lack a part.
ENOUGH_STEPS, ALONE, PROVEN = 60, 0.5, 1.5
# The default budget grows with the steps up to this many seconds.
MOST_GROWN_S = 900.0
# Compiling is not tried with a budget of the user's below this many seconds; nor the whole model in
# place of its blocks, if that is expected to take longer than WHOLE_S, and than the budget.
COMPILE_S, WHOLE_S = 20.0, 30.0
# The most candidates of one race. A race may take RACE of the budget, and leaves PROOF of it.
MOST_CANDIDATES, RACE, PROOF = 5, 0.25, 0.3


class Grid(Policy):
    """Times each variant until the end; one that is `times` slower in each round leaves."""

    has_limits = False
    times = HOPELESS_AT_ONCE

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        first = racing[0].times_s
        return [row for row in racing[1:] if aim.is_behind(first, row.times_s, self.times)]


class PlanRace(Grid):
    """Chooses the fastest by successive halving; proves and checks nothing."""

    far_slower = aim.FAR_SLOWER
    checked = 0

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance

    @property
    def rounds_s(self) -> float:
        """Return the seconds for rounds, which is known once all are warmed up."""
        return self._allowance.race_s

    @property
    def counts_warm_up(self) -> bool:  # type: ignore[override]
        return self._allowance.steps_are_long

    def least_rounds(self, others: int) -> int:
        return FEW_ROUNDS

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        if not _is_early(racing):
            return fallen_behind(racing)
        return hopeless(racing) if self._allowance.steps_are_long else []

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether one plan is left, or more rounds would choose no other."""
        rounds, is_alone = len(racing[0].times_s), len(racing) <= 2
        if is_alone and self._allowance.steps_are_long:
            return rounds >= LONG_ROUNDS
        if _is_early(racing):
            return False
        return is_alone or rounds >= 2 * FEW_ROUNDS or is_order_clear(racing)

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        yield from ()


class Lightest(PlanRace):
    """Chooses by memory, which may cost `within` times the time."""

    weighs = True

    def __init__(self, allowance: Allowance, within: float | None) -> None:
        super().__init__(allowance)
        self.times = within or aim.FAR_SLOWER

    def why_too_heavy(self, baseline: Record, record: Record) -> str:
        saved = aim.memory_saved(baseline, record)
        is_lighter = saved == 0 or saved > 1 + aim.LEAST_SAVED
        return "" if is_lighter else f"its peak is {1 / saved:.0%} of {baseline.name}'s"

    leaving = Grid.leaving  # plans that take too much time


class Proof(Grid):
    """Goes on until the first plan is precise, its parts are clear (at most ENOUGH_ROUNDS), and so
    is its order among the rivals (at most ORDER_ROUNDS); or until it has nothing to gain. Then
    checks the best plan, and the next best ones until one is right.

    Rivals leave when they fall behind. A plan without a part leaves once that part is proven; where
    `steps_are_long` when it falls behind.
    """

    times, proves, checked = BEHIND, True, 2

    def __init__(self, plans: Sequence[Candidate], wanted: aim.Aim, steps_are_long: bool) -> None:
        self._plans, self._whole, self._aim = plans, plans[0], wanted
        self.weighs = wanted.memory
        parts = () if steps_are_long else plans[0].without_each()
        self._staying = {plans[0].name, *(plan.name for plan in parts)}

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return plans slower than the baseline or far behind; at a planned look also plans
        without a proven part, and the whole plan where it gains nothing.
        """
        if self._aim.memory:
            return ()
        gone, whole = [*super().leaving(racing, comparison)], self._row(racing)
        if not _is_early(racing):
            gone += [row for row in fallen_behind(racing) if row.name not in self._staying]
        if comparison and whole:
            proven = {
                self._whole.without(p.name).name for p in self._parts(comparison) if p.is_proven
            }
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
            return ratio is not None and ratio.high < aim.LIKELY
        precise = max(PRECISE, NORMAL * PROCESSES * math.log(max(ratio.median, 1)))
        names = {row.name for row in racing}
        parts = self._parts(comparison)
        left = [part for part in parts if self._whole.without(part.name).name in names]
        rivals = [row for row in racing[1:] if row is whole or row.name not in self._staying]
        rounds = len(racing[0].times_s)
        has_enough, is_ordered = rounds >= ENOUGH_ROUNDS, rounds >= ORDER_ROUNDS
        are_clear = has_enough or all(part.is_clear for part in left)
        is_ordered |= is_order_clear(rivals)
        return are_clear and is_ordered and ratio.is_precise(precise * (1 + has_enough))

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the best, then others until one is right."""
        records = {record.name: record for record in comparison.records[1:]}

        def gain(record: Record, checked: bool) -> float:
            return self._aim.gain(comparison, record, proven=True, checked=checked)

        gains = {name: gain(record, False) for name, record in records.items()}
        while gains[(best := aim.leader(self._plans, gains)).name] > 1:
            yield records[best.name]
            if gain(records[best.name], checked=True) > 1:
                return
            gains[best.name] = 0.0

    def _parts(self, comparison: Comparison) -> list[aim.PlanPart]:
        return aim.parts_of(self._whole, comparison) if len(self._whole.values) > 1 else []

    def _row(self, racing: Sequence[Record]) -> Record | None:
        return next((row for row in racing[1:] if row.name == self._whole.name), None)


def _is_early(records: Sequence[Record]) -> bool:
    """Return whether a race has had too few rounds, or too little time, to drop a record."""
    rounds = len(records[0].times_s)
    raced_s = sum(sum(record.times_s) for record in records)
    return rounds < FEW_ROUNDS or (raced_s < LEAST_RACE_S and rounds < 2 * FEW_ROUNDS)


def fallen_behind(records: Sequence[Record]) -> list[Record]:
    """Return the records that are clearly behind the fastest."""
    behind, margin = _behind(records)
    return [record for record, share in zip(records, behind, strict=True) if share > margin]


def hopeless(records: Sequence[Record]) -> list[Record]:
    """Return the records far behind the fastest in two rounds, or farther in the first one."""
    first = min(records, key=lambda record: sum(record.times_s))
    limits = [(HOPELESS, LONG_ROUNDS)] + [(HOPELESS_AT_ONCE, 1)] * (not first.is_compiled)
    return [
        record
        for record in records
        if any(aim.is_behind(first.times_s, record.times_s, *limit) for limit in limits)
    ]


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
    logs += np.log([aim.WORTH_IT if record.is_compiled else 1.0 for record in records])[:, None]
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
        """Return the steps of a block: a short one has an untimed one before it."""
        return 1 if self.step_s >= LONG_S else 1 + BLOCK_STEPS

    def proof_s(self, times: float = PROVEN) -> float:
        """Return about how many seconds a proof takes, with its check.

        The steps of its plans take `times` the baseline's time together.
        """
        block_s = max(self._block * self.step_s, BLOCK_S)
        rounds_s = ORDER_ROUNDS * (1 + times) * block_s
        return budget.CHECK_S + budget.CHECK_STEPS * self.step_s + rounds_s

    @property
    def steps_are_long(self) -> bool:
        """Return whether a proof of every part would take too much of the budget."""
        return 2 * self.proof_s() > self.seconds

    def why_not_compiled(self, takes_s: float, steps: int | None, is_whole: bool = False) -> str:
        """Return why compiling for `takes_s` seconds can't pay in these steps; empty if it may."""
        steps_s = math.inf if steps is None else steps * self.step_s
        if steps_s <= takes_s:
            return (
                f"{steps} steps take {steps_s:.1f} s, compiling alone takes about {takes_s:.0f} s"
            )
        if not self._grows and self.seconds < COMPILE_S:
            short = f"{budget.few_digits(self.seconds)} s are less than what compiling takes"
            return f"{short}: --budget 30 tries it"
        if is_whole and takes_s > max(WHOLE_S, self.seconds):
            longer = f"--budget {math.ceil(takes_s)} tries it"
            return f"compiling the whole model takes about {takes_s:.0f} s: {longer}"
        return ""

    def can_check(self) -> bool:
        """Return whether a plan can be timed in a few rounds and checked."""
        return self.allows((budget.CHECK_STEPS + 2 * (budget.APART + FEW_ROUNDS)) * self.step_s)

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
        # What surrounds the blocks of a proof, and other programs, may take 30 % next to its steps.
        left_s = self.left_s - max(1.3 * self.proof_s(ALONE), PROOF * self.seconds)
        return min(RACE * self.seconds, max(left_s, 0.0))

    def ahead(self, copies_bytes: float) -> str:
        """Return the line before the search: how long it takes, whether that is enough, and the
        room for copies of the state from 1 GiB on.
        """
        step = f"one step takes {self.step_s:.2g} s"
        is_short = self.seconds < ENOUGH_STEPS * self.step_s / 2
        text = f"{step}: about {self.seconds:.0f} s and what compiling takes"
        if copies_bytes >= 1 << 30:
            text += f"; copies of its state take {units.size(copies_bytes)} at most"
        return f"{text}; {budget.LONGER}" if is_short else text
