"""Judge a rewritten function: at each size, compare calls with float64, then time rounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from speedkit_jupyter.extras.check import inputs
from speedkit_jupyter.extras.check.agreement import RoundingLimits, form_faults
from speedkit_jupyter.extras.check.calls import CallResult, Side
from speedkit_jupyter.extras.check.inputs import CallInputs, Values
from speedkit_jupyter.extras.check.result import Agreement, SizeCheck
from speedkit_jupyter.extras.data.batch_sizes import is_out_of_memory
from speedkit_jupyter.right.reference import lowest, of_dtypes
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S, ShuffledRounds, block_length
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.units import seconds

# Largest number of calls at each size that are compared with float64. Each has new inputs.
COMPARED_CALLS = 3
# A size takes about as long as this many reference calls. With less time left, skip later sizes.
LIMIT_IN_CALLS = 30
# Limits on calls and bytes of a block, because all its inputs and results are in memory at once.
# After MOST_ROUNDS rounds, the ratio is precise to a few percent.
MOST_CALLS, MOST_BLOCK_BYTES, MOST_ROUNDS = 32, 2**28, 200
# Limits in timed rounds, as a multiple of the limits against float64: the reference rounds, too.
TIMED_LIMITS = 2.0
UNSTEADY = "the reference returns another result each time, from the same inputs and seed"
MOVED = "the reference no longer gives its first result: the candidate changes an object of both"
RAISES = "the reference fails since the candidate was called: "


class FirstCall(NamedTuple):
    """A call of the reference, made before the candidate's first call at a size."""

    drawn: CallInputs
    result: CallResult
    outputs: Values  # results that require gradients
    limits: RoundingLimits  # for all calls at the size
    call_s: float


