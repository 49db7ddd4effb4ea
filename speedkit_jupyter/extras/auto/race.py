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
from typing import Any

from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S
from speedkit_jupyter.rounds.statistics import ERROR, SELDOM, Ratio, paired_ratio

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
# A gain below WORTH is not worth a change. A block of a rival ends early once LEAST_STEPS timed
# steps are HOPELESS times as long as the leader's usual step, once its first two steps are
# HOPELESS_AT_ONCE times as long, or once one takes TOO_LONG_S seconds more and all that the race
# may cost. Only steps longer than the leader's slowest count. The leader's block next to it
# confirms that the rival is slow; MOST_HOPELESS such rounds drop it, and HOPELESS_AT_ONCE alone.
WORTH, HOPELESS, HOPELESS_AT_ONCE, TOO_LONG_S = 1.02, 1.4, 4.0, 1.0
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
# While the race saves seconds for an examination, another plan may use MEANWHILE of them.
MEANWHILE = 0.25
# Recent steps of a kind of batch that later steps are compared with.
KEPT_STEPS = 64


@dataclass
class Block:
    """Consecutive steps of one plan; the first LEAD steps are not timed.

    `ratios` holds each step's time divided by the leader's usual time, and `usual_s` the latter.
    `slower` are the same ratios, but 0 for a step that is not longer than the leader's slowest.
    Other programs delayed the block by at most `delay_s`; it `has_left` if it ended early.
    """

    name: str
    ratios: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)
    usual_s: float = 0.0
    wall_s: float = 0.0
    delay_s: float = 0.0
    has_left: bool = False

    @property
    def relative(self) -> float:
        """Return the median ratio; the lower one, as other programs may delay a step."""
        return median_low(self.ratios[LEAD:] or self.ratios)

    def excess_s(self, is_first: bool) -> float:
        """Return the seconds that the steps took longer than the leader's, without delays.

        The lead-in of a plan's first block counts in full (it may build kernels), and so does the
        step after which a plan left.
        """
        middle = max(0.0, self.relative - 1)
        alone = [self.ratios[0]] * is_first + [self.ratios[-1]] * self.has_left
        longer = sum(max(0.0, one - 1 - middle) for one in alone)
        return max(0.0, (middle * len(self.ratios) + longer) * self.usual_s - self.delay_s)


@dataclass
class Duel:
    """Rounds of a plan against the leader: pairs of block times, the leader's first.

    `calm` are the rounds that no other program delayed.
    """

    leader: str
    rival: str
    error: float
    pairs: list[tuple[float, float]] = field(default_factory=list)
    calm: list[tuple[float, float]] = field(default_factory=list)
    hopeless: int = 0  # rounds in which the rival left early

    @property
    def ratios(self) -> list[float]:
        """Return the leader's time divided by the rival's, for calm rounds if they are enough."""
        pairs = self.calm if len(self.calm) >= LOOKS[0] else self.pairs
        return [leader / rival for leader, rival in pairs]

    @property
    def is_likely(self) -> bool:
        """Return whether the rival is probably faster, though not proven."""
        return len(self.ratios) >= LIKELY_ROUNDS and min(self.ratios) >= LIKELY


