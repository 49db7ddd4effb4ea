"""How far a step is off another one: in all, and in the ways in which rounding is not.

Rounding scatters. What it does to a tensor has hardly a direction along it (`slope`) or a sign
(`shift`), and no row or element is off much more than the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.buffers import off_from
from speedkit_jupyter.measure.checks.gradient_parts import Parts, parts
from speedkit_jupyter.measure.checks.magnitudes import LARGE, is_finite, of_finite, tamed
from speedkit_jupyter.measure.checks.single_rows import Rows, single_rows
from speedkit_jupyter.measure.checks.whole_numbers import Differing, differing
from speedkit_jupyter.measure.checks.wording import differing_in

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.leaves import Leaves
    from speedkit_jupyter.measure.checks.observation import Observation

# Near float32's smallest numbers kernels give zero or not.
NOTHING = 1e-37
# Rows of so many elements are compared each on its own scale.
LEAST_IN_ROW = 8
# What a tensor's gradient is off by counts relative to this share of the whole one's at least.
LEFT_OF_ZERO = 1e-4
# And to this much: Adam adds 1e-8 to what it divides by.
LEAST_GRADIENT = 1e-12
NAMES = ("off", "scaled", "shifted", "off in one row or column", "off in one element")


@dataclass(frozen=True)
class Deviation:
    """Of one tensor with `size` elements, each relative to the reference.

    `distance`: norm of the difference over the norm of the reference. `slope`: the regression
    coefficient of the difference on the reference. `shift`: the mean difference, `row` the root
    mean square of the worst row (what lies at one index of any dimension), `element` the largest
    difference, each over the root mean square of the reference. `rows` are the root mean squares
    of difference and reference, (2, number of rows), for small rows beside large ones; `single`
    are all rows, each to be judged by itself; `parts` are those of a gradient. `drowned` is whether
    the difference is larger than the reference: of what is zero in theory rounding leaves anything.
    """

    size: int
    distance: float = 0.0
    slope: float = 0.0
    shift: float = 0.0
    row: float = 0.0
    element: float = 0.0
    rows: torch.Tensor | None = field(default=None, compare=False, repr=False)
    single: Rows | None = field(default=None, compare=False, repr=False)
    parts: Parts | None = field(default=None, compare=False, repr=False)
    drowned: bool = False

    def values(self) -> tuple[float, ...]:
        """What is off, in the order of NAMES."""
        return self.distance, self.slope, self.shift, self.row, self.element


@dataclass
class Errors:
    """Of one step against another one: tensor by tensor and, with `None`, what can't be compared.

    `numbers` are those of the models' calls, then of the outputs; `differing` which whole
    numbers differ, and by how much. `output` and `gradient` are all of them together.
    `names` say which `numbers` these are, `which` are the parameters that `gradients` belong to;
    `buffers` are the norms (of whole numbers: how much they differ by in all) by which the models'
    are off, None where the other step left them alone. `finite` is whether it is so wherever the
    other one is, `vanishing` whether all gradients are too small to tell anything from.
    """

    numbers: list[Deviation] = field(default_factory=list)
    gradients: list[Deviation] = field(default_factory=list)
    differing: list[Differing] = field(default_factory=list)
    output: Deviation = field(default_factory=lambda: Deviation(0))
    gradient: Deviation = field(default_factory=lambda: Deviation(0))
    cosine: float | None = None
    fits: bool = True
    finite: bool = True
    vanishing: bool = False
    names: list[str] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    buffers: list[float | None] = field(default_factory=list)

    def gradient_of(self, which: int) -> Deviation | None:
        """Of this parameter; None where neither step made one."""
        there = zip(self.which, self.gradients, strict=True)
        return next((gradient for index, gradient in there if index == which), None)


def errors(seen: Observation, reference: Observation, dropped: frozenset[int]) -> Errors:
    """How far `seen` is off; `dropped` are outputs that don't count, by their index.

    A step that feeds whole numbers back into its model (to generate text, say) is compared as long
    as these are the same: a single one that rounding decided leads elsewhere.
    """
    calls = _calls_alike(seen, reference)
    if calls is None:
        return Errors(fits=False)
    together = calls == len(reference.calls)
    ones = [t for call in seen.calls[:calls] for t in call.results.numbers]
    references = [t for call in reference.calls[:calls] for t in call.results.numbers]
    exact = [t for call in seen.calls[:calls] for t in call.results.exact]
    exacts = [t for call in reference.calls[:calls] for t in call.results.exact]
    if together:
        outputs, wanted = (
            _kept(seen.outputs.numbers, dropped),
            _kept(reference.outputs.numbers, dropped),
        )
        ones, references = ones + outputs, references + wanted
        exact, exacts = exact + seen.outputs.exact, exacts + reference.outputs.exact
    pairs_of_all = list(zip(seen.gradients, reference.gradients, strict=False))
    which = [index for index, pair in enumerate(pairs_of_all) if _any(pair)]
    gradients = [pairs_of_all[index] for index in which]
    if not (_fit(ones, references) and _fit(exact, exacts)):
        return Errors(fits=False)
    if len(seen.gradients) != len(reference.gradients):
        return Errors(fits=False)
    made = [_both(*pair) for pair in gradients]
    if any(gradient.shape != expected.shape for gradient, expected in made):
        return Errors(fits=False)
    pairs = tamed([of_finite(*pair) for pair in made])
    results = [of_finite(*pair) for pair in zip(ones, references, strict=True)]
    least = _least(pairs)
    return Errors(
        [deviation(tensor, expected) for tensor, expected in results],
        [_of_gradient(gradient, expected, least) for gradient, expected in pairs],
        [*differing(exact, exacts), *(differing_in(seen, reference) if together else [])],
        pooled(results),
        pooled(pairs, LEAST_GRADIENT),
        _cosine(pairs),
        finite=all(is_finite(tensor) for tensor, _ in (*results, *pairs)),
        names=_names(seen, calls, dropped if together else None),
        vanishing=bool(pairs) and _root_mean_square(pairs) < LEAST_GRADIENT,
        which=which,
        buffers=off_from(seen, reference),
    )


def vanish(observation: Observation) -> bool:
    """Whether all gradients of a step are too small to tell anything from."""
    made = [tensor for tensor in observation.gradients if tensor is not None]
    return bool(made) and _root_mean_square([(tensor, tensor) for tensor in made]) < LEAST_GRADIENT


def deviation(tensor: torch.Tensor, reference: torch.Tensor, least: float = NOTHING) -> Deviation:
    """Of float64 tensors of one shape; infinite where the reference is zero and this is not.

    It is relative to a root mean square of `least` at least.
    """
    difference, count = tensor - reference, reference.numel()
    norm, off = float(reference.norm()), float(difference.norm())
    if max(norm, off) > LARGE and (smaller := tamed([(tensor, reference)])[0])[1] is not reference:
        return deviation(*smaller, least)
    if not off or max(norm, float(tensor.norm())) < NOTHING * count**0.5:
        return Deviation(count)
    drowned = off > norm
    if least > NOTHING:
        norm = max(norm, least * count**0.5)
    if not norm:
        infinite = float("inf")
        return Deviation(count, infinite, infinite, infinite, infinite, infinite)
    size = norm / count**0.5
    return Deviation(
        count,
        off / norm,
        abs(float((difference * reference).sum())) / norm**2,
        abs(float(difference.mean())) / size,
        _worst_row(difference) / size,
        float(difference.abs().max()) / size,
        _rows(difference, reference),
        single_rows(difference, reference, least if least > NOTHING else 0.0),
        drowned=drowned,
    )


def _of_gradient(gradient: torch.Tensor, reference: torch.Tensor, least: float) -> Deviation:
    """With its parts, where it is off at all."""
    whole = deviation(gradient, reference, least)
    if not whole.distance:
        return whole
    return replace(whole, parts=parts(gradient - reference, reference, least))


def pooled(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], least: float = NOTHING) -> Deviation:
    """Distance and slope of all of them together, relative to a root mean square of `least` at
    least: what is smaller may be the noise of a signal that died on its way through the net.
    """
    off = along = total = 0.0
    for tensor, reference in tamed(pairs):
        difference = tensor - reference
        off += float(difference.norm()) ** 2
        along += float((difference * reference).sum())
        total += float(reference.norm()) ** 2
    count = sum(reference.numel() for _, reference in pairs)
    total = max(total, least**2 * count)
    if total == 0:
        return Deviation(count, 0.0 if off == 0 else float("inf"))
    return Deviation(count, (off / total) ** 0.5, abs(along) / total)


def _least(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Gradients so much smaller than the others may be what rounding left of a zero."""
    return max(LEAST_GRADIENT, LEFT_OF_ZERO * _root_mean_square(pairs))


