"""How far all that a step did is off another step: call by call, tensor by tensor, in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.comparing.buffers import off_from
from speedkit_jupyter.measure.checks.comparing.deviation import (
    LEAST_GRADIENT,
    Deviation,
    deviation,
    least_gradient,
    pooled,
    root_mean_square,
)
from speedkit_jupyter.measure.checks.comparing.whole_numbers import Differing, differing
from speedkit_jupyter.measure.checks.comparing.wording import differing_in
from speedkit_jupyter.measure.checks.values.magnitudes import is_finite, of_finite, tamed

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.observing.observation import Observation
    from speedkit_jupyter.measure.checks.values.leaves import Leaves


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
    least = least_gradient(pairs)
    return Errors(
        [deviation(tensor, expected) for tensor, expected in results],
        [deviation(gradient, expected, least) for gradient, expected in pairs],
        [*differing(exact, exacts), *(differing_in(seen, reference) if together else [])],
        pooled(results),
        pooled(pairs, LEAST_GRADIENT),
        _cosine(pairs),
        finite=all(is_finite(tensor) for tensor, _ in (*results, *pairs)),
        names=_names(seen, calls, dropped if together else None),
        vanishing=bool(pairs) and root_mean_square(pairs) < LEAST_GRADIENT,
        which=which,
        buffers=off_from(seen, reference),
    )


def vanish(observation: Observation) -> bool:
    """Whether all gradients of a step are too small to tell anything from."""
    made = [tensor for tensor in observation.gradients if tensor is not None]
    return bool(made) and root_mean_square([(tensor, tensor) for tensor in made]) < LEAST_GRADIENT


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


def _cosine(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    dot = sum(float((tensor * reference).sum()) for tensor, reference in pairs)
    norms = [sum(float(pair[i].norm()) ** 2 for pair in pairs) ** 0.5 for i in (0, 1)]
    return dot / (norms[0] * norms[1]) if all(norms) else None
