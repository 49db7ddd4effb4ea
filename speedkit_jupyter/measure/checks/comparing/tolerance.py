"""What rounding explains, by the controls: and what is beyond it, in words.

A control is the same step rounded to the variant's precision after each operation. Of 30 nets
(MLPs, CNNs, recurrent, transformers, from the library `transformers` too), in training and in
evaluation, real autocast was off by 0.5 to 1.5 times as much as its control in every
output; of the gradients by up to 6 times, in tensors of 8 elements. Slopes and shifts are single
numbers, and chance may leave a control without any: there its distance counts too, spread over as
many elements as there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from speedkit_jupyter.measure.checks.comparing import whole_numbers
from speedkit_jupyter.measure.checks.comparing.deviation import NAMES, Deviation
from speedkit_jupyter.measure.checks.comparing.errors import Errors
from speedkit_jupyter.measure.checks.comparing.labels import Names
from speedkit_jupyter.measure.checks.reference.rounding import unit

# Times what the controls are off, in the order of deviation.NAMES; None is not tested.
OUTPUT_FACTORS = (3.0, 4.0, 4.0)
GRADIENT_FACTORS = (8.0, 8.0, None)
# Within float32 that is hardly ever in the baseline itself: its error says less of a kernel's.
GRADIENT_FACTORS_FLOAT32 = (32.0, 32.0, None)
POOLED_FACTORS = (4.0, 4.0, None)
# And so many roundings more, for what kernels do besides. In float32 kernels add up in another
# order, which brings as many as there are terms. (Of 30 nets' outputs no kernel was off by more
# than 42 beyond what controls explain; then came a small convolutional net with 120.)
OUTPUT_ROUNDINGS = (2.0, 2.0, 2.0)
GRADIENT_ROUNDINGS = (16.0, 16.0, 16.0)
TERMS = 512.0
# A ReLU that fell the other way by float32's rounding moved a whole gradient by up to 7e-4.
FLIPS = (1e-2, 1e-2, 1e-2)
# Where all gradients are smaller than deviation.LEAST_GRADIENT, float32 leaves noise of any size in
# their place, ten times as large in one layout as in another: what is off by so many times that,
# the 1e-8 that Adam adds to what it divides by, is noise too.
VANISHING = (1e4, 1e4, 1e4)
# What is zero in theory, the bias of a convolution before a batch norm say, is off by what float32
# left of it, in units of deviation.LEFT_OF_ZERO: one thread left 34 times as much as two, 1.9.
ZEROS = (10.0, 10.0, 10.0)
# Controls that compute with torch's own kernels are off as a variant's kernels are.
GRADIENT_FACTORS_KERNELS = (3.0, 3.0, None)
# So many elements err as one: those of a row or a channel have their rounding in common.
ERR_AS_ONE = 64
# Scatter within a net that normalizes shortens what is left of the signal: of 1 + scatter**2.
SHORTENED = 0.5
# Controls are few: what is beyond their limits by no more than this is no accusation.
NARROW = 1.1
# What a net is taken to be off by in roundings where no control could be run.
TYPICAL = 8.0
# What rounding alone moves by as much as there is can't be told from anything.
UNDETERMINED = 1.0


@dataclass(frozen=True)
class Tolerance:
    """The limits of one precision, from one or more controls.

    `kernels` are those from controls that compute with kernels of another layout: what is beyond
    the limits of one tensor may be within theirs.
    """

    precision: str
    controls: Sequence[Errors]
    width: float = 1.0
    surely: bool = False
    settings: bool = False
    kernels: Tolerance | None = None
    with_kernels: bool = False

    def sure(self, settings: bool = False) -> Tolerance:
        """Without what may be the net: a single row, the size of a whole number.

        `settings` is whether whole numbers may be settings and counters, which no rounding moves
        by chance.
        """
        kernels = self.kernels and self.kernels.sure(settings)
        return replace(self, surely=True, settings=settings, kernels=kernels)

    def surer(self, further: Sequence[Errors]) -> Tolerance:
        """With further controls; those in float32 compute with other kernels."""
        if self.precision != "fp32":
            return replace(self, controls=[*self.controls, *further], width=NARROW)
        kernels = replace(self, controls=further, width=NARROW, with_kernels=True)
        return replace(self, width=NARROW, kernels=kernels if further else None)

    def wider(self, times: float) -> Tolerance:
        """All limits of results and gradients so many times as large."""
        return replace(self, width=times, kernels=self.kernels and self.kernels.wider(times))

    @property
    def output(self) -> float:
        """How far rounding alone moves the outputs."""
        return max((control.output.distance for control in self.controls), default=self._typical)

    @property
    def gradient(self) -> float:
        """How far rounding alone moves the gradients."""
        return max((control.gradient.distance for control in self.controls), default=self._typical)

    @property
    def _typical(self) -> float:
        return TYPICAL * unit(self.precision)

    def undetermined(self) -> float:
        """How far rounding alone moves that output which it moves most."""
        controls = [deviation for control in self.controls for deviation in control.numbers]
        return max((deviation.distance for deviation in controls), default=0.0)

    def noise(self) -> list[float | None]:
        """How far rounding alone moves each of the models' buffers, where a control reached it."""
        kept = [control.buffers for control in self.controls if control.buffers]
        values = [
            [value for value in buffer if value is not None] for buffer in zip(*kept, strict=True)
        ]
        return [max(buffer) if buffer else None for buffer in values]

    def beyond(self, errors: Errors, names: Names | None = None) -> str:
        """The first thing that rounding does not explain; empty where it explains all."""
        names = names or Names()
        for index in range(len(errors.numbers)):
            if fault := self._or_of_kernels(Tolerance._of_number, errors, index):
                return f"{errors.names[index]} {fault}"
        for index, which in enumerate(errors.which):
            if fault := self._or_of_kernels(Tolerance._of_gradient, errors, index):
                return f"gradient of {names.parameter(which)} {fault}"
        together = self._or_of_kernels(Tolerance._of_all_gradients, errors, 0)
        return f"gradients {together}" if together else self._beyond_in_whole_numbers(errors)

    def _or_of_kernels(
        self, fault: Callable[[Tolerance, Errors, int], str], errors: Errors, index: int
    ) -> str:
        """What neither the controls explain nor those that compute with other kernels."""
        return fault(self, errors, index) and fault(self.kernels or self, errors, index)

    def _of_number(self, errors: Errors, index: int) -> str:
        deviation = errors.numbers[index]
        controls = [
            control.numbers[index] for control in self.controls if index < len(control.numbers)
        ]
        return self._beyond(deviation, controls, OUTPUT_FACTORS, OUTPUT_ROUNDINGS, (0.0,) * 3)

    def _of_gradient(self, errors: Errors, index: int) -> str:
        deviation, which = errors.gradients[index], errors.which[index]
        controls = [
            gradient for control in self.controls if (gradient := control.gradient_of(which))
        ]
        is_zero = self.precision == "fp32" and any(control.drowned for control in controls)
        besides = VANISHING if errors.vanishing else ZEROS if is_zero else FLIPS
        return self._beyond(deviation, controls, self._factors, GRADIENT_ROUNDINGS, besides)

    def _of_all_gradients(self, errors: Errors, _: int) -> str:
        controls = [control.gradient for control in self.controls]
        besides = VANISHING if errors.vanishing else FLIPS
        return self._beyond(
            errors.gradient, controls, POOLED_FACTORS, GRADIENT_ROUNDINGS, besides, True
        )

    @property
    def _factors(self) -> Sequence[float | None]:
        if self.with_kernels:
            return GRADIENT_FACTORS_KERNELS
        return GRADIENT_FACTORS_FLOAT32 if self.precision == "fp32" else GRADIENT_FACTORS

    def _beyond(
        self,
        deviation: Deviation,
        controls: Sequence[Deviation],
        factors: Sequence[float | None],
        roundings: Sequence[float],
        besides: Sequence[float],
        whole: bool = False,
    ) -> str:
        distance = max((control.distance for control in controls), default=self._typical)
        if distance >= UNDETERMINED and not whole:
            return ""
        spread = distance * min(1.0, (ERR_AS_ONE / max(deviation.size, 1)) ** 0.5)
        spread += SHORTENED * distance * distance
        more = TERMS if self.precision == "fp32" else 1.0
        for index, value in enumerate(deviation.values()):
            factor = factors[index]
            if factor is None:
                continue
            worst = max((control.values()[index] for control in controls), default=self._typical)
            limit = factor * worst + roundings[index] * more * unit(self.precision)
            limit += besides[index]
            if NAMES[index] not in ("scaled", "shifted"):
                limit *= self.width
            else:  # with a margin of their own, which chance needs
                limit = (limit + spread) * (self.width if self.width > NARROW else 1.0)
            if not value <= limit:
                off, most = told_apart(value, limit)
                return f"{NAMES[index]} by {off}, more than {self.precision} explains ({most})"
        return ""

    def _beyond_in_whole_numbers(self, errors: Errors) -> str:
        """Rounding decides a few of them, where two candidates are as good."""
        controls = [control.differing for control in self.controls]
        strict = self.width <= NARROW
        return whole_numbers.beyond(
            errors.differing, controls, self.precision, strict, self.surely, self.settings
        )

    def enough_whole_numbers(self, errors: Errors) -> bool:
        """Whether they tell rounding from errors: fewer than half of any, or of all, may differ."""
        controls = [control.differing for control in self.controls]
        for index, differing in enumerate(errors.differing):
            known = [control[index] for control in controls if index < len(control)]
            if 2 * whole_numbers.allowed(known, differing.size) < differing.size:
                return True
        size = whole_numbers.in_all(errors.differing)[1]
        return 2 * whole_numbers.allowed_in_all(controls, size) < size


def told_apart(value: float, limit: float) -> tuple[str, str]:
    """Both in as many digits as they differ in."""
    pairs = [(f"{value:.{digits}g}", f"{limit:.{digits}g}") for digits in (2, 3, 4, 6, 17)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
