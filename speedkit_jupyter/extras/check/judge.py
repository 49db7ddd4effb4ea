"""The judge: at each size some calls against float64, then timed rounds whose results count too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from speedkit_jupyter.extras.check.agreement import BOTH, RoundingLimits, form_faults, rows, usual
from speedkit_jupyter.extras.check.calls import (
    INPUT,
    Drawn,
    Here,
    InputSource,
    Taken,
    Values,
    inputs_of,
)
from speedkit_jupyter.extras.check.processes import Elsewhere
from speedkit_jupyter.extras.check.result import Agreement, SizeCheck
from speedkit_jupyter.extras.data.batch_sweep import free_bytes, is_out_of_memory
from speedkit_jupyter.right import rounding
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.statistics import error_of_a_look, planned_looks
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.units import seconds
from speedkit_jupyter.support.units import size as bytes_

T = TypeVar("T")
Side = Here | Elsewhere
# Calls at each size that are compared with float64, each on other inputs.
FULL = 3
# A call in float64 with its controls takes at most so many times the memory and, with all else that
# is compared, so many times the seconds of one of the reference.
COPIES, CALLS = 8, 30
# Below this length matrices of length by length are no large part of the memory.
SHORT = 128
# So much of a call does not grow with its size.
CALL_S = 2e-3
# A block lasts at least this long, so that the clock's resolution is no part of it. It has no more
# calls than this, each on inputs of its own, which lie in memory at once.
BLOCK_S = 0.002
MOST_CALLS, MOST_BLOCK_BYTES = 32, 2**28
MOST_ROUNDS = 200
# What is taken off a block for the way of inputs and results leaves this share. It is the same for
# both sides of a round: each side's own would favour one in a slow moment.
LEAST_SHARE = 0.05
# Two calls of the reference on the same inputs differ by less, if only by the order of their sums.
ALIKE = 1e-3
UNSTEADY = "the reference gives another result each time, from the same inputs and seed"


class RewriteJudge:
    """Judges the candidate by the reference, for `budget_s` seconds at all sizes together."""

    def __init__(
        self, candidate: Side, reference: Side, truth: Here, inputs: InputSource, budget_s: float
    ) -> None:
        self._candidate, self._reference, self._truth = candidate, reference, truth
        self._inputs, self._budget_s = inputs, budget_s
        self._random = random.SystemRandom()  # no candidate knows what comes
        self._like: Values = {}  # outputs that gradients go through
        self._last: tuple[Any, float, int] | None = None  # size, its seconds and bytes
        self._relays_s: list[float] = []

    @property
    def _device(self) -> torch.device:
        return self._truth.device

    def run(self, sizes: Mapping[str, Any]) -> list[SizeCheck]:
        """Check each size, the smallest first. What the reference itself raises goes on."""
        found = [SizeCheck(name, size) for name, size in sizes.items()]
        begun_s = clock.now()
        for at, one in enumerate(found):
            left_s = max(self._budget_s - (clock.now() - begun_s), 0.0)
            if any(other.faults for other in found):
                one.skipped = "a smaller size is wrong already"
            else:
                one.skipped = self._too_large(one.size, left_s)
            if one.skipped:
                continue
            try:
                explained, own = self._compare(one, left_s / 2)
                if one.passed:
                    self._time(one, left_s / (len(found) - at), explained, own)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                one.skipped = f"out of memory ({in_a_line(error)})"
        return found

    def _too_large(self, size: Any, left_s: float) -> str:
        """Return why a size is not begun, by what the last one took; empty if it is.

        Work may grow with the length squared; what a short one needs is mostly linear.
        """
        if self._last is None or not all(map(_is_shape, (size, self._last[0]))):
            return ""
        before, took_s, took_bytes = self._last
        length, length_before = (shape[-2] if len(shape) > 1 else 1 for shape in (size, before))
        times = math.prod(size) / math.prod(before) * max(length / max(length_before, SHORT), 1.0)
        needed_s, needed_bytes = CALLS * times * (took_s - CALL_S), COPIES * times * took_bytes
        free = free_bytes(self._device)
        if free is not None and needed_bytes > free:
            return f"needs about {bytes_(needed_bytes)}, and {bytes_(free)} are free"
        if needed_s > left_s:
            left = f"{seconds(left_s)} are" if left_s > 0 else "nothing is"
            return f"takes about {seconds(needed_s)}, and {left} left (the budget)"
        return ""

    def _draw(self, size: Any) -> Drawn:
        """Return a call on new inputs; the seed that it is told is not that of its inputs."""
        secret, also, told = (self._random.getrandbits(60) for _ in range(3))
        drawn = self._inputs.draw(secret, size)
        generator = torch.Generator().manual_seed(also)
        cotangents = {
            name: torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
            for name, output in self._like.items()
        }
        return replace(drawn, seed=told, cotangents=cotangents)

    def _relay_s(self, side: Side) -> float:
        """Return the seconds in which inputs and results come and go."""
        return clock.timed(partial(side.run, computes=False), self._device)

    def _tried(self, one: SizeCheck, call: Callable[[], T]) -> T | None:
        """Make a call of the candidate, whose errors are faults."""
        try:
            return call()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            one.faults.append(in_a_line(error))
            return None

    # --- against float64 ---

    def _compare(self, one: SizeCheck, budget_s: float) -> tuple[RoundingLimits, Taken]:
        """Compare some calls with float64; returns what rounding explains, and a right result."""
        begun_s = clock.now()
        own = self._begin(one)
        explained = RoundingLimits(self._truth, one.precision, usual(own.values, {}))
        for number in range(FULL):
            drawn = self._draw(one.size)
            call = partial(_called, self._candidate, drawn, reuse=bool(number % 2))
            found = self._tried(one, call)
            own = _called(self._reference, drawn)
            if found is not None:
                one.faults += form_faults(found, own, drawn)
            if found is None or one.faults:
                break
            self._agree(one, found, own, drawn, explained)
            # Before the rounds, as of the reference: torch's profiler leaves its mark on a process.
            one.candidate.memory = self._tried(one, self._candidate.memory)
            if one.faults or clock.now() - begun_s > budget_s:
                break
        return explained, own

    def _begin(self, one: SizeCheck) -> Taken:
        """Learn from the reference what a size is like, and whether it is steady."""
        self._like = {}
        first = self._draw(one.size)
        self._inputs.check_fresh(first, self._draw(one.size))
        own = _called(self._reference, first)
        again = rows(_called(self._reference, first).values, own.values).values()
        if any(row.deviation.distance > ALIKE or row.differing for row in again):
            raise StepError(UNSTEADY)
        self._like = {name: own.values[name] for name in own.differentiable}
        tensors = (*own.values.values(), *first.weights.values())
        one.precision = rounding.lowest(*rounding.of_dtypes(t.dtype for t in tensors))
        self._reference.prepare([self._draw(one.size)])
        took_s = min(clock.timed(self._reference.run, self._device) for _ in range(2))
        took_s -= self._relay_s(self._reference)
        needed = one.reference.memory = self._reference.memory()
        self._last = one.size, took_s, needed.peak_bytes or needed.state_bytes
        return own

    def _agree(
        self, one: SizeCheck, found: Taken, own: Taken, drawn: Drawn, explained: RoundingLimits
    ) -> None:
        """Compare a call with float64, and keep the worst that was seen of each tensor."""
        worst = {each.name: each for each in one.agreements}
        written = own.written(drawn)
        truth = explained.truth(drawn, own)
        for name, row in rows(found.values, truth, explained.usual).items():
            if name.startswith(INPUT) and name not in written:
                continue
            excess, words = explained.excess(name, row)
            known = explained.rows[name].deviation.distance
            mine = Agreement(name, row.deviation.distance, known, excess)
            worst[name] = max(worst.get(name, mine), mine, key=lambda each: each.excess)
            one.faults += [words] if excess > 1 else []
        one.agreements = list(worst.values())

    # --- in rounds ---

    def _time(self, one: SizeCheck, budget_s: float, explained: RoundingLimits, own: Taken) -> None:
        """Time both in shuffled rounds, each on fresh inputs; what they gave is compared."""
        a_round = partial(self._round, one, explained)
        self._interruptions, self._relays_s = clock.Interruptions(), []
        drawn, begun_s = self._draw(one.size), clock.now()
        a_round([drawn])  # not timed: it tells how many calls make a block
        if one.faults:
            return
        calls = _calls(one, drawn, own)
        one.reference, one.candidate = one.reference.anew(), one.candidate.anew()
        self._relays_s, budget_s, begun_s = [], budget_s + begun_s - clock.now(), clock.now()
        for number in range(1, MOST_ROUNDS + 1):
            a_round([self._draw(one.size) for _ in range(calls)], reuse=bool(number % 2))
            if one.faults:
                return
            spent_s = clock.now() - begun_s
            round_s = spent_s / number
            if number == 1:
                looks = planned_looks(int(min(budget_s / max(round_s, 1e-6), MOST_ROUNDS)))
            is_last = spent_s + round_s > budget_s or number == MOST_ROUNDS
            one.error = error_of_a_look(len(looks), is_last)
            if is_last or (number in looks and one.ratio and one.ratio.settled):
                return

    def _round(
        self,
        one: SizeCheck,
        explained: RoundingLimits,
        drawn: Sequence[Drawn],
        reuse: bool = False,
    ) -> None:
        """Time a block of both, in random order, and compare each call's results."""
        sides = [(one.reference, self._reference), (one.candidate, self._candidate)]
        taken: dict[str, list[Taken]] = {}
        for record, side in self._random.sample(sides, 2):
            side.prepare(drawn, reuse)
            block = partial(self._timed, side, record, len(drawn))
            is_own = side is self._reference
            taken[record.name] = block() if is_own else self._tried(one, block) or []
        if one.faults:
            return
        for record, _ in sides:
            call_s, relay_s = record.times_s[-1], median(self._relays_s) / len(drawn)
            record.times_s[-1] = max(call_s - relay_s, LEAST_SHARE * call_s)
        found = [fault for each in taken["candidate"] for fault in each.faults]
        for theirs in taken["reference"]:  # a few numbers that cancel once are no yardstick
            explained.usual = usual(theirs.values, explained.usual)
        for mine, theirs in zip(taken["candidate"], taken["reference"], strict=True):
            every = rows(mine.values, theirs.values, explained.usual).items()
            excess = [explained.excess(name, row, BOTH) for name, row in every]
            found += [f"in a timed round {words}" for times, words in excess if times > 1]
        one.faults += found[:1]

    def _timed(self, side: Side, record: Record, calls: int) -> list[Taken]:
        """Note the seconds of one call of a block; returns what the calls gave."""
        self._interruptions.begin()
        block_s = clock.timed(side.run, self._device)
        found = side.take()  # at once: what comes late is not what was timed
        waited_s = self._interruptions.seconds(block_s)
        relay_s = self._relay_s(side)  # of both, so that neither process rests longer
        self._relays_s += [relay_s] if side is self._reference else []
        record.times_s.append(block_s / calls)
        record.waited_s.append(waited_s / calls)
        return found


def _is_shape(size: Any) -> bool:
    return isinstance(size, tuple) and all(isinstance(n, int) and n > 0 for n in size)


def _called(side: Side, drawn: Drawn, reuse: bool = False) -> Taken:
    """Return what one call gives, with a look at all that it did."""
    side.prepare([drawn], reuse)
    side.run()
    return side.take(full=True)[0]


def _calls(one: SizeCheck, drawn: Drawn, own: Taken) -> int:
    """Return how many calls a block has, by the first, untimed one."""
    shortest_s = min(record.times_s[-1] for record in (one.reference, one.candidate))
    tensors = [*own.values.values(), *(t for _, t in inputs_of(drawn.arguments))]
    most = MOST_BLOCK_BYTES // max(4 * sum(t.nbytes for t in tensors), 1)
    return int(max(1, min(math.ceil(BLOCK_S / max(shortest_s, 1e-7)), most, MOST_CALLS)))
