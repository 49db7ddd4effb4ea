"""Choose the plan of each step: plans duel in blocks of steps, within a limit on the cost.

A race gets a step's seconds and returns the name of the next step's plan; it touches no model.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from statistics import median
from typing import Any

from speedkit_jupyter.extras.auto.duel import LEAD, WORTH, Block, Duel
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S
from speedkit_jupyter.rounds.statistics import Ratio

BASELINE = "baseline"
# Initial estimates: a change of the plan takes SWITCH_S seconds, and a plan that has raced no round
# is slower by the share UNKNOWN_LOSS.
SWITCH_S, UNKNOWN_LOSS = 3e-4, 0.05
# A race may cost the share `overhead` of the time so far. In advance, it may also spend this share
# of the expected remaining time, but at most one step plus AHEAD_S seconds. Of the remaining time,
# at most AHEAD times the time so far counts. While a plan waits for its examination, a later plan's
# duel may cost MEANWHILE times the examination, or more if that plan is likely faster.
AHEAD, AHEAD_S, MEANWHILE = 20.0, 0.01, 0.25
# Number of recent steps to keep for each plan and kind of batch, to compare later steps with.
KEPT_STEPS = 64


class Race:
    """Time plans one by one against the best proven plan, on the steps of a run.

    Rounds and examinations begin only if the race can afford them (see AHEAD). `remaining` returns
    the expected remaining seconds, given the seconds so far. `objection(name)` returns why a plan
    may not race, "" if it may, or None before an examination of `examination_s(name)` seconds.

    `leader` is the best proven plan, at first BASELINE, and `proof` its speed-up over BASELINE.
    `waiting` has the plans without a result. `again` has plans that race a second time because the
    machine was busy. `tried` has each plan's duel, or None if an earlier run proved the plan.
    The race has cost `lost_s` seconds, of which `allowed_s` don't count towards the limit.
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
        self.leader = BASELINE
        self.proof: Ratio | None = None
        self.reasons: dict[str, str] = {}
        self.lost_s = self.elapsed_s = self._once_s = self.allowed_s = 0.0
        self.switch_s = SWITCH_S
        self.duel: Duel | None = None
        self.overhead, self._random = overhead, random.Random(seed)
        # The seconds of the latest steps, by kind and plan.
        self._times = defaultdict[Any, deque[float]](lambda: deque(maxlen=KEPT_STEPS))
        self._blocks: list[Block] = []  # of the current round, complete or not
        self.again: list[str] = []

    @property
    def active(self) -> str:
        """Return the current block's plan; otherwise a likely faster rival, or the leader."""
        if self._blocks:
            return self._blocks[-1].name
        return self.duel.rival if self.duel is not None and self.duel.is_likely else self.leader

    @property
    def is_settled(self) -> bool:
        return not self.waiting

    @property
    def in_round(self) -> bool:
        return bool(self._blocks)

    @property
    def number(self) -> tuple[int, int]:
        """Return the number of plans tried so far, and the number of plans tried or waiting."""
        return len(self.tried), len({*self.tried, *self.waiting})

    def step_ended(self, seconds: float | None, kind: Hashable, elapsed_s: float) -> str:
        """Note a step, and return the name of the next step's plan.

        `seconds` excludes the time between steps; it is None if it doesn't measure `active`.
        `kind` is equal for steps with the same work; `elapsed_s` is the time of the run so far.
        """
        self.elapsed_s = elapsed_s
        if seconds is not None:
            self._timed(seconds, kind)
        if not self._blocks and not self.to_examine():
            self._begin_round()
        return self.active

    def to_examine(self) -> str:
        """Return the plan to examine next; "" in a round, or if no plan can be examined now."""
        name = "" if self._blocks else self._unexamined(self.waiting)
        return name if name and self.affords(self._examination_s(name)) else ""

    def _unexamined(self, names: Sequence[str]) -> str:
        return next((one for one in names if self._objection(one) is None), "")

    def _timed(self, seconds: float, kind: Hashable) -> None:
        block = self._blocks[-1] if self._blocks else None
        usual_s = self.usual_s(kind, self.leader) or seconds
        is_slowest = seconds > max(self._times[kind, self.leader], default=seconds)
        if block is None or len(block.ratios) >= LEAD:
            self._times[kind, self.active].append(seconds)
        if block is not None and self.duel is not None:
            block.note(seconds, usual_s, is_slowest)
            self._in_block(block, self.duel)

    def usual_s(self, kind: Hashable, name: str) -> float | None:
        """Return the median seconds of a plan's recent steps of a kind; None without such steps."""
        times = self._times[kind, name]
        return median(times) if times else None

    @property
    def step_s(self) -> float:
        """Return the median seconds of the leader's recent steps, of any kind; 0 without any."""
        own = (times for (_, name), times in self._times.items() if name == self.leader)
        times = [*chain.from_iterable(own)]
        return median(times) if times else 0.0

    def charge(self, seconds: float, expected_s: float = math.inf) -> None:
        """Count seconds as a cost; seconds over `expected_s` are one-time and delay no round."""
        self.lost_s += seconds
        self._once_s += max(0.0, seconds - expected_s)

    def affords(self, seconds: float) -> bool:
        """Return whether the race may cost this many more seconds (see AHEAD)."""
        ahead_s = self.lost_s + seconds - self.allowed_s - self.overhead * self.elapsed_s
        if ahead_s <= 0 or ahead_s > self.step_s + AHEAD_S:
            return ahead_s <= 0
        rest_s = min(self._remaining(self.elapsed_s), AHEAD * self.elapsed_s)
        return ahead_s <= self.overhead * rest_s

    def switched(self, seconds: float) -> None:
        """Count a plan change as a cost of the race and the duel; update the average `switch_s`."""
        self.switch_s = 0.7 * self.switch_s + 0.3 * min(seconds, 2 * self.switch_s)
        self._charge_duel(seconds)

    def _charge_duel(self, seconds: float) -> None:
        self.charge(seconds)
        if self.duel is not None:
            self.duel.lost_s += seconds

    def drop(self, name: str, reason: str) -> None:
        """Drop a plan and end its duel; if the plan leads, the baseline leads again."""
        self.reasons[name] = reason
        self.waiting = [one for one in self.waiting if one != name]
        if self.duel is not None and name in (self.duel.leader, self.duel.rival):
            self.duel, self._blocks = None, []
        if name == self.leader:
            self.leader, self.proof = BASELINE, None

    def begin_with(self, name: str, proof: Ratio) -> None:
        """End the race with the winner and the proof of an earlier run."""
        self.tried[name] = None
        self.waiting, self.duel, self._blocks = [], None, []
        self.leader, self.proof = name, proof

    def pause(self) -> str:
        """Discard the current round, as between two cells; return the leader."""
        self._blocks = []
        return self.leader

    # Rounds.

    def _begin_round(self) -> None:
        duel = self.duel = self._next_duel()
        if duel is not None and self._affords_round(duel):
            self._begin_block(self._random.choice([duel.rival, duel.leader]))

    def _begin_block(self, name: str) -> None:
        # For short steps, load isn't measured: that takes 0.2 ms, and delays disturb few rounds.
        load = self.load if self.step_s >= BLOCK_S else None
        if load is not None:
            load.begin()
        self._blocks.append(Block(name, load))

    def _next_duel(self) -> Duel | None:
        """Return the next round's duel, or None if no plan may race; drop plans with objections."""
        if self.duel is not None and self.duel.is_likely:
            return self.duel
        for rival in [*self.waiting]:
            if why := self._objection(rival):
                self.drop(rival, why)
            elif why == "":
                duel = self.tried.get(rival)
                if duel is None or duel.leader != self.leader:
                    duel = Duel(self.leader, rival, sum(self.number) + len(self.again))
                self.tried[rival] = duel
                return duel
        return None

    def _affords_round(self, duel: Duel) -> bool:
        """Return whether a round is within the cost limit, or costs at most `overhead` of its time.

        Without a round, a rival is assumed slower by UNKNOWN_LOSS, or the leader's gain if larger.
        If an earlier plan waits for its examination, MEANWHILE also limits the duel's cost.
        """
        ahead = self._unexamined(self.waiting[: self.waiting.index(duel.rival)])
        if ahead and not duel.is_likely and duel.lost_s > MEANWHILE * self._examination_s(ahead):
            return False
        slower = UNKNOWN_LOSS if self.proof is None else max(self.proof.median - 1, UNKNOWN_LOSS)
        if duel.pairs:
            slower = max(0.0, 1 / duel.median - 1)
        block_s = duel.steps(self.step_s, self.switch_s) * self.step_s
        cost_s = 2 * self.switch_s + block_s * slower
        return cost_s <= self.overhead * 2 * block_s or self.affords(cost_s - self._once_s)

    def _in_block(self, block: Block, duel: Duel) -> None:
        is_rival, is_first = block.name == duel.rival, not duel.pairs
        block.has_left = is_rival and block.seems_slow(is_first, self.overhead * self.elapsed_s)
        if not block.has_left and len(block.ratios) < duel.steps(self.step_s, self.switch_s):
            return
        if block.load is not None:
            block.delay_s = block.load.seconds(block.wall_s)
        if is_rival:
            self._charge_duel(block.excess_s(is_first))
        if len(self._blocks) == 2:
            self._end_round(duel)
        else:
            self._begin_block(duel.leader if is_rival else duel.rival)

    def _end_round(self, duel: Duel) -> None:
        blocks, self._blocks = {one.name: one for one in self._blocks}, []
        result = duel.note(blocks[duel.leader], blocks[duel.rival], self.proof is not None)
        if isinstance(result, Ratio):
            self._won(duel, result)
        elif duel.were_delayed and result and duel.rival not in self.again:
            self.again.append(duel.rival)
            self.waiting.remove(duel.rival)
            self.waiting.append(duel.rival)
            del self.tried[duel.rival]
            self.duel = None
        elif result:
            leader, rival = duel.leader.split("+"), duel.rival.split("+")
            alone = "+".join(part for part in rival if part not in leader)
            if {*leader} < {*rival} and alone in self.waiting and duel.median < WORTH:
                self.drop(alone, f"{duel.rival} is {result}")  # `alone` lacks the leader's gain
            self.drop(duel.rival, result)

    def _won(self, duel: Duel, ratio: Ratio) -> None:
        if duel.leader != BASELINE:
            self.reasons[duel.leader] = f"{duel.rival} is {ratio.median:.2f} times as fast"
        if (known := self.proof) is not None:
            times = ratio.median * known.median, ratio.low * known.low, ratio.high * known.high
            ratio = Ratio(*times, ratio.pairs)
        self.waiting.remove(duel.rival)
        self.proof, self.leader, self.duel = ratio, duel.rival, None
