"""Choose the plan of the next step: duels in blocks of steps, within a limit of their cost.

A race gets the seconds of each step and returns the name of a plan; it touches no model. A block is
a few steps of the user's run. The two blocks of a round run in random order, and their ratio is one
pair of the statistics of `%%speedbench`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

from speedkit_jupyter.rounds.statistics import ERROR, Ratio, paired_ratio

BASELINE = "baseline"
# Untimed steps after a change of the plan: the first step after it takes 5 to 15 % longer.
LEAD = 1
# Least time of a block: BLOCK_S seconds, and SWITCHES times as long as a change of the plan. Then
# neither the clock nor the change decides.
BLOCK_S, SWITCHES = 0.02, 4.0
LEAST_STEPS, MOST_STEPS = 2, 200
# Rounds after which a duel is tested. Bonferroni's correction keeps the error of all tests together
# at ERROR.
LOOKS = (5, 8, 12, 18, 27, 40)
# Assumed seconds of one change of the plan, until one is measured.
SWITCH_S = 3e-4
# A gain below WORTH is not worth a change. A plan is dropped after LEAST_STEPS timed steps that are
# HOPELESS times as long as the leader's usual step, or one step that is FAR_SLOWER times as long.
# Only steps longer than the leader's slowest count.
WORTH, HOPELESS, FAR_SLOWER = 1.02, 1.4, 4.0
# A plan that was slower in each of this many rounds is dropped, without a claim about the factor.
SLOWER_ROUNDS = 3
# The share by which an unmeasured plan is expected to be slower.
UNKNOWN_LOSS = 0.25
# Recent steps of a kind of batch that later steps are compared with.
KEPT_STEPS = 64


@dataclass
class Block:
    """Consecutive steps of one plan: seconds and kind of each timed step.

    `slower` is the smallest ratio of a step's time to the leader's usual time.
    """

    name: str
    seen: int = 0
    slower: float = 0.0
    steps: list[tuple[float, Hashable]] = field(default_factory=list)


@dataclass
class Duel:
    """Rounds of a plan against the leader: pairs of block times, the leader's first."""

    leader: str
    rival: str
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ratio(self) -> Ratio:
        """Return the leader's time divided by the rival's, with its interval."""
        leaders, rivals = zip(*self.pairs, strict=True)
        return paired_ratio(leaders, rivals, ERROR / len(LOOKS))


