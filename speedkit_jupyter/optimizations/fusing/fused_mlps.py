"""The calls of an MLP with a gate, activation and product by one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.fusing import liger
from speedkit_jupyter.optimizations.fusing.fused_calls import Fused, is_one, keep_nothing

if TYPE_CHECKING:
    import torch


class FusedMlp(Fused):
    """Activation and product of an MLP with a gate in one kernel, which keeps neither."""

    kind = "swiglu"

    def __init__(
        self, module: torch.nn.Module, functional: Any, how: Any, notes: dict[str, str]
    ) -> None:
        super().__init__(module, functional, how, notes)
        self._known = self._activation(module)

    def _suits(self, args: Any, kwargs: Any) -> bool:
        is_known = self._activation(self.module) is self._known
        return is_known and is_one(args, kwargs) and liger.takes(args[0])

    def _projections(self) -> Iterable[torch.nn.Module]:
        parts = self.module._modules
        return (part for name in self._how[:2] if (part := parts.get(name)) is not None)

    def _fused(self, args: Any, kwargs: Any) -> Any:
        parts: Any = self.module
        how = self._how
        gate, up = getattr(parts, how.gate)(*args), getattr(parts, how.up)(*args)
        return getattr(parts, how.down)(self._product(gate, up))

    def _product(self, gate: Any, up: Any) -> Any:
        if not (keep_nothing(self._projections()) and _may_write_over(gate, up)):
            return self._known(gate) * up
        kernel = getattr(self._functional, f"liger_{self._how.kernel}")
        return liger.once(self.kind, kernel(gate, up), writes=True)

    def _activation(self, module: torch.nn.Module) -> Any:
        from torch.nn.functional import silu

        return getattr(module, self._how.activation) if self._how.activation else silu


def _may_write_over(gate: Any, up: Any) -> bool:
    """Their gradients take their places."""
    fits = liger.takes(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype
    return fits and liger.are_nobodys(gate, up)
