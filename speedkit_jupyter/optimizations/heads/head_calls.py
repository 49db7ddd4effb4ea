"""The calls of a model's last layer, whose result its loss may never ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.heads.logits import logits_of
from speedkit_jupyter.optimizations.heads.source import Source
from speedkit_jupyter.optimizations.properties.calls import Call
from speedkit_jupyter.optimizations.properties.hooks import is_watched

if TYPE_CHECKING:
    import torch

NAME = "linear_cross_entropy"


@dataclass
class Counts:
    """What became of the losses."""

    calls: int = 0
    fused: int = 0
    plain: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.fused} losses of {self.calls} calls"

    @property
    def note(self) -> str:
        """Why losses were computed from all logits."""
        why = "; ".join(f"{why} ({number})" for why, number in self.plain.items())
        return f"{self}; of all logits at once: {why}" if why else str(self)


class HeadCalls(Call):
    """The calls of one linear layer; its result is computed where somebody asks for it."""

    def __init__(
        self, module: torch.nn.Module, chunks: int, notes: MutableMapping[str, str]
    ) -> None:
        super().__init__(module)
        self.counts, self._chunks, self._notes = Counts(), chunks, notes
        self._own: Any = type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's result."""
        if len(args) != 1 or kwargs or not self._suits(args[0]):
            return self.below(*args, **kwargs)
        import torch

        features, layer = args[0], self.module
        device = features.device.type
        weight: Any = layer._parameters["weight"]
        is_autocast = torch.is_autocast_enabled(device)
        kind = torch.get_autocast_dtype(device) if is_autocast else weight.dtype
        if not is_autocast and features.dtype != weight.dtype:
            return self.below(features)  # which says so
        self.counts.calls += 1
        self._note()
        bias = layer._parameters["bias"]
        return logits_of(Source(features, weight, bias, kind, kind, self._chunks, self._tell))

    def _suits(self, features: Any) -> bool:
        """Where gradients are recorded, and nobody else has to do with the call."""
        import torch
        from torch.nn.modules import module

        layer = self.module
        return (
            type(features) is torch.Tensor
            and torch.is_grad_enabled()
            and self.is_here()
            and self.inner is None
            and features.ndim > 1
            and features.is_floating_point()
            and (features.requires_grad or any(p.requires_grad for p in layer.parameters()))
            and type(layer).forward is self._own
            and "weight" in layer._parameters
            and not is_watched(layer)
            and not module._has_any_global_hook()
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def _tell(self, why: str) -> None:
        """A loss was computed: in parts, or why not."""
        if why:
            self.counts.plain[why] += 1
        else:
            self.counts.fused += 1
        self._note()

    def _note(self) -> None:
        self._notes[NAME] = self.counts.note
