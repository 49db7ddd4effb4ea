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
from statistics import median, median_low

from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S
from speedkit_jupyter.rounds.statistics import Ratio, paired_ratio
from speedkit_jupyter.rounds.stopping import ERROR

BASELINE = "baseline"
# Untimed steps after a change of the plan: the first step after it takes 5 to 15 % longer.
LEAD = 1
# Least time of a block: BLOCK_S seconds, and SWITCHES times as long as a change of the plan. Then
# neither the clock nor the change decides.
SWITCHES = 4.0
LEAST_STEPS, MOST_STEPS = 2, 200
# Rounds after which a duel is tested. By Bonferroni's correction all tests of a race together claim
# a gain that is not there with the probability ERROR at most.
LOOKS = (5, 10, 15, 22, 33)
# Assumed seconds of one change of the plan, until one is measured.
SWITCH_S = 3e-4
# A gain below WORTH is not worth a change. A block ends early once LEAST_STEPS timed steps are
# HOPELESS times as long as the leader's usual step; the second such block drops the plan. The first
# two steps of a plan drop it if both are FAR_SLOWER times as long; one does if it takes TOO_LONG_S
# seconds more and all that the race may cost. Only steps longer than the leader's slowest count:
# other programs may delay one step, but rarely several in a row.
WORTH, HOPELESS, FAR_SLOWER, TOO_LONG_S = 1.02, 1.4, 4.0, 1.0
MOST_HOPELESS = 2
# A plan that was slower in each of this many rounds is dropped, without a claim about the factor.
SLOWER_ROUNDS = 3
# The share by which a plan is expected to be slower before its first round.
UNKNOWN_LOSS = 0.05
# A race may cost its share of the expected run, which is at most AHEAD times longer than the run so
# far, but no more in advance than one step and AHEAD_S seconds.
AHEAD, AHEAD_S = 4.0, 0.01
# A rival that was LIKELY times as fast in each of LIKELY_ROUNDS rounds or more serves the steps
# between the rounds, and its further blocks have one timed step: few steps are left to the leader.
LIKELY, LIKELY_ROUNDS = 1.2, 2
# Recent steps of a kind of batch that later steps are compared with.
KEPT_STEPS = 64


@dataclass
class Block:
    """Consecutive steps of one plan: seconds and kind of each timed step.

    `ratios` holds each step's time divided by the leader's usual time, and `usual_s` the latter.
    `slower` are the same ratios, but 0 for a step that is not longer than the leader's slowest.
    """

    name: str
    steps: list[tuple[float, Hashable]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)
    seen: int = 0
    usual_s: float = 0.0

    def excess_s(self, is_first: bool) -> float:
        """Return the seconds that the steps took longer than the leader's.

        They count by their median, so that a step that other programs delay costs nothing. The
        lead-in of a plan's first block counts in full: it may build kernels.
        """
        if not self.ratios:
            return 0.0
        middle = max(0.0, median_low(self.ratios[LEAD:] or self.ratios) - 1)
        lead = max(middle, self.ratios[0] - 1) - middle if is_first else 0.0
        return (middle * len(self.ratios) + lead) * self.usual_s


@dataclass
class Duel:
    """Rounds of a plan against the leader: pairs of block times, the leader's first."""

    leader: str
    rival: str
    error: float
    pairs: list[tuple[float, float]] = field(default_factory=list)
    hopeless: int = 0  # blocks of the rival that ended early

    @property
    def ratios(self) -> list[float]:
        return [leader / rival for leader, rival in self.pairs]

    @property
    def is_likely(self) -> bool:
        """Return whether the rival is probably faster, though not proven."""
        return len(self.pairs) >= LIKELY_ROUNDS and min(self.ratios) >= LIKELY


