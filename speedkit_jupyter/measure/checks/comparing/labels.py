"""The model's own names of what the accuracy check compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.comparing import buffers
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

# Others (Adafactor, Muon, those of other libraries) divide by what many elements have in common.
BY_ELEMENT = (
    "SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop",
    "Rprop", "SparseAdam",
)  # fmt: skip


@dataclass(frozen=True)
class Names:
    """Of parameters and buffers, in the order in which they are observed.

    `spacings` are the distances of neighbouring numbers where each parameter is largest;
    `by_element` is whether the optimizers move each element by its own gradient alone.
    """

    parameters: Sequence[str] = ()
    buffers: Sequence[str] = ()
    spacings: Sequence[float] = ()
    by_element: bool = True

    def parameter(self, index: int) -> str:
        """By its name; by its number where it is none of the models'."""
        named = index < len(self.parameters)
        return self.parameters[index] if named else f"parameter {index + 1}"


def of(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Names:
    """Of these models, in the order of their parameters and buffers."""
    import torch

    by_element = tuple(getattr(torch.optim, name) for name in BY_ELEMENT)
    several, entries = len(models) > 1, dict[int, tuple[str, float]]()
    for model in models:
        first = f"{type(model).__name__}." if several else ""
        for name, parameter in model.named_parameters():
            entries.setdefault(id(parameter), (first + name, _spacing(parameter)))
    return Names(
        [name for name, _ in entries.values()],
        buffers.labels(models),
        [spacing for _, spacing in entries.values()],
        all(isinstance(optimizer, by_element) for optimizer in optimizers),
    )


def _spacing(parameter: torch.Tensor) -> float:
    import torch

    if not (parameter.numel() and is_in_memory(parameter)) or parameter.layout is not torch.strided:
        return 0.0
    return float(parameter.detach().abs().max()) * torch.finfo(parameter.dtype).eps