def _root_mean_square(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Of all references."""
    count = sum(reference.numel() for _, reference in pairs)
    return math.sqrt(sum(float(reference.norm()) ** 2 for _, reference in pairs) / max(count, 1))


def _calls_alike(observation: Observation, reference: Observation) -> int | None:
    """How many calls were given the same whole numbers; None where their number differs at once."""
    count = 0
    for call, expected in zip(observation.calls, reference.calls, strict=False):
        if not _equal(call.given, expected.given):
            return count
        count += 1
    return count if len(observation.calls) == len(reference.calls) else None


def _names(observation: Observation, calls: int, dropped: frozenset[int] | None) -> list[str]:
    """What the models gave, by the call where there are several; then the step's own results."""
    names = []
    for number, call in enumerate(observation.calls[:calls], 1):
        which = f" of call {number}" if len(observation.calls) > 1 else ""
        names += [f"output{name}{which}" for name in _called(call.results)]
    if dropped is not None:
        kind = "loss" if observation.has_gradients() else "result"
        named = enumerate(_called(observation.outputs))
        names += [f"{kind}{name}" for index, name in named if index not in dropped]
    return names


def _called(results: Leaves) -> list[str]:
    """The names of numbers, by which one it is where there is none and they are several."""
    count = len(results.numbers)
    names = [*results.names, *[""] * count][:count]
    numbered = [f" {index + 1} of {count}" if count > 1 else "" for index in range(count)]
    return [f" {name}" if name else number for name, number in zip(names, numbered, strict=True)]


def _equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(
        tensor.shape == expected.shape and bool((tensor == expected).all())
        for tensor, expected in zip(ones, others, strict=True)
    )


def _fit(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return [tensor.shape for tensor in ones] == [tensor.shape for tensor in others]


def _kept(values: Sequence[torch.Tensor], dropped: frozenset[int]) -> list[torch.Tensor]:
    return [value for index, value in enumerate(values) if index not in dropped]


def _any(pair: tuple[torch.Tensor | None, torch.Tensor | None]) -> bool:
    return any(tensor is not None for tensor in pair)


def _both(
    tensor: torch.Tensor | None, other: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """No gradient is a gradient of zeros: a step may or may not make one of those."""
    there = tensor if tensor is not None else other
    assert there is not None
    zeros = there.new_zeros(()).expand(there.shape)
    return (zeros if tensor is None else tensor), (zeros if other is None else other)


def _worst_row(difference: torch.Tensor) -> float:
    """The largest root mean square over what lies at one index of any dimension."""
    if difference.dim() < 2 or not difference.numel():
        return 0.0
    return math.sqrt(max(float(squares.max()) for squares in _mean_squares(difference, 1)))


def _rows(difference: torch.Tensor, reference: torch.Tensor) -> torch.Tensor | None:
    """Root mean squares of both, for each index of each dimension that has elements enough."""
    import torch

    both = _mean_squares(difference, LEAST_IN_ROW), _mean_squares(reference, LEAST_IN_ROW)
    return torch.stack([torch.cat(squares).sqrt() for squares in both]) if both[0] else None


def _mean_squares(tensor: torch.Tensor, least: int) -> list[torch.Tensor]:
    square, count = tensor**2, tensor.numel()
    return [
        square.mean([axis for axis in range(tensor.dim()) if axis != dimension])
        for dimension, size in enumerate(tensor.shape)
        if tensor.dim() > 1 and size > 1 and count >= least * size
    ] or ([square.flatten(1).mean(1)] if tensor.dim() > 1 and least == 1 else [])


def _cosine(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    dot = sum(float((tensor * reference).sum()) for tensor, reference in pairs)
    norms = [sum(float(pair[i].norm()) ** 2 for pair in pairs) ** 0.5 for i in (0, 1)]
    return dot / (norms[0] * norms[1]) if all(norms) else None