class Race:
    """A race of plans on the steps of a run.

    It costs at most the share `overhead` of the run; `remaining` estimates the seconds of its rest
    from those so far. `objection` returns why a plan may not race: an empty string if it may, None
    until it is examined, which takes `examination_s`. `load` measures delays as `Interruptions`
    does. `leader` is the best plan so far, `active` the current step's, and `proof` the baseline's
    time divided by the leader's. `tried` has the duel of each plan that has raced; None if an
    earlier run proved the plan. `lost_s` are the seconds that slower plans, changes and
    examinations have cost, and `allowed_s` those that a gain known from earlier pays for.
    """

    def __init__(
        self,
        rivals: Sequence[str],
        overhead: float,
        objection: Callable[[str], str | None] = lambda name: "",
        remaining: Callable[[float], float] = lambda elapsed_s: 0.0,
        examination_s: Callable[[str], float] = lambda name: 0.0,
        load: Any = None,
        seed: int = 0,
    ) -> None:
        self._objection, self._remaining, self.load = objection, remaining, load
        self._examination_s = examination_s
        self.waiting, self.tried = [*rivals], dict[str, Duel | None]()
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
        self._measures_load = False
        self.again: list[str] = []  # plans that race once more, since the machine was busy
        self._ahead: list[str] = []  # plans that were not yet examined when the duel began
        self._halted, self._lost_before_s = dict[str, Duel](), 0.0

    @property
    def is_settled(self) -> bool:
        return self.duel is None and not self.waiting

    @property
    def in_round(self) -> bool:
        return bool(self._blocks)

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
        if self.to_examine():
            self.active = self.leader
        elif not self._blocks:
            self._begin_round()
        return self.active

    def to_examine(self) -> str:
        """Return the plan to examine before the next round, once the race affords it; else ""."""
        unknown = (one for one in self.waiting if self._objection(one) is None)
        name = "" if self._blocks else next(unknown, "")
        return name if name and self.affords(self._examination_s(name)) else ""

    def _timed(self, seconds: float, kind: Hashable) -> None:
        block, known = self._blocks[-1] if self._blocks else None, self._kinds[kind]
        usual_s = self.usual_s(kind, self.leader) or seconds
        is_slowest = seconds > max(known[self.leader], default=seconds)
        if block is None or len(block.ratios) >= LEAD:
            known[self.active].append(seconds)
        if block is not None and self.duel is not None:
            block.usual_s, block.wall_s = usual_s, block.wall_s + seconds
            block.ratios.append(seconds / usual_s)
            block.slower.append(seconds / usual_s * is_slowest)
            self._in_block(block, self.duel)

    def usual_s(self, kind: Hashable, name: str) -> float | None:
        """Return the median seconds of a plan's steps of a kind; None without such steps."""
        times = self._kinds[kind][name]
        return median(times) if times else None

    def charge(self, seconds: float, expected_s: float = math.inf) -> None:
        """Count seconds as lost.

        For the excess above `expected_s`, as of kernels that are built once, no round waits. Given
        for examinations and preparations, which are not of the present duel.
        """
        self.lost_s += seconds
        self._lost_before_s += min(seconds, expected_s) if expected_s < math.inf else 0.0
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
        self.tried[name] = None
        self.waiting, self.duel, self._blocks = [], None, []
        self.leader, self.active, self.proof = name, name, proof

    def pause(self) -> str:
        """End the current round, as between two cells; return the leader's name."""
        self._blocks, self.active = [], self.leader
        return self.leader

    # Rounds.

    def _begin_round(self) -> None:
        if self.duel is not None:
            self._halt(self.duel)
        duel = self.duel = self.duel or self._next_duel()
        if duel is None or not self._affords_round(duel):
            self.active = duel.rival if duel is not None and duel.is_likely else self.leader
            return
        self._begin_block(self._random.choice([duel.rival, duel.leader]))

    def _begin_block(self, name: str) -> None:
        self.active = name
        self._blocks.append(Block(name))
        # Reading takes up to 0.2 ms, and short steps get many rounds between two delays.
        self._measures_load = self.load is not None and self.step_s >= BLOCK_S
        if self._measures_load:
            self.load.begin()

    def _next_duel(self) -> Duel | None:
        """Begin a duel, or go on with one; others race while the loop pays for an examination."""
        rivals = [*self.waiting]
        for place, rival in enumerate(rivals):
            if (why := self._objection(rival)) is None:
                continue
            self.waiting.remove(rival)
            if not why:
                self._ahead, self._lost_before_s = rivals[:place], self.lost_s - self._once_s
                duel = self._halted.pop(rival, None)
                if duel is None or duel.leader != self.leader:
                    # A two-sided interval errs half of the time by a claim of "slower".
                    duels = sum(self.number) + len(self.again) + 1
                    duel = Duel(self.leader, rival, 2 * ERROR / len(LOOKS) / duels)
                self.tried[rival] = duel
                return duel
            self.reasons[rival] = why
        return None

    def _halt(self, duel: Duel) -> None:
        """Let a plan go first that was ahead of the rival, and is examined now."""
        ready = (one for one in self._ahead if one in self.waiting and self._objection(one) == "")
        if not duel.is_likely and (first := next(ready, "")):
            self._halted[duel.rival] = duel
            self._race_later(duel.rival, self.waiting.index(first) + 1)

    def _race_later(self, name: str, place: int) -> None:
        del self.tried[name]
        self.waiting.insert(place, name)
        self.duel, self.active = None, self.leader

    def _affords_round(self, duel: Duel) -> bool:
        """Return whether a round may begin: also if it leaves the lost share of the run as it is.

        Before its first round a rival may be as slow as steps without a plan.
        """
        if self._delays(duel):
            return False
        unknown = UNKNOWN_LOSS if self.proof is None else max(self.proof.median - 1, UNKNOWN_LOSS)
        block_s = (LEAD + self._length()) * self.step_s
        cost_s = 2 * self.switch_s + block_s * self._expected.get(duel.rival, unknown)
        return cost_s <= self.overhead * 2 * block_s or self.affords(cost_s - self._once_s)

    def _delays(self, duel: Duel) -> bool:
        """Return whether a duel has used its share of the seconds saved for an examination."""
        ahead = (one for one in self._ahead if one in self.waiting)
        first = next((one for one in ahead if self._objection(one) is None), "")
        share_s = MEANWHILE * self._examination_s(first) if first else math.inf
        return not duel.is_likely and self.lost_s - self._once_s > self._lost_before_s + share_s

    @property
    def step_s(self) -> float:
        """Return the median seconds of the leader's steps; 0 without any."""
        times = [one for plans in self._kinds.values() for one in plans.get(self.leader, ())]
        return median(times) if times else 0.0

    def _length(self) -> int:
        """Return the number of timed steps of a block."""
        if self.duel is not None and self.duel.is_likely:
            return 1
        steps = max(BLOCK_S, SWITCHES * self.switch_s) / max(self.step_s, 1e-6)
        return math.ceil(min(max(steps, LEAST_STEPS), MOST_STEPS))

    def _in_block(self, block: Block, duel: Duel) -> None:
        is_rival, is_first = block.name == duel.rival, not duel.pairs
        block.has_left = is_rival and self._seems_slow(block, is_first)
        if not block.has_left and len(block.ratios) < LEAD + self._length():
            return
        if self._measures_load:
            block.delay_s = self.load.seconds(block.wall_s)
        if is_rival:
            self.charge(block.excess_s(is_first))
        if len(self._blocks) == 2:
            self._end_round(duel)
        else:
            self._begin_block(duel.leader if is_rival else duel.rival)

    def _seems_slow(self, block: Block, is_first: bool) -> bool:
        slower, timed = block.slower, block.slower[LEAD:]
        if is_first and timed and min(slower) > HOPELESS_AT_ONCE:
            return True
        longer_s = (block.ratios[-1] - 1) * block.usual_s
        is_hopeless = len(timed) >= LEAST_STEPS and min(timed) > HOPELESS
        return is_hopeless or longer_s > max(TOO_LONG_S, self.overhead * self.elapsed_s)

    def _end_round(self, duel: Duel) -> None:
        blocks, self._blocks = {one.name: one for one in self._blocks}, []
        self.active, rival = self.leader, blocks[duel.rival]
        pair = blocks[duel.leader].relative, rival.relative
        duel.pairs.append(pair)
        is_calm = all(one.delay_s <= SELDOM * one.wall_s for one in blocks.values())
        if is_calm:
            duel.calm.append(pair)
        slower = pair[1] / pair[0]
        if rival.has_left and rival.excess_s(len(duel.pairs) == 1) > TOO_LONG_S:
            slower = max(slower, rival.ratios[-1])
        if rival.has_left and slower > HOPELESS:
            duel.hopeless += 1
            is_last = duel.hopeless == MOST_HOPELESS or self.proof is not None
            if is_last or slower > HOPELESS_AT_ONCE:
                self._left(rival, slower, is_calm)
                return
        self._judge(duel)

    def _left(self, block: Block, slower: float, is_calm: bool) -> None:
        """Drop a plan that is hopelessly slow; after a delayed round it races once more."""
        if is_calm or not self._races_again(block.name):
            self.drop(block.name, f"{slower:.1f} times slower, so it left")
        else:
            calm = slower * (1 - block.delay_s / block.wall_s)
            self._expected[block.name] = max(0.0, calm - 1)

    def _races_again(self, name: str) -> bool:
        """Move a plan whose rounds were delayed to the end of the queue; return False if it was."""
        if name in self.again:
            return False
        self.again.append(name)
        self._race_later(name, len(self.waiting))
        return True

    def _judge(self, duel: Duel) -> None:
        rounds, calm, middle = len(duel.pairs), len(duel.calm), median(duel.ratios)
        self._expected[duel.rival] = max(0.0, 1 / middle - 1)
        is_slower = all(leader < rival for leader, rival in duel.calm)
        if calm >= SLOWER_ROUNDS - (self.proof is not None) and is_slower:
            self._lost(duel, middle)
        elif rounds in LOOKS:
            given = duel.calm if calm >= LOOKS[1] else duel.pairs
            leaders, rivals = zip(*given, strict=True)
            ratio = paired_ratio(leaders, rivals, duel.error)
            is_known = calm + rounds >= 2 * LOOKS[1]  # a delayed round counts half
            if ratio.verdict == "faster" and ratio.median >= WORTH:
                self._won(duel, ratio)
            elif rounds == LOOKS[-1] or (is_known and middle < WORTH):
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
        if noisy and 2 * len(duel.calm) < len(duel.pairs) and self._races_again(duel.rival):
            return
        self.reasons[duel.rival] = why = f"{middle:.2f} times as fast as {duel.leader}{noisy}"
        leader, rival = duel.leader.split("+"), duel.rival.split("+")
        alone = "+".join(part for part in rival if part not in leader)
        if (
            {*leader} < {*rival} and alone in self.waiting and not noisy
        ):  # it lacks the leader's gain, too
            self.drop(alone, f"{duel.rival} is {why}")
        self.duel, self.active = None, self.leader