class RewriteJudge:
    """Judge a candidate against a reference, in `budget_s` seconds for all sizes together."""

    def __init__(self, candidate: Side, reference: Side, source: Any, budget_s: float) -> None:
        self._candidate, self._reference = candidate, reference
        self._source, self._budget = source, Budget(budget_s)

    def run(self, sizes: Mapping[str, Any]) -> list[SizeCheck]:
        """Check each size; skip sizes after a wrong result, or for lack of memory or time."""
        found: list[SizeCheck] = []
        for number, (name, size) in enumerate(sizes.items()):
            one = SizeCheck(name, size)
            try:
                if any(other.faults for other in found):
                    one.skipped = "an earlier size is wrong already"
                else:
                    self._check(one, number, len(sizes) - number)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                one.skipped = f"out of memory ({in_a_line(error)})"
            found.append(one)
        return found

    def _check(self, one: SizeCheck, before: int, sizes: int) -> None:
        """Fill `one`: compare and time both sides at one size, in 1/`sizes` of the time left."""
        if (first := self._begin(one)) is None:
            return
        left_s, needed_s = max(self._budget.left_s, 0.0), LIMIT_IN_CALLS * first.call_s
        if before and needed_s > left_s:  # the very first size may take longer
            left = f"{seconds(left_s)} are left" if left_s else "nothing is left"
            one.skipped = f"takes about {seconds(needed_s)}, and {left} (the budget)"
            return
        budget = Budget(left_s / sizes)
        self._compare(one, first, budget)
        if one.passed:
            self._time(one, first, budget)
        if one.passed and (again := self._tried(one, self._reference, [first.drawn])):
            (found,) = again[1]
            if _differences(found, first.result, first.limits):
                one.faults.append(MOVED)

    def _tried(
        self, one: SizeCheck, side: Side, drawn: Sequence[CallInputs]
    ) -> tuple[float, list[CallResult]] | None:
        """Return the calls' seconds and results; on an error, add a fault and return None."""
        try:
            return side.calls(drawn)
        except Exception as error:
            one.faults.append((RAISES if side is self._reference else "") + in_a_line(error))
            return None

    def _begin(self, one: SizeCheck) -> FirstCall | None:
        """Return a FirstCall; None without comparable results; StepError if equal calls differ."""
        outputs: inputs.Values = {}
        for _ in range(2):  # the second call also has incoming gradients
            drawn = self._source.draw(one.size, outputs)
            _, (result,) = self._reference.calls([drawn])
            forms = result.forms.items()
            unknown = [f"{name} is {kind}" for name, kind in forms if kind.endswith(inputs.UNKNOWN)]
            if unknown or not result.values:
                one.unchecked = ", ".join(unknown) or "the reference returns no numbers"
                return None
            outputs = {name: result.values[name] for name in result.differentiable}
        of_all = (*result.values.values(), *drawn.weights.values())
        one.precision = lowest(*of_dtypes(t.dtype for t in of_all))
        limits = RoundingLimits(self._reference, one.precision, result.values)
        call_s, (again,) = self._reference.calls([drawn])
        if _differences(again, result, limits):
            raise StepError(UNSTEADY)
        return FirstCall(drawn, result, outputs, limits, call_s)

    def _compare(self, one: SizeCheck, first: FirstCall, budget: Budget) -> None:
        """Compare up to COMPARED_CALLS calls with float64; stop at a fault or half the budget."""
        worst: dict[str, Agreement] = {}
        for number in range(COMPARED_CALLS):
            drawn = self._source.draw(one.size, first.outputs, expanded=number % 2 == 0)
            found = self._tried(one, self._candidate, [drawn])
            own = self._tried(one, self._reference, [drawn])
            if found is None or own is None:
                break
            (result,), (reference,) = found[1], own[1]
            one.faults += form_faults(result, reference)
            if one.faults:
                break
            truth = first.limits.truth(drawn, reference)
            for mine in first.limits.compared(result.values, truth):
                before = worst.get(mine.name, mine)
                worst[mine.name] = max(before, mine, key=lambda each: each.excess)
                one.faults += [mine.fault] if mine.fault else []
            if one.faults or budget.left_s < budget.seconds / 2:
                break
        one.agreements = list(worst.values())

    def _time(self, one: SizeCheck, first: FirstCall, budget: Budget) -> None:
        sides = [self._reference, self._candidate]
        self._round(one, first, sides, [self._source.draw(one.size, first.outputs)])  # warms up
        if one.faults:
            return
        shortest_s = min(record.times_s[-1] for record in (one.reference, one.candidate))
        # Short blocks, because drawing the inputs may take longer than the calls.
        every = (*first.result.values.values(), *inputs.tensors(first.drawn.inputs).values())
        most = MOST_BLOCK_BYTES // max(4 * sum(one.nbytes for one in every), 1)
        calls = max(1, min(block_length(shortest_s, BLOCK_S / 5), most, MOST_CALLS))
        calls = 1 if first.drawn.weights else calls  # weights differ from call to call
        one.reference, one.candidate = one.reference.anew(), one.candidate.anew()
        rounds = ShuffledRounds(
            sides, lambda: budget.left_s, most=MOST_ROUNDS, generator=random.SystemRandom()
        )
        for order in rounds:
            drawn = [self._source.draw(one.size, first.outputs) for _ in range(calls)]
            self._round(one, first, order, drawn)
            if one.faults:
                return
            is_look = rounds.is_look()
            one.error = rounds.error
            if is_look and one.ratio and one.ratio.settled:
                break
        one.error = rounds.error
        if names := ", ".join(self._source.repeating(one.size)):
            one.no_speed = f"the same numbers come again in {names}, and a cache would gain"

    def _round(
        self, one: SizeCheck, first: FirstCall, order: Sequence[Side], drawn: Sequence[CallInputs]
    ) -> None:
        """Time a block of each side in this order, and compare the results of each call."""
        results: dict[str, list[CallResult]] = {}
        for side in order:
            record = one.reference if side is self._reference else one.candidate
            if (found := self._tried(one, side, drawn)) is None:
                return
            block_s, results[record.name] = found
            record.add(block_s / len(drawn), 0.0)
        pairs = zip(results["candidate"], results["reference"], strict=True)
        faults = (fault for pair in pairs for fault in _differences(*pair, first.limits))
        one.faults += itertools.islice(faults, 1)


def _differences(found: CallResult, own: CallResult, limits: RoundingLimits) -> list[str]:
    """Return the faults of a call against a reference call in the same precision."""
    if faults := form_faults(found, own):
        return faults
    every = limits.compared(found.values, own.values, TIMED_LIMITS)
    return [f"in a timed round {each.fault}" for each in every if each.fault]
