"""The judge: at each size some calls against float64, then timed rounds whose results count too."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from speedkit_jupyter.extras.check.agreement import RoundingLimits, form_faults
from speedkit_jupyter.extras.check.calls import CallResult, LocalSide
from speedkit_jupyter.extras.check.inputs import (
    UNKNOWN,
    CallInputs,
    InputSource,
    Values,
    laid_out,
    tensors,
)
from speedkit_jupyter.extras.check.processes import RemoteSide
from speedkit_jupyter.extras.check.result import Agreement, SizeCheck
from speedkit_jupyter.extras.data.batch_sizes import is_out_of_memory
from speedkit_jupyter.right.reference import lowest, of_dtypes
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S, ShuffledRounds, block_length
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.units import seconds

T = TypeVar("T")
Side = LocalSide | RemoteSide
# Calls at each size that are compared with float64, each on other inputs.
FULL = 3
# All comparisons of a size take at most as long as this many calls of the reference.
CALLS = 30
# A block has no more calls and bytes than this: each has inputs and results of its own in memory.
# A ratio of 200 rounds is within some percent.
MOST_CALLS, MOST_BLOCK_BYTES, MOST_ROUNDS = 32, 2**28, 200
# Limits of a round, whose reference has an error of its own, as a multiple of limits to float64.
BOTH = 2.0
UNSTEADY = "the reference gives another result each time, from the same inputs and seed"
MOVED = "the reference no longer gives what it gave at first: the candidate changes what both use"
RAISES = "the reference fails since the candidate was called: "


class FirstCall(NamedTuple):
    """A call of the reference before the candidate's first one at a size, and its result;
    `outputs` are those that gradients go through.
    """

    drawn: CallInputs
    result: CallResult
    outputs: Values
    call_s: float = 0.0


class RewriteJudge:
    """Judges the candidate by the reference, for `budget_s` seconds at all sizes together."""

    def __init__(
        self,
        candidate: Side,
        reference: Side,
        truth: LocalSide,
        inputs: InputSource,
        budget_s: float,
    ) -> None:
        self._candidate, self._reference, self._truth = candidate, reference, truth
        self._inputs, self._budget = inputs, Budget(budget_s)
        self._random = random.SystemRandom()  # no candidate knows what comes

    def run(self, sizes: Mapping[str, Any]) -> list[SizeCheck]:
        """Check each size, the smallest first. Raises what the reference itself raises."""
        found: list[SizeCheck] = []
        for number, (name, size) in enumerate(sizes.items()):
            one = SizeCheck(name, size)
            if any(other.faults for other in found):
                one.skipped = "a smaller size is wrong already"
            try:
                if not one.skipped:
                    self._check(one, number, len(sizes) - number)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                one.skipped = f"out of memory ({in_a_line(error)})"
            found.append(one)
        return found

    def _check(self, one: SizeCheck, before: int, sizes: int) -> None:
        """Compare and time both at the first of `sizes`, which share the time that is left; only a
        size with none `before` it may take longer.
        """
        first = self._begin(one)
        left_s, needed_s = max(self._budget.left_s, 0.0), CALLS * first.call_s
        if before and needed_s > left_s:
            left = f"{seconds(left_s)} are left" if left_s else "nothing is left"
            one.skipped = f"takes about {seconds(needed_s)}, and {left} (the budget)"
        if one.unchecked or one.skipped:
            return
        budget = Budget(left_s / sizes)
        limits = self._compare(one, first, budget)
        if one.passed:
            self._time(one, first, limits, budget)
        if one.passed:
            call = partial(_called, self._reference, first.drawn)
            again = self._tried(one, self._reference, call)
            if again is not None and _differences(again, first.result, limits):
                one.faults.append(MOVED)

    def _draw(self, size: Any, outputs: Values, is_expanded: bool = False) -> CallInputs:
        """Return a call on new inputs; it has another seed than its inputs."""
        drawn = self._inputs.draw(self._random.getrandbits(60), size)
        generator = torch.Generator().manual_seed(self._random.getrandbits(60))
        cotangents = {n: _cotangent(one, generator, is_expanded) for n, one in outputs.items()}
        return replace(drawn, seed=self._random.getrandbits(60), cotangents=cotangents)

    def _tried(self, one: SizeCheck, side: Side, call: Callable[[], T]) -> T | None:
        """Make a call of a side, whose errors are faults: the reference has run at this size."""
        try:
            return call()
        except Exception as error:
            one.faults.append((RAISES if side is self._reference else "") + in_a_line(error))
            return None

    def _begin(self, one: SizeCheck) -> FirstCall:
        """Call the reference alone: its outputs, whether it is steady, its seconds and memory."""
        drawn = self._draw(one.size, {})
        result = _called(self._reference, drawn)
        unknown = [f"{n} is {kind}" for n, kind in result.forms.items() if kind.endswith(UNKNOWN)]
        if unknown or not result.values:
            one.unchecked = ", ".join(unknown) or "the reference gives no numbers"
            return FirstCall(drawn, result, {})
        outputs = {name: result.values[name] for name in result.differentiable}
        drawn = self._draw(one.size, outputs, is_expanded=True)
        first = FirstCall(drawn, _called(self._reference, drawn), outputs)
        of_all = (*first.result.values.values(), *drawn.weights.values())
        one.precision = lowest(*of_dtypes(t.dtype for t in of_all))
        again = _called(self._reference, drawn)
        limits = RoundingLimits(self._truth, one.precision, first.result.values)
        if _differences(again, first.result, limits):
            raise StepError(UNSTEADY)
        self._reference.prepare([drawn])
        return first._replace(call_s=self._reference.run())

    def _compare(self, one: SizeCheck, first: FirstCall, budget: Budget) -> RoundingLimits:
        """Compare some calls with float64 in half of the budget; returns what rounding explains."""
        limits = RoundingLimits(self._truth, one.precision, first.result.values)
        worst: dict[str, Agreement] = {}
        for number in range(FULL):
            drawn = self._draw(one.size, first.outputs, is_expanded=number % 2 == 0)
            found = self._tried(one, self._candidate, partial(_called, self._candidate, drawn))
            own = self._tried(one, self._reference, partial(_called, self._reference, drawn))
            if found is None or own is None or (faults := form_faults(found, own)):
                one.faults += faults if found and own else []
                break
            for mine in limits.compared(found.values, limits.truth(drawn, own)):
                before = worst.get(mine.name, mine)
                worst[mine.name] = max(before, mine, key=lambda each: each.excess)
                one.faults += [mine.fault] if mine.fault else []
            if one.faults or budget.left_s < budget.seconds / 2:
                break
        one.agreements = list(worst.values())
        return limits

    def _time(
        self, one: SizeCheck, first: FirstCall, limits: RoundingLimits, budget: Budget
    ) -> None:
        """Time candidate and reference in shuffled rounds on fresh inputs; compare all results."""
        sides = [self._reference, self._candidate]
        self._round(one, sides, limits, [self._draw(one.size, first.outputs)])  # not timed
        if one.faults:
            return
        shortest_s = min(record.times_s[-1] for record in (one.reference, one.candidate))
        # Shorter blocks than with kept inputs: drawing the inputs may take longer than the call.
        every = (*first.result.values.values(), *tensors(first.drawn.inputs).values())
        most = MOST_BLOCK_BYTES // max(4 * sum(one.nbytes for one in every), 1)
        calls = max(1, min(block_length(shortest_s, BLOCK_S / 5), most, MOST_CALLS))
        calls = 1 if first.drawn.weights else calls  # weights differ from call to call
        one.reference, one.candidate = one.reference.anew(), one.candidate.anew()
        rounds = ShuffledRounds(
            lambda: sides, lambda: budget.left_s, most=MOST_ROUNDS, generator=self._random
        )
        for order in rounds:
            drawn = [self._draw(one.size, first.outputs) for _ in range(calls)]
            self._round(one, order, limits, drawn)
            if one.faults:
                return
            is_look = rounds.is_look()
            one.error = rounds.error
            if is_look and one.ratio and one.ratio.settled:
                break
        one.error = rounds.error
        if names := ", ".join(self._inputs.repeating(one.size)):
            again = f"the same numbers come again in {names}, and a cache would gain"
            one.untold = f"{again}: draw them anew"

    def _round(
        self,
        one: SizeCheck,
        order: Sequence[Side],
        limits: RoundingLimits,
        drawn: Sequence[CallInputs],
    ) -> None:
        """Time a block of both sides in this order, and compare each call's results."""
        results: dict[str, list[CallResult]] = {}
        for side in order:
            record = one.reference if side is self._reference else one.candidate
            side.prepare(drawn)
            block_s = self._tried(one, side, side.run)
            if block_s is None:
                return
            record.add(block_s / len(drawn), 0.0)
            results[record.name] = side.take()
        for mine, theirs in zip(results["candidate"], results["reference"], strict=True):
            one.faults += _differences(mine, theirs, limits)[:1]
            if one.faults:
                return


def _differences(found: CallResult, own: CallResult, limits: RoundingLimits) -> list[str]:
    """Return the differences between a call and one of the reference in the same precision."""
    if faults := form_faults(found, own):
        return faults
    every = limits.compared(found.values, own.values, BOTH)
    return [f"in a timed round {each.fault}" for each in every if each.fault]


def _called(side: Side, drawn: CallInputs) -> CallResult:
    side.prepare([drawn])
    side.run()
    return side.take()[0]


def _cotangent(output: torch.Tensor, generator: torch.Generator, is_expanded: bool) -> torch.Tensor:
    """Return a gradient of an output, contiguous or expanded, as `.sum()` gives it."""
    dtype = torch.complex64 if output.is_complex() else torch.float32
    drawn = torch.randn(output.shape, generator=generator, dtype=dtype)
    drawn = drawn.to(output.device, output.dtype)
    if is_expanded and drawn.numel() and drawn.dim():
        longest = drawn.shape.index(max(drawn.shape))
        return laid_out(drawn.narrow(longest, 0, 1).expand(drawn.shape))
    return drawn
