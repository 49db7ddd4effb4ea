"""The model's own names of what the accuracy check compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speedkit_jupyter.measure import buffers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Names:
    """Of parameters and buffers, in the order in which they are observed, and of outputs."""

    parameters: Sequence[str] = ()
    buffers: Sequence[str] = ()
    outputs: Sequence[str] = ()

    def parameter(self, index: int) -> str:
        """By its name; by its number where it is none of the models'."""
        known = index < len(self.parameters)
        return self.parameters[index] if known else f"parameter {index + 1}"

    def output(self, index: int, count: int) -> str:
        """By its name where the result has one, by its number where there are several."""
        if index < len(self.outputs) and self.outputs[index]:
            return f"output {self.outputs[index]}"
        return "output" if count == 1 else f"output {index + 1} of {count}"


def of(models: Sequence[torch.nn.Module]) -> Names:
    """Of these models, in the order of their parameters and buffers."""
    several, found = len(models) > 1, dict[int, str]()
    for model in models:
        first = f"{type(model).__name__}." if several else ""
        for name, parameter in model.named_parameters():
            found.setdefault(id(parameter), first + name)
    return Names(list(found.values()), buffers.labels(models))
