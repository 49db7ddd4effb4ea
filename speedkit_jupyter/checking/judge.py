"""The judge: at each size some calls against float64, then timed rounds whose results count too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.sweep import free_bytes, is_out_of_memory
from speedkit_jupyter.checking.agreement import BOTH, Explained, form_faults, rows, written_inputs
from speedkit_jupyter.checking.calls import BUFFER, INPUT, Drawn, Here, Side, Taken
from speedkit_jupyter.checking.inputs import Inputs, cotangents, growth
from speedkit_jupyter.checking.result import Agreement, SizeCheck
from speedkit_jupyter.measure.checks import reference as references
from speedkit_jupyter.measure.checks import rounding
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import error_of_a_look, planned_looks
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.sampler import BLOCK_S
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.torch_private import tree_map
from speedkit_jupyter.support.units import seconds
from speedkit_jupyter.support.units import size as bytes_

if TYPE_CHECKING:
    import torch

# Calls at each size that are compared with float64, each on other inputs.
FULL = 3
# A call in float64 with its controls takes at most so many times the memory and, with all else that
# is compared, so many times the seconds of one of the reference.
COPIES, CALLS = 8, 30
# No block has more calls than this: each has inputs of its own.
MOST_CALLS = 32
# Inputs and results of a block lie in memory at once.
MOST_BLOCK_BYTES = 2**28
MOST_ROUNDS = 200
# What is taken off a block for its inputs' and results' way to the other process leaves this share.
LEAST_SHARE = 0.05
UNSTEADY = "the reference gives another result each time, from the same inputs and seed"


@dataclass
class Judge:
    """Judges `candidate` by `reference`; `truth` is the reference's function, run here.

    The budget is for all sizes together.
    """

    candidate: Side
    reference: Side
    truth: Here
    inputs: Inputs
    budget_s: float
    _random: random.Random = field(default_factory=random.SystemRandom)
    _relay_s: float = 0.0

    @property
    def _holder(self) -> list[Any]:
        return [self.truth.function] if self.truth.state else []

    def run(self, sizes: Mapping[str, Any]) -> list[SizeCheck]:
        """Check each size, the smallest first. What the reference itself raises goes on."""
        found: list[SizeCheck] = []
        begun_s, costs = clock.now(), (None, 0.0, 0)  # of the last size: itself, seconds, bytes
        for at, (name, size) in enumerate(sizes.items()):
            left_s = self.budget_s - (clock.now() - begun_s)
            one = SizeCheck(name, size)
            found.append(one)
            if any(other.faults for other in found):
                one.skipped = "a smaller size is wrong already"
            elif why := self._too_large(size, costs, left_s):
                one.skipped = why
            if one.skipped:
                continue
            try:
                costs = (size, *self._compare(one, left_s / 2))
                if one.passed:
                    self._time(one, max(left_s, 0.0) / (len(sizes) - at))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                one.skipped = f"out of memory ({in_a_line(error)})"
        return found

    def _too_large(self, size: Any, costs: tuple[Any, float, int], left_s: float) -> str:
        """Return why a size is not begun, by what the last one took; empty if it is."""
        before, took_s, took_bytes = costs
        times = growth(size, before) if before is not None else None
        if times is None:
            return ""
        free = free_bytes(self.truth.device)
        if free is not None and COPIES * times * took_bytes > free:
            return f"needs about {bytes_(COPIES * times * took_bytes)}, and {bytes_(free)} are free"
        if CALLS * times * took_s > left_s:
            needed = seconds(CALLS * times * took_s)
            return f"takes about {needed}, and the budget has {seconds(max(left_s, 0.0))} left"
        return ""

    def _draw(self, size: Any, like: Mapping[str, torch.Tensor]) -> Drawn:
        seed = self._random.getrandbits(48)
        return replace(self.inputs.draw(seed, size), cotangents=cotangents(seed, like))

    # --- against float64 ---

    def _compare(self, one: SizeCheck, budget_s: float) -> tuple[float, int]:
        """Compare some calls with float64; returns the reference's seconds and bytes for one."""
        begun_s = clock.now()
        for side in (self.reference, self.candidate):
            side.expect({})
        first = self._draw(one.size, {})
        self.inputs.check_fresh(first, self._draw(one.size, {}))
        own = _called(self.reference, first)
        self._like = {name: own.values[name] for name in own.differentiable}
        one.precision = rounding.lowest(
            *rounding.of_dtypes(t.dtype for t in (*own.values.values(), *first.weights.values()))
        )
        explained, worst = Explained(one.precision), dict[str, Agreement]()
        for number in range(FULL):
            drawn = self._draw(one.size, self._like)
            try:
                found = _called(self.candidate, drawn, reuse=bool(number % 2))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                one.faults.append(in_a_line(error))
                break
            own = _called(self.reference, drawn)
            if number == 0 and not _are_alike(own, _called(self.reference, drawn)):
                raise StepError(UNSTEADY)
            one.faults += form_faults(found, own, drawn)
            if one.faults:
                break
            truth = self._truth(drawn, own, explained)
            for name, row in rows(found.values, truth).items():
                if name.startswith(INPUT) and name not in written_inputs(own, drawn):
                    continue
                excess, words = explained.excess(name, row)
                mine = Agreement(
                    name, row.deviation.distance, explained.rows[name].deviation.distance, excess
                )
                worst[name] = max(worst.get(name, mine), mine, key=lambda a: a.excess)
                if excess > 1:
                    one.faults.append(words)
            if one.faults or clock.now() - begun_s > budget_s:
                break
        one.agreements = list(worst.values())
        self._explained, self._own = explained, own
        self.reference.prepare([drawn])
        took_s = min(clock.timed(self.reference.run, self.truth.device) for _ in range(2))
        if self.reference.is_apart:
            took_s = max(took_s - clock.timed(self.reference.relay, self.truth.device), 0.0)
        needed = one.reference.memory = self.reference.memory()
        return took_s, needed.peak_bytes or needed.state_bytes

    def _truth(self, drawn: Drawn, own: Taken, explained: Explained) -> dict[str, Any]:
        """Return the reference's values in float64, and note what rounding explains.

        Where the reference can't be run in float64 its own values are the truth.
        """
        wide = partial(references.in_float64, self._holder)
        truth = self._run(_widened(drawn), wide)
        if truth is None or _shapes(truth) != _shapes(own):
            truth = own
        explained.add(rows(own.values, truth.values))
        is_low = explained.precision != "fp32"
        for to_nearest in (False, True):
            control = partial(rounding.rounded, explained.precision, to_nearest)
            around = (wide, control) if is_low else (control,)
            run = self._run(_widened(drawn) if is_low else drawn, *around)
            if run is not None and _shapes(run) == _shapes(truth):
                explained.add(rows(run.values, truth.values))
        return truth.values

    def _run(
        self, drawn: Drawn, *around: Callable[[], AbstractContextManager[Any]]
    ) -> Taken | None:
        """Return what the reference gives here; None where the surroundings don't allow it."""
        with suppress(Exception), ExitStack() as stack:
            self.truth.prepare([drawn])
            for surrounding in around:
                stack.enter_context(surrounding())
            self.truth.run()
            return self.truth.take(full=True)[0]
        return None

    # --- in rounds ---

    def _time(self, one: SizeCheck, budget_s: float) -> None:
        """Time both in shuffled rounds, each on fresh inputs; what they gave is compared."""
        begun_s = clock.now()
        sides = {"reference": self.reference, "candidate": self.candidate}
        records = {"reference": one.reference, "candidate": one.candidate}
        layout = {n: t for n, t in self._own.values.items() if not n.startswith((INPUT, BUFFER))}
        for side in sides.values():
            side.expect(layout)
        calls, looks = 1, tuple[int, ...]()
        for number in range(MOST_ROUNDS + 1):  # the first tells how many calls make a block
            start_s = clock.now()
            drawn = [self._draw(one.size, self._like) for _ in range(calls)]
            taken = {
                word: self._timed(sides[word], drawn, records[word], bool(number % 2), one)
                for word in self._random.sample(list(sides), 2)
            }
            one.faults += self._differences(taken)
            if one.faults:
                return
            self._without_relay(records.values(), calls)
            if number == 0:
                calls = self._calls(records, drawn[0], layout)
                for record in records.values():
                    record.times_s, record.waited_s = [], []
                continue
            now_s = clock.now()
            round_s, spent_s = now_s - start_s, now_s - begun_s
            if number == 1:
                looks = planned_looks(int(min(budget_s / max(round_s, 1e-6), MOST_ROUNDS)))
            is_last = spent_s + round_s > budget_s or number == MOST_ROUNDS
            one.error = error_of_a_look(len(looks), is_last)
            if is_last or (number in looks and one.ratio and one.ratio.settled):
                break
        self.candidate.prepare(drawn[:1])
        one.candidate.memory = self.candidate.memory()

    def _without_relay(self, records: Iterable[Record], calls: int) -> None:
        """Take off what it took both for inputs and results to come and go."""
        for record in records:
            block_s = record.times_s[-1]
            record.times_s[-1] = max(block_s - self._relay_s / calls, LEAST_SHARE * block_s)

    def _timed(
        self, side: Side, drawn: Sequence[Drawn], record: Record, reuse: bool, one: SizeCheck
    ) -> list[Taken]:
        """Note the seconds of a call; returns what the calls gave."""
        side.prepare(drawn, reuse)
        interruptions = clock.Interruptions()
        try:
            block_s = clock.timed(side.run, self.truth.device)
        except Exception as error:
            if side is self.reference or is_out_of_memory(error):
                raise
            one.faults.append(in_a_line(error))
            return []
        waited_s = interruptions.seconds(block_s)
        found = side.take()
        if side is self.reference and side.is_apart:
            self._relay_s = clock.timed(side.relay, self.truth.device)
        record.times_s.append(block_s / len(drawn))
        record.waited_s.append(waited_s / len(drawn))
        return found

    def _calls(self, records: Mapping[str, Any], drawn: Drawn, layout: Mapping[str, Any]) -> int:
        """Return how many calls a block has, by the first, untimed one."""
        shortest_s = min(record.times_s[-1] for record in records.values())
        tensors = [*layout.values(), *(v for v in drawn.arguments.values() if hasattr(v, "nbytes"))]
        most = MOST_BLOCK_BYTES // max(4 * sum(t.nbytes for t in tensors), 1)
        return int(max(1, min(math.ceil(BLOCK_S / max(shortest_s, 1e-7)), most, MOST_CALLS)))

    def _differences(self, taken: Mapping[str, list[Taken]]) -> list[str]:
        """Return what a round's results show: each call of the candidate with its reference."""
        found: list[str] = [fault for each in taken["candidate"] for fault in each.faults]
        for mine, theirs in zip(taken["candidate"], taken["reference"], strict=False):
            for name, row in rows(mine.values, theirs.values).items():
                excess, words = self._explained.excess(name, row, BOTH)
                if excess > 1:
                    found.append(f"in a timed round {words}")
        return found[:1]


def _called(side: Side, drawn: Drawn, reuse: bool = False) -> Taken:
    """Return what one call gives, with a look at all that it did."""
    side.prepare([drawn], reuse)
    side.run()
    return side.take(full=True)[0]


def _shapes(taken: Taken) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in taken.values.items()}


def _are_alike(one: Taken, other: Taken) -> bool:
    rows_of = rows(one.values, other.values).values()
    return all(row.deviation.distance <= 1e-3 and not row.differing for row in rows_of)


def _widened(drawn: Drawn) -> Drawn:
    """Return it in float64."""

    def wide(value: Any) -> Any:
        is_float = hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.double() if is_float else value

    arguments = tree_map(wide, dict(drawn.arguments))
    return replace(drawn, arguments=arguments, cotangents=tree_map(wide, drawn.cotangents))
