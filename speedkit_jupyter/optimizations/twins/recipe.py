"""How the twin of a weight is made, and when it has to be made anew."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.thread_origin import is_for_here

if TYPE_CHECKING:
    import torch

# Dtype and device of a weight, a checksum of its values, and what was made of them.
Kept = tuple[tuple[Any, ...], list["torch.Tensor"], Any]


@dataclass(eq=False)
class Recipe:
    """How the twins of one plan are made: tensors by `make(values)`, layers by `make(weight)`.

    `kept` holds tensors that were made, with a checksum of what they were made of: plans are hidden
    and come back. `trained` is called where gradients are recorded, so that none of them
    multiplies. In a benchmark it is for one `thread`; other threads multiply by the weights. With
    `casts` the kernels behind its tensors take their own dtype alone.
    """

    name: str
    make: Callable[[Any], Any]
    kept: MutableMapping[torch.Tensor, Kept]
    trained: Callable[[], None]
    thread: int | None = None
    makes_layers: bool = False
    casts: bool = False

    def twin(self, weight: torch.Tensor) -> Any:
        """That of the weight as it is now."""
        import torch

        if self.makes_layers:
            return self.make(weight)
        with torch.no_grad(), torch.inference_mode(False):
            with torch._C.DisableTorchFunctionSubclass():
                now, known = weight.detach(), self.kept.get(weight)
            kind, bits = (now.dtype, now.device), _checksum(now)
            if known is not None and known[0] == kind and all(map(torch.equal, known[1], bits)):
                return known[2]
            with torch.autocast(now.device.type, enabled=False):
                twin = self.make(now)
            with torch._C.DisableTorchFunctionSubclass():
                self.kept[weight] = kind, bits, twin
            return twin

    def is_for_here(self) -> bool:
        """Whether this thread multiplies by twins; autograd's own computes what it needs again."""
        return is_for_here(self.thread)


def recipe_of(weight: Any) -> Recipe | None:
    """By which its twin is made; None where it has none."""
    recipe = getattr(weight, "__dict__", {}).get("_speedkit_recipe")
    return recipe if isinstance(recipe, Recipe) else None


def seen(weight: torch.Tensor) -> tuple[Any, ...]:
    """What is another once a weight was written."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        version = None if weight.is_inference() else weight._version
        return version, weight.data_ptr(), weight.dtype, weight.device, weight.shape


def _checksum(weight: torch.Tensor) -> list[torch.Tensor]:
    """Sums of the bits of each row and of each column."""
    import torch

    whole = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    bits = weight.contiguous().view(whole)
    return [bits.sum(dimension, dtype=torch.int64) for dimension in (0, 1)]
