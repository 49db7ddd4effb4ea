"""What a stretch of a step computed: up to an optimizer's step, or to the end."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.values import leaves
from speedkit_jupyter.measure.checks.values.leaves import Leaves

if TYPE_CHECKING:
    import torch

# The first calls of a model are kept whole, and as many of the last. Of those between (of a step
# that generates, say) a sample is; and of very many of them every second, every fourth, ...
FIRST_CALLS, MOST_CALLS, MOST_SAMPLED = 8, 16, 512
SAMPLE = 64


@dataclass
class Call:
    """A call of one of the models from outside: the whole numbers it was given, what came out."""

    given: list[torch.Tensor]
    results: Leaves

    def in_short(self) -> Call:
        """A checksum of what it was given, a sample of what came out."""
        import torch

        sums = [zlib.crc32(tensor.numpy().tobytes()) for tensor in self.given]
        return Call(
            [
                torch.tensor([*tensor.shape, total])
                for tensor, total in zip(self.given, sums, strict=True)
            ],
            leaves.of([self.results.numbers, self.results.exact, self.results.words], SAMPLE),
        )


class Calls:
    """The calls of a stretch: `count` of them, of which those that are `kept` are compared."""

    def __init__(self) -> None:
        self.kept: list[Call] = []
        self.count = 0
        self._in_short, self._every = 0, 1

    def add(self, args: Any, kwargs: Any, result: Any, most: int) -> None:
        """One more, of whose tensors at most so many elements are kept."""
        self.count += 1
        self.kept.append(Call(leaves.of([args, kwargs]).exact, leaves.of([result], most)))
        if len(self.kept) - self._in_short > MOST_CALLS:
            self._shorten(FIRST_CALLS + self._in_short)

    def _shorten(self, at: int) -> None:
        """The first of those that were the last until now."""
        if (self.count - MOST_CALLS - 1) % self._every:
            del self.kept[at]
            return
        self.kept[at] = self.kept[at].in_short()
        self._in_short += 1
        if self._in_short > MOST_SAMPLED:
            del self.kept[FIRST_CALLS + 1 : FIRST_CALLS + self._in_short : 2]
            self._every *= 2
            self._in_short = (self._in_short + 1) // 2


@dataclass
class Observation:
    """What a stretch computed, on the CPU in float64.

    `outputs` are the tensors on which backward ran, those that `torch.autograd.grad` gave, or
    what the step returned; `calls` those of the models. `gradients` are those that it made, one
    for each parameter. `updates` are what the optimizer's step that ends it added to the
    parameters, `moved` is how far they are from where they were, `way` a sample of it, `movers` how
    many elements of each are elsewhere; both are empty where all of them stay. Where a step ends,
    `buffers` are those of the models then, `buffers_before` those before it, `modes` what their
    modules and parameters are set to (training, requires_grad). `in_backward` is whether optimizers
    stepped within the backward pass, each parameter as it got its gradient. `place`
    says which step it is of, and how many optimizer steps came before in that; `role` what it is
    besides.
    """

    outputs: Leaves = field(default_factory=Leaves)
    calls: list[Call] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    updates: list[torch.Tensor] = field(default_factory=list)
    moved: float = 0.0
    way: list[torch.Tensor] = field(default_factory=list)
    movers: list[int] = field(default_factory=list)
    buffers_before: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    modes: dict[str, bool] = field(default_factory=dict)
    complete: bool = False
    in_backward: bool = False
    place: tuple[int, int] = (0, 0)
    role: str = ""

    def has_gradients(self) -> bool:
        """Whether any parameter got one."""
        return any(gradient is not None for gradient in self.gradients)

    def has_numbers(self) -> bool:
        """Whether there is anything in it that rounding moves."""
        called = any(call.results.numbers for call in self.calls)
        return called or bool(self.outputs.numbers) or self.has_gradients()

    def words(self) -> list[str]:
        """All that can only be equal."""
        return [*(word for call in self.calls for word in call.results.words), *self.outputs.words]
