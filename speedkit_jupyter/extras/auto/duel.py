"""Compare the speed of two plans in rounds: a round times a block of the user's steps per plan.

The two blocks of a round run in random order. Their times form one pair, as in `%%speedbench`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Any

from speedkit_jupyter.rounds.busy_machine import SELDOM
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S
from speedkit_jupyter.rounds.statistics import ERROR, Ratio, paired_ratio

# A block begins with LEAD steps that are not compared, because the first step after a change of the
# plan takes 5 to 15 % longer. LEAST_STEPS to MOST_STEPS timed steps follow. They are to take
# BLOCK_S seconds, or SWITCHES times as long as a change of the plan if that is longer.
LEAD, LEAST_STEPS, MOST_STEPS, SWITCHES = 1, 2, 200, 4.0
# Numbers of rounds after which a duel is tested. By Bonferroni's correction, the probability that
# any test of a race claims a false gain is at most ERROR.
LOOKS = (5, 10, 15, 22, 33)
# A speed-up below WORTH is not worth a change. A plan is dropped after SLOWER_ROUNDS rounds without
# delays by other programs, if it was slower in each. One round fewer is enough if the plan's last
# block ended early (HOPELESS), and one fewer against a proven plan.
WORTH, SLOWER_ROUNDS = 1.02, 3
# A rival's block ends early if all its timed steps, LEAST_STEPS or more, take over HOPELESS times
# the leader's usual time. In the first block, two steps over HOPELESS_AT_ONCE times are enough.
# These steps must exceed the leader's slowest step. One step ends a block if it is slower by
# TOO_LONG_S seconds, and by more than the race may cost so far. The round then drops a rival that
# takes over HOPELESS_AT_ONCE times the leader's time, or HOPELESS times a proven leader's time.
HOPELESS, HOPELESS_AT_ONCE, TOO_LONG_S = 1.4, 4.0, 1.0
# A rival is likely faster if it was LIKELY times as fast in all rounds, LIKELY_ROUNDS or more.
# Steps between rounds then run under the rival, and further blocks have one timed step.
LIKELY, LIKELY_ROUNDS = 1.2, 2


@dataclass
class Block:
    """Consecutive steps of one plan.

    `ratios` holds each step's time ÷ `usual_s`, the leader's usual time for a step of that kind.
    `slower` has the same ratios, but 0 for a step no longer than the leader's slowest step.
    `wall_s` is the total of all steps in seconds; other programs caused at most `delay_s` of it.
    `has_left` is true if the block ended early.
    """

    name: str
    load: Any
    ratios: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)
    usual_s: float = 0.0
    wall_s: float = 0.0
    delay_s: float = 0.0
    has_left: bool = False

    def note(self, seconds: float, usual_s: float, is_slowest: bool) -> None:
        self.usual_s, self.wall_s = usual_s, self.wall_s + seconds
        self.ratios.append(seconds / usual_s)
        self.slower.append(seconds / usual_s * is_slowest)

    def seems_slow(self, is_first: bool, most_s: float) -> bool:
        """Return whether to end the block early; the race may cost `most_s` seconds so far."""
        timed = self.slower[LEAD:]
        if is_first and timed and min(self.slower) > HOPELESS_AT_ONCE:
            return True
        is_hopeless = len(timed) >= LEAST_STEPS and min(timed) > HOPELESS
        return is_hopeless or (self.ratios[-1] - 1) * self.usual_s > max(TOO_LONG_S, most_s)

    @property
    def was_delayed(self) -> bool:
        return self.delay_s > SELDOM * self.wall_s

    @property
    def relative(self) -> float:
        """Return the lower median of timed steps' ratios, since other programs may delay steps."""
        return median_low(self.ratios[LEAD:] or self.ratios)

    def excess_s(self, is_first: bool) -> float:
        """Return the block's estimated extra seconds compared with the leader, minus delays.

        Each step counts with the block's median ratio. Two steps count with their own ratio if it
        is higher: a plan's first step, which may build kernels, and a step that ended the block.
        """
        middle = max(0.0, self.relative - 1)
        alone = [self.ratios[0]] * is_first + [self.ratios[-1]] * self.has_left
        longer = sum(max(0.0, one - 1 - middle) for one in alone)
        return max(0.0, (middle * len(self.ratios) + longer) * self.usual_s - self.delay_s)


@dataclass
class Duel:
    """The rounds of the plan `rival` against `leader`; the race has at most `duels` duels.

    `pairs` has the relative times of leader and rival in each round; `calm` has the pairs of rounds
    that no other program delayed. `lost_s` is the cost of the duel in seconds. `were_delayed` is
    true if delays may be the reason why the rival lost.
    """

    leader: str
    rival: str
    duels: int
    pairs: list[tuple[float, float]] = field(default_factory=list)
    calm: list[tuple[float, float]] = field(default_factory=list)
    lost_s: float = 0.0
    were_delayed: bool = False

    def steps(self, step_s: float, switch_s: float) -> int:
        """Return a block's number of steps, including LEAD; a change of plan takes `switch_s`."""
        steps = max(BLOCK_S, SWITCHES * switch_s) / max(step_s, 1e-6)
        timed = math.ceil(min(max(steps, LEAST_STEPS), MOST_STEPS))
        return LEAD + (1 if self.is_likely else timed)

    def note(self, leader: Block, rival: Block, is_proven: bool) -> Ratio | str:
        """Add a round. Return proof of a faster rival, the reason to drop it, or "" to go on."""
        pair = leader.relative, rival.relative
        self.were_delayed = leader.was_delayed or rival.was_delayed
        self.pairs.append(pair)
        self.calm += [] if self.were_delayed else [pair]
        slower = pair[1] / pair[0]
        if rival.has_left and rival.excess_s(len(self.pairs) == 1) > TOO_LONG_S:
            slower = max(slower, rival.ratios[-1])
        is_hopeless = rival.has_left and slower > HOPELESS
        if is_hopeless and (is_proven or slower > HOPELESS_AT_ONCE):
            return f"{slower:.1f} times slower, so it left"
        rounds, calm, middle = len(self.pairs), len(self.calm), self.median
        is_slower = all(leader < rival for leader, rival in self.calm)
        is_out = is_slower and calm >= SLOWER_ROUNDS - is_proven - is_hopeless
        if rounds in LOOKS and not is_out:
            # Half of a two-sided interval's errors claim "slower", which is not used here.
            error = 2 * ERROR / len(LOOKS) / self.duels
            leaders, rivals = zip(*(self.calm if calm >= LOOKS[1] else self.pairs), strict=True)
            ratio = paired_ratio(leaders, rivals, error)
            if ratio.verdict == "faster" and ratio.median >= WORTH:
                return ratio
            is_known = calm + rounds >= 2 * LOOKS[1]  # a delayed round counts half
            is_out = rounds == LOOKS[-1] or (is_known and middle < WORTH)
        noisy = ", but too noisy to prove" if middle >= WORTH else ""
        self.were_delayed = bool(noisy) and 2 * calm < rounds
        return f"{middle:.2f} times as fast as {self.leader}{noisy}" if is_out else ""

    @property
    def ratios(self) -> list[float]:
        """Return leader's ÷ rival's time by round; with LOOKS[0] calm rounds, only for these."""
        pairs = self.calm if len(self.calm) >= LOOKS[0] else self.pairs
        return [leader / rival for leader, rival in pairs]

    @property
    def median(self) -> float:
        return median(self.ratios)

    @property
    def is_likely(self) -> bool:
        """Return whether the rival is probably faster, though not proven."""
        return len(self.ratios) >= LIKELY_ROUNDS and min(self.ratios) >= LIKELY
