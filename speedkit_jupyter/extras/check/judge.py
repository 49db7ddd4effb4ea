"""The judge: at each size some calls against float64, then timed rounds whose results count too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from speedkit_jupyter.extras.check.agreement import BOTH, RoundingLimits, form_faults, rows, usual
from speedkit_jupyter.extras.check.calls import Drawn, Here, Taken
from speedkit_jupyter.extras.check.inputs import Inputs
from speedkit_jupyter.extras.check.parts import UNKNOWN, Values, laid_out, tensors
from speedkit_jupyter.extras.check.processes import Elsewhere
from speedkit_jupyter.extras.check.result import Agreement, SizeCheck
from speedkit_jupyter.extras.data.batch_sweep import free_bytes, is_out_of_memory
from speedkit_jupyter.right import rounding
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S, ShuffledRounds, block_length
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
# A block has no more calls than this, each on inputs of its own, which are in memory at once.
MOST_CALLS, MOST_BLOCK_BYTES = 32, 2**28
MOST_ROUNDS = 200
# Blocks of the reference before the candidate's first call. If the fastest of all rounds, and that
# of such blocks after them, takes so many times as long, something has slowed the reference.
ALONE, SLOWED = 3, 1.5
# What is taken off a block for the way of inputs and results leaves this share. It is the same for
# both sides of a round: each side's own would favour one in a slow moment.
LEAST_SHARE = 0.05
# Two calls of the reference on the same inputs differ by less, if only by the order of their sums.
ALIKE = 1e-3
UNSTEADY = "the reference gives another result each time, from the same inputs and seed"
MOVED = "the reference no longer gives what it gave at first: the candidate changes what both use"
RAISES = "the reference fails since the candidate was called: "
NO_NUMBERS = "the reference gives no numbers"
NOT_CONTIGUOUS = "is not contiguous, as the reference's is: `.view()` can fail"
CONTIGUOUS = "only contiguous gradients went backward: the reference fails with others"
# How gradients that go backward lie in memory.
LAYOUTS = 3


@dataclass
class Begun:
    """What the reference gave before the candidate's first call, from which inputs, and how fast;
    `like` are the outputs that gradients go through.
    """

    drawn: Drawn
    own: Taken
    like: Values
    call_s: float = 0.0


class RewriteJudge:
    """Judges the candidate by the reference, for `budget_s` seconds at all sizes together."""

    def __init__(
        self, candidate: Side, reference: Side, truth: Here, inputs: Inputs, budget_s: float
    ) -> None:
        self._candidate, self._reference, self._truth = candidate, reference, truth
        self._inputs, self._ends_s = inputs, clock.now() + budget_s
        self._random = random.SystemRandom()  # no candidate knows what comes
        self._begun: dict[str, Begun] = {}
        self._layouts = 0  # of gradients that the reference takes
        self._last: tuple[Any, float, int] | None = None  # size, its seconds and bytes
        self._relays_s: list[float] = []

    @property
    def _device(self) -> torch.device:
        return self._truth.device

    def run(self, sizes: Mapping[str, Any]) -> list[SizeCheck]:
        """Check each size, the smallest first. What the reference itself raises goes on.

        The reference begins alone, at all sizes: the candidate may change what it stands on.
        """
        found = [SizeCheck(name, size) for name, size in sizes.items()]
        for one in found:
            one.skipped = self._too_large(one.size)
            if not one.skipped:
                one.skipped = _out_of_memory(partial(self._begin, one))
        for at, one in enumerate(found):
            if one.skipped or one.unchecked:
                continue
            begun = self._begun.pop(one.name)
            one.skipped = self._too_long(CALLS * (begun.call_s - CALL_S)) if at else ""
            if any(other.faults for other in found):
                one.skipped = "a smaller size is wrong already"
            if not one.skipped:
                one.unchecked = _out_of_memory(partial(self._judge, one, begun, len(found) - at))
        return found

    def _judge(self, one: SizeCheck, begun: Begun, sizes: int) -> None:
        """Compare and time at one of so many `sizes`."""
        left_s = self._left_s()
        explained = self._compare(one, begun, left_s / 2)
        if one.passed:
            self._time(one, left_s / sizes, explained, begun)
            self._recheck(one, begun, explained)

    def _left_s(self) -> float:
        return max(self._ends_s - clock.now(), 0.0)

    def _too_large(self, size: Any) -> str:
        """Return why a size is not begun, by what the last one took; empty if it is.

        Work may grow with the length squared; what a short one needs is mostly linear.
        """
        if self._last is None or not all(map(_is_shape, (size, self._last[0]))):
            return ""
        before, took_s, took_bytes = self._last
        length, length_before = (shape[-2] if len(shape) > 1 else 1 for shape in (size, before))
        times = math.prod(size) / math.prod(before) * max(length / max(length_before, SHORT), 1.0)
        needed_bytes, free = COPIES * times * took_bytes, free_bytes(self._device)
        if free is not None and needed_bytes > free:
            return f"needs about {bytes_(needed_bytes)}, and {bytes_(free)} are free"
        return self._too_long(CALLS * times * (took_s - CALL_S))

    def _too_long(self, needed_s: float) -> str:
        left_s = self._left_s()
        if needed_s <= left_s:
            return ""
        left = f"{seconds(left_s)} are" if left_s > 0 else "nothing is"
        return f"takes about {seconds(needed_s)}, and {left} left (the budget)"

    def _draw(self, one: SizeCheck, like: Values, number: int = 0) -> Drawn:
        """Return a call on new inputs; the seed that it is told is not that of its inputs.

        By its `number` the gradients that go backward are in different memory layouts.
        """
        secret, also, told = (self._random.getrandbits(60) for _ in range(3))
        drawn = self._inputs.draw(secret, one.size)
        generator = torch.Generator().manual_seed(also)
        cotangents = {n: _cotangent(output, generator, number) for n, output in like.items()}
        return replace(drawn, seed=told, cotangents=cotangents)

    def _tried(self, one: SizeCheck, side: Side, call: Callable[[], T]) -> T | None:
        """Make a call of a side, whose errors are faults: the reference has run at this size."""
        try:
            return call()
        except Exception as error:
            one.faults.append((RAISES if side is self._reference else "") + in_a_line(error))
            return None

    # --- the reference alone ---

    def _begin(self, one: SizeCheck) -> None:
        """Learn from the reference what a size is like, whether it is steady, and how fast."""
        own = _called(self._reference, self._draw(one, {}))
        unknown = [f"{n} is {one}" for n, one in own.forms.items() if one.endswith(UNKNOWN)]
        if unknown or not own.values:
            one.unchecked = ", ".join(unknown) or NO_NUMBERS
            return
        like = {name: own.values[name] for name in own.differentiable}
        drawn = self._draw(one, like)
        self._inputs.check_fresh(drawn, one.size)
        own = _called(self._reference, drawn)
        again = rows(_called(self._reference, drawn).values, own.values).values()
        if any(row.deviation.distance > ALIKE or row.differing for row in again):
            raise StepError(UNSTEADY)
        of_all = (*own.values.values(), *drawn.weights.values())
        one.precision = rounding.lowest(*rounding.of_dtypes(t.dtype for t in of_all))
        self._layouts = self._layouts or self._taken_layouts(one, like)
        begun = self._begun[one.name] = Begun(drawn, own, like)
        begun.call_s = self._alone_s(one, begun)
        needed = one.reference.memory = self._reference.memory()
        self._last = one.size, begun.call_s, needed.peak_bytes or needed.state_bytes

    def _taken_layouts(self, one: SizeCheck, like: Values) -> int:
        """Return how many layouts of gradients the reference itself can take."""
        try:
            for number in range(1, LAYOUTS):
                _called(self._reference, self._draw(one, like, number))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            one.remarks.append(CONTIGUOUS)
            return 1
        return LAYOUTS

    def _alone_s(self, one: SizeCheck, begun: Begun) -> float:
        """Return the seconds of a call, of the fastest of some blocks like those of the rounds."""
        self._interruptions, self._relays_s = clock.Interruptions(), []
        calls, alone = 1, Record("reference")
        for _ in range(1 + ALONE):
            self._reference.prepare([self._draw(one, begun.like) for _ in range(calls)])
            self._timed(self._reference, alone, calls)
            self._take_off(alone, calls)
            calls = _calls(alone.times_s[0], begun)
        return min(alone.times_s)

    # --- against float64 ---

    def _compare(self, one: SizeCheck, begun: Begun, budget_s: float) -> RoundingLimits:
        """Compare some calls with float64; returns what rounding explains."""
        begun_s = clock.now()
        explained = RoundingLimits(self._truth, one.precision, usual(begun.own.values, {}))
        for number in range(FULL):
            # The contiguous ones last: those of timed calls are, too.
            drawn = self._draw(one, begun.like, (number + 1) % self._layouts)
            call = partial(_called, self._candidate, drawn, reuse=bool(number % 2))
            found = self._tried(one, self._candidate, call)
            own = self._tried(one, self._reference, partial(_called, self._reference, drawn))
            if found is None or own is None:
                break
            one.faults += form_faults(found, own)
            if one.faults:
                break
            names = [name for name in own.contiguous if name not in found.contiguous]
            one.remarks += [f"{name} {NOT_CONTIGUOUS}" for name in names]
            self._agree(one, found, own, drawn, explained)
            # Before the rounds, as of the reference: torch's profiler leaves its mark on a process.
            one.candidate.memory = self._tried(one, self._candidate, self._candidate.memory)
            if one.faults or clock.now() - begun_s > budget_s:
                break
        self._recheck(one, begun, explained)
        return explained

    def _recheck(self, one: SizeCheck, begun: Begun, explained: RoundingLimits) -> None:
        """Call the reference as before the candidate's first call: it must give the same."""
        if one.faults:
            return
        call = partial(_called, self._reference, begun.drawn)
        again = self._tried(one, self._reference, call)
        if again is not None and self._differences(again, begun.own, explained):
            one.faults.append(MOVED)

    def _differences(self, found: Taken, own: Taken, explained: RoundingLimits) -> list[str]:
        """Return in what a call differs from one of the reference in the same precision."""
        if faults := form_faults(found, own):
            return faults
        every = rows(found.values, own.values, explained.usual).items()
        excess = [explained.excess(name, row, BOTH) for name, row in every]
        return [f"in a timed round {words}" for times, words in excess if times > 1]

    def _agree(
        self, one: SizeCheck, found: Taken, own: Taken, drawn: Drawn, explained: RoundingLimits
    ) -> None:
        """Compare a call with float64, and keep the worst that was seen of each tensor."""
        worst = {each.name: each for each in one.agreements}
        truth = explained.truth(drawn, own)
        for name, row in rows(found.values, truth, explained.usual).items():
            excess, words = explained.excess(name, row)
            known = explained.rows[name].deviation.distance if name in explained.rows else 0.0
            mine = Agreement(name, row.deviation.distance, known, excess)
            worst[name] = max(worst.get(name, mine), mine, key=lambda each: each.excess)
            one.faults += [words] if excess > 1 else []
        one.agreements = list(worst.values())

    # --- in rounds ---

    def _time(
        self, one: SizeCheck, budget_s: float, explained: RoundingLimits, begun: Begun
    ) -> None:
        """Time both in shuffled rounds, each on fresh inputs; what they gave is compared."""
        budget, sides = Budget(budget_s), [self._reference, self._candidate]
        self._interruptions, self._relays_s = clock.Interruptions(), []
        self._round(one, sides, explained, [self._draw(one, begun.like)])  # not timed
        if one.faults:
            return
        shortest_s = min(record.times_s[-1] for record in (one.reference, one.candidate))
        calls, self._relays_s = _calls(shortest_s, begun), []
        one.reference, one.candidate = one.reference.anew(), one.candidate.anew()
        rounds = ShuffledRounds(
            lambda: sides, lambda: budget.left_s, most=MOST_ROUNDS, generator=self._random
        )
        for order in rounds:
            drawn = [self._draw(one, begun.like) for _ in range(calls)]
            self._round(one, order, explained, drawn, reuse=bool(rounds.number % 2))
            if one.faults:
                return
            is_look = rounds.is_look()
            one.error = rounds.error
            if is_look and one.ratio and one.ratio.settled:
                break
        one.error = rounds.error
        one.untold = self._untold(one, begun)

    def _untold(self, one: SizeCheck, begun: Begun) -> str:
        """Return why the times tell nothing of the candidate; empty if they do."""
        repeating = self._inputs.repeating(one.size)
        if repeating:
            names = ", ".join(repeating)
            return f"the same numbers come again in {names}, and a cache would gain: draw them anew"
        slow_s, here = SLOWED * begun.call_s, isinstance(self._reference, Here)
        is_faster = one.ratio is not None and one.ratio.verdict == "faster"
        if here and is_faster and min(one.reference.times_s) > slow_s:
            now_s = self._alone_s(one, begun)
            if now_s > slow_s:
                now, before = seconds(now_s), seconds(begun.call_s)
                return f"the reference takes {now}, and {before} before the candidate was called"
        return ""

    def _round(
        self,
        one: SizeCheck,
        order: Sequence[Side],
        explained: RoundingLimits,
        drawn: Sequence[Drawn],
        reuse: bool = False,
    ) -> None:
        """Time a block of both sides in this order, and compare each call's results."""
        taken: dict[str, list[Taken]] = {}
        for side in order:
            side.prepare(drawn, reuse)
            record = one.reference if side is self._reference else one.candidate
            block = partial(self._timed, side, record, len(drawn))
            taken[record.name] = self._tried(one, side, block) or []
        if one.faults:
            return
        for record in (one.reference, one.candidate):
            self._take_off(record, len(drawn))
        for theirs in taken["reference"]:  # a few numbers that cancel once are no yardstick
            explained.usual = usual(theirs.values, explained.usual)
        for mine, theirs in zip(taken["candidate"], taken["reference"], strict=True):
            one.faults += self._differences(mine, theirs, explained)[:1]
            if one.faults:
                return

    def _take_off(self, record: Record, calls: int) -> None:
        """Take off the last time what the way of inputs and results takes."""
        call_s, relay_s = record.times_s[-1], median(self._relays_s) / calls
        record.times_s[-1] = max(call_s - relay_s, LEAST_SHARE * call_s)

    def _timed(self, side: Side, record: Record, calls: int) -> list[Taken]:
        """Note the seconds of one call of a block; returns what the calls gave."""
        self._interruptions.begin()
        block_s = clock.timed(side.run, self._device)
        found = side.take()  # at once: what comes late is not what was timed
        waited_s = self._interruptions.seconds(block_s)
        # The way of inputs and results; of both, so that neither process rests longer.
        relay_s = clock.timed(partial(side.run, computes=False), self._device)
        self._relays_s += [relay_s] if side is self._reference else []
        record.times_s.append(block_s / calls)
        record.waited_s.append(waited_s / calls)
        return found