class Race:
    """A race of plans on the steps of a run.

    Args:
        rivals: The names of the plans, in the order of their duels.
        overhead: The share of the run that the race may cost.
        objection: A function that returns why a plan may not race: an empty string if it may, None
            while that is unknown.
        seed: The seed of the random order of blocks.

    Attributes:
        leader: The name of the best plan so far.
        active: The name of the current step's plan.
        proof: The baseline's time divided by the leader's; None while the baseline leads.
        reasons: Why plans were dropped, by name.
        lost_s: Seconds that slower plans, switches and examinations have cost.
    """

    def __init__(
        self,
        rivals: Sequence[str],
        overhead: float,
        objection: Callable[[str], str | None] = lambda name: "",
        seed: int = 0,
    ) -> None:
        self._objection = objection
        self.waiting, self.tried = [*rivals], list[str]()
        self.leader = self.active = BASELINE
        self.proof: Ratio | None = None
        self.reasons: dict[str, str] = {}
        self.lost_s = self.elapsed_s = 0.0
        self.switch_s = SWITCH_S
        self.duel: Duel | None = None
        self.overhead, self._random = overhead, random.Random(seed)
        # The latest seconds of the steps of a kind, by plan.
        self._kinds: dict[Hashable, dict[str, deque[float]]] = defaultdict(
            lambda: defaultdict(lambda: deque(maxlen=KEPT_STEPS))
        )
        self._blocks: list[Block] = []  # of the current round, complete or not
        self._expected: dict[str, float] = {}  # the share by which a plan is slower

    @property
    def is_settled(self) -> bool:
        """Return whether no duel is running or waiting."""
        return self.duel is None and not self.waiting

    @property
    def number(self) -> tuple[int, int]:
        """Return the number of plans that have raced so far, and of all plans."""
        return len(self.tried), len(self.tried) + len(self.waiting)

    def step_ended(self, seconds: float, kind: Hashable, elapsed_s: float) -> str:
        """Note a step of the active plan, and return the name of the next step's plan.

        Args:
            seconds: The time of the step, without the time between steps.
            kind: A value that is equal for steps with the same work, as on batches of one shape.
            elapsed_s: The time of the run so far, in seconds.
        """
        self.elapsed_s = elapsed_s
        block = self._blocks[-1] if self._blocks else None
        usual_s = self.usual_s(kind, self.leader)
        if block is None or block.seen >= LEAD:
            self._kinds[kind][self.active].append(seconds)
        if block is not None:
            self._in_block(block, seconds, kind, usual_s)
        if not self._blocks:
            self._begin_round()
        return self.active

    def usual_s(self, kind: Hashable, name: str) -> float | None:
        """Return the median seconds of a plan's steps of a kind; None without such steps."""
        times = self._kinds[kind][name]
        return median(times) if times else None

    def charge(self, seconds: float) -> None:
        """Add seconds outside the user's steps to the lost seconds."""
        self.lost_s += seconds

    def affords(self, seconds: float) -> bool:
        """Return whether the race may cost this many more seconds."""
        return self.lost_s + seconds <= self.overhead * self.elapsed_s

    def switched(self, seconds: float) -> None:
        """Note the seconds of a change of the plan."""
        self.switch_s = (
            seconds if self.switch_s == SWITCH_S else 0.7 * self.switch_s + 0.3 * seconds
        )
        self.charge(seconds)

    def expect(self, name: str, loss: float) -> None:
        """Set the share by which a plan is expected to be slower than the leader; 0 for equal."""
        self._expected[name] = loss

    def drop(self, name: str, reason: str) -> None:
        """Drop a plan from the race for good."""
        self.reasons[name] = reason
        self.waiting = [one for one in self.waiting if one != name]
        if self.duel is not None and name in (self.duel.leader, self.duel.rival):
            self.duel, self._blocks = None, []
        if name == self.leader:
            self.leader, self.proof = BASELINE, None
        self.active = self.leader

    def begin_with(self, name: str, proof: Ratio) -> None:
        """End the race with the winner and the proof of an earlier run."""
        self.tried.append(name)
        self.waiting, self.duel, self._blocks = [], None, []
        self.leader = self.active = name
        self.proof = proof

    def pause(self) -> str:
        """End the current round, as between two cells; return the leader's name."""
        self._blocks, self.active = [], self.leader
        return self.leader

    # Rounds.

    def _begin_round(self) -> None:
        if self.duel is None:
            self.duel = self._next_duel()
        if self.duel is None or not self.affords(self._cost_s(self.duel)):
            self.active = self.leader
            return
        names = [self.duel.leader, self.duel.rival]
        self._random.shuffle(names)
        self._blocks = [Block(names[0])]
        self.active = names[0]

    def _next_duel(self) -> Duel | None:
        while self.waiting:
            why = self._objection(self.waiting[0])
            if why is None:
                return None
            rival = self.waiting.pop(0)
            if not why:
                self.tried.append(rival)
                return Duel(self.leader, rival)
            self.reasons[rival] = why
        return None

    def _cost_s(self, duel: Duel) -> float:
        """Return the expected cost of a round, in seconds, compared with steps of the leader."""
        loss = self._expected.get(duel.rival, UNKNOWN_LOSS)
        return 2 * self.switch_s + (LEAD + self._length()) * self.step_s * loss

    @property
    def step_s(self) -> float:
        """Return the median seconds of the leader's steps; 0 without any."""
        times = [one for plans in self._kinds.values() for one in plans.get(self.leader, ())]
        return median(times) if times else 0.0

    def _length(self) -> int:
        """Return the number of timed steps of a block."""
        step_s = max(self.step_s, 1e-6)
        return math.ceil(
            min(max(BLOCK_S / step_s, SWITCHES * self.switch_s / step_s, LEAST_STEPS), MOST_STEPS)
        )

    def _in_block(
        self, block: Block, seconds: float, kind: Hashable, usual_s: float | None
    ) -> None:
        block.seen += 1
        duel = self.duel
        assert duel is not None
        if block.seen > LEAD:
            block.steps.append((seconds, kind))
        if block.name == duel.rival and usual_s is not None:
            self.lost_s += max(0.0, seconds - usual_s)
            slowest_s = max(self._kinds[kind][self.leader])
            if self._is_hopeless(block, seconds / usual_s, seconds > slowest_s):
                self.drop(block.name, f"{seconds / usual_s:.1f} times slower, so it left")
                return
        if len(block.steps) < self._length() and block.seen < LEAD + MOST_STEPS:
            return
        if len(self._blocks) == 1:
            other = duel.leader if block.name == duel.rival else duel.rival
            self._blocks.append(Block(other))
            self.active = other
            return
        self._end_round(duel)

    def _is_hopeless(self, block: Block, slower: float, is_slowest: bool) -> bool:
        """Return whether to drop a block's plan, given the ratio of its last step."""
        slower = slower if is_slowest else 0.0  # a busy machine delays the leader's steps as well
        block.slower = min(block.slower, slower) if block.steps[1:] else slower
        return slower > FAR_SLOWER or (len(block.steps) >= LEAST_STEPS and block.slower > HOPELESS)

    def _end_round(self, duel: Duel) -> None:
        blocks, self._blocks = {one.name: one for one in self._blocks}, []
        values = [self._relative(blocks[name]) for name in (duel.leader, duel.rival)]
        self.active = self.leader
        if values[0] is None or values[1] is None:
            return
        duel.pairs.append((values[0], values[1]))
        middle = median(leader / rival for leader, rival in duel.pairs)
        self._expected[duel.rival] = max(0.0, 1 / middle - 1)
        self._judge(duel, middle)

    def _relative(self, block: Block) -> float | None:
        """Return the median time of a block, each step relative to its kind's usual time."""
        times = []
        for seconds, kind in block.steps:
            every = [one for known in self._kinds[kind].values() for one in known]
            times.append(seconds / median(every))
        return median(times) if times else None

    def _judge(self, duel: Duel, middle: float) -> None:
        pairs = len(duel.pairs)
        if pairs >= SLOWER_ROUNDS and max(leader / rival for leader, rival in duel.pairs) < 1:
            self._lost(duel, middle)
        elif pairs in LOOKS:
            ratio = duel.ratio
            if ratio.verdict == "faster" and ratio.median >= WORTH:
                self._won(duel, ratio)
            elif pairs == LOOKS[-1] or (pairs >= LOOKS[1] and middle < WORTH):
                self._lost(duel, middle)

    def _won(self, duel: Duel, ratio: Ratio) -> None:
        if duel.leader != BASELINE:
            self.reasons[duel.leader] = f"{duel.rival} is {ratio.median:.2f} times as fast"
        if (known := self.proof) is not None:
            times = ratio.median * known.median, ratio.low * known.low, ratio.high * known.high
            ratio = Ratio(*times, ratio.pairs)
        self.proof, self.leader, self.duel = ratio, duel.rival, None
        self.active = self.leader

    def _lost(self, duel: Duel, middle: float) -> None:
        self.reasons[duel.rival] = f"{middle:.2f} times as fast as {duel.leader}"
        self.duel, self.active = None, self.leader