class Race:
    """A race of plans on the steps of a run.

    It costs at most the share `overhead` of the run; `remaining` estimates the seconds of its rest
    from those so far. `objection` returns why a plan may not race: an empty string if it may, None
    while that is unknown. `leader` is the best plan so far, `active` the current step's; `proof` is
    the baseline's time divided by the leader's. `lost_s` are the seconds that slower plans, changes
    and examinations have cost, and `allowed_s` those that a gain known from earlier pays for.
    """

    def __init__(
        self,
        rivals: Sequence[str],
        overhead: float,
        objection: Callable[[str], str | None] = lambda name: "",
        remaining: Callable[[float], float] = lambda elapsed_s: 0.0,
        seed: int = 0,
    ) -> None:
        self._objection, self._remaining = objection, remaining
        self.waiting, self.tried = [*rivals], list[str]()
        self.leader = self.active = BASELINE
        self.proof: Ratio | None = None
        self.reasons: dict[str, str] = {}
        self.lost_s = self.elapsed_s = self._once_s = self.allowed_s = 0.0
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
        return self.duel is None and not self.waiting

    @property
    def number(self) -> tuple[int, int]:
        """Return the number of plans that have raced so far, and of all plans."""
        return len(self.tried), len(self.tried) + len(self.waiting)

    def step_ended(self, seconds: float | None, kind: Hashable, elapsed_s: float) -> str:
        """Note a step of the active plan, and return the name of the next step's plan.

        `seconds` are without the time between steps, and None if other work is part of them.
        `kind` is equal for steps with the same work.
        """
        self.elapsed_s = elapsed_s
        if seconds is not None:
            self._timed(seconds, kind)
        if not self._blocks:
            self._begin_round()
        return self.active

    def _timed(self, seconds: float, kind: Hashable) -> None:
        block = self._blocks[-1] if self._blocks else None
        usual_s = self.usual_s(kind, self.leader)
        if block is None or block.seen >= LEAD:
            self._kinds[kind][self.active].append(seconds)
        if block is not None:
            self._in_block(block, seconds, kind, usual_s or seconds)

    def usual_s(self, kind: Hashable, name: str) -> float | None:
        """Return the median seconds of a plan's steps of a kind; None without such steps."""
        times = self._kinds[kind][name]
        return median(times) if times else None

    def charge(self, seconds: float, expected_s: float = math.inf) -> None:
        """Count seconds as lost.

        For the excess above `expected_s`, as of kernels that are built once, no round waits.
        """
        self.lost_s += seconds
        self._once_s += max(0.0, seconds - expected_s)

    def affords(self, seconds: float) -> bool:
        """Return whether the race may cost this many more seconds."""
        ahead_s = self.lost_s + seconds - self.allowed_s - self.overhead * self.elapsed_s
        if ahead_s <= 0 or ahead_s > self.step_s + AHEAD_S:
            return ahead_s <= 0
        rest_s = min(self._remaining(self.elapsed_s), AHEAD * self.elapsed_s)
        return ahead_s <= self.overhead * rest_s

    def switched(self, seconds: float) -> None:
        """Count a change of the plan; a delayed one counts twice the usual time for the next."""
        self.switch_s = 0.7 * self.switch_s + 0.3 * min(seconds, 2 * self.switch_s)
        self.charge(seconds)

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
        self.leader, self.active, self.proof = name, name, proof

    def pause(self) -> str:
        """End the current round, as between two cells; return the leader's name."""
        self._blocks, self.active = [], self.leader
        return self.leader

    # Rounds.

    def _begin_round(self) -> None:
        duel = self.duel = self.duel or self._next_duel()
        if duel is None or not self._affords_round(duel):
            self.active = duel.rival if duel is not None and duel.is_likely else self.leader
            return
        names = [duel.leader, duel.rival]
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
                # A two-sided interval errs half of the time by a claim of "slower".
                return Duel(self.leader, rival, 2 * ERROR / len(LOOKS) / sum(self.number))
            self.reasons[rival] = why
        return None

    def _affords_round(self, duel: Duel) -> bool:
        """Return whether a round may begin: also if it leaves the lost share of the run as it is.

        Before its first round a rival may be as slow as steps without a plan.
        """
        unknown = UNKNOWN_LOSS if self.proof is None else max(self.proof.median - 1, UNKNOWN_LOSS)
        block_s = (LEAD + self._length()) * self.step_s
        cost_s = 2 * self.switch_s + block_s * self._expected.get(duel.rival, unknown)
        return cost_s <= self.overhead * 2 * block_s or self.affords(cost_s - self._once_s)

    @property
    def step_s(self) -> float:
        """Return the median seconds of the leader's steps; 0 without any."""
        times = [one for plans in self._kinds.values() for one in plans.get(self.leader, ())]
        return median(times) if times else 0.0

    def _length(self) -> int:
        """Return the number of timed steps of a block."""
        if self.duel is not None and self.duel.is_likely:
            return 1
        step_s = max(self.step_s, 1e-6)
        return math.ceil(
            min(max(BLOCK_S / step_s, SWITCHES * self.switch_s / step_s, LEAST_STEPS), MOST_STEPS)
        )

    def _in_block(self, block: Block, seconds: float, kind: Hashable, usual_s: float) -> None:
        block.seen += 1
        duel = self.duel
        assert duel is not None
        if block.seen > LEAD:
            block.steps.append((seconds, kind))
        if block.name == duel.rival:
            block.usual_s = usual_s
            block.ratios.append(seconds / usual_s)
            is_slowest = seconds > max(self._kinds[kind][self.leader], default=seconds)
            block.slower.append(seconds / usual_s if is_slowest else 0.0)
            if self._left(block, duel):
                return
        if len(block.steps) < self._length() and block.seen < LEAD + MOST_STEPS:
            return
        if block.name == duel.rival:
            self.charge(block.excess_s(not duel.pairs))
        if len(self._blocks) == 2:
            self._end_round(duel)
            return
        self.active = duel.leader if block.name == duel.rival else duel.rival
        self._blocks.append(Block(self.active))

    def _left(self, block: Block, duel: Duel) -> bool:
        """End the block of a plan that is hopelessly slow; return whether it ended."""
        is_first = not duel.pairs and not duel.hopeless
        is_far = is_first and len(block.slower) > LEAD and min(block.slower) > FAR_SLOWER
        timed, longer_s = block.slower[LEAD:], (block.ratios[-1] - 1) * block.usual_s
        is_far |= longer_s > max(TOO_LONG_S, self.overhead * self.elapsed_s)
        if not is_far and (len(timed) < LEAST_STEPS or min(timed) <= HOPELESS):
            return False
        duel.hopeless += 1
        slower = median(block.ratios[LEAD:] or block.ratios)
        self.charge(block.excess_s(is_first))
        self._blocks, self.active = [], self.leader
        self._expected[duel.rival] = slower - 1
        if is_far or duel.hopeless == MOST_HOPELESS or self.proof is not None:
            self.drop(duel.rival, f"{slower:.1f} times slower, so it left")
        return True

    def _end_round(self, duel: Duel) -> None:
        blocks, self._blocks = {one.name: one for one in self._blocks}, []
        leader_s, rival_s = (self._relative(blocks[name]) for name in (duel.leader, duel.rival))
        self.active = self.leader
        if leader_s is None or rival_s is None:
            return
        duel.pairs.append((leader_s, rival_s))
        middle = median(duel.ratios)
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
        if pairs >= SLOWER_ROUNDS - (self.proof is not None) and max(duel.ratios) < 1:
            self._lost(duel, middle)
        elif pairs in LOOKS:
            leaders, rivals = zip(*duel.pairs, strict=True)
            ratio = paired_ratio(leaders, rivals, duel.error)
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
        noisy = ", but too noisy to prove" if middle >= WORTH else ""
        self.reasons[duel.rival] = f"{middle:.2f} times as fast as {duel.leader}{noisy}"
        self.duel, self.active = None, self.leader