def _out_of_memory(work: Callable[[], object]) -> str:
    """Do it; return what there was no memory for, or else nothing."""
    try:
        work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return f"out of memory ({in_a_line(error)})"
    return ""


def _is_shape(size: Any) -> bool:
    return isinstance(size, tuple) and all(isinstance(n, int) and n > 0 for n in size)


def _called(side: Side, drawn: Drawn, reuse: bool = False) -> Taken:
    """Return what one call gives, with a look at what a later one changes of it."""
    side.prepare([drawn], reuse)
    side.run()
    return side.take(keep=True)[0]


def _calls(shortest_s: float, begun: Begun) -> int:
    """Return how many calls a block has: one of a module, as weights differ from call to call."""
    if begun.drawn.weights:
        return 1
    every = [*begun.own.values.values(), *tensors(begun.drawn.inputs).values()]
    most = MOST_BLOCK_BYTES // max(4 * sum(t.nbytes for t in every), 1)
    # Shorter than where inputs are kept: to draw those of a call may take longer than the call.
    calls = block_length(shortest_s, block_s=BLOCK_S / 5)
    return int(max(1, min(calls, most, MOST_CALLS)))


def _cotangent(output: torch.Tensor, generator: torch.Generator, layout: int) -> torch.Tensor:
    """Return a gradient of an output: contiguous, transposed, or one number for all of its longest
    dimension, as a sum over that gives it.
    """
    dtype = torch.complex64 if output.is_complex() else torch.float32
    drawn = torch.randn(output.shape, generator=generator, dtype=dtype)
    drawn = drawn.to(output.device, output.dtype)
    if layout == 1:
        back = [*reversed(range(drawn.dim()))]
        return drawn.permute(back).contiguous().permute(back)
    if layout == 2 and drawn.dim() and drawn.numel():
        longest = drawn.shape.index(max(drawn.shape))
        return laid_out(drawn.narrow(longest, 0, 1).expand(drawn.shape))
    return drawn
