"""What the optimizations have in common that quantize linear layers by torchao."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations import quantizing
from speedkit_jupyter.optimizations.base import (
    Decision,
    Effect,
    Optimization,
    Request,
    Target,
)
from speedkit_jupyter.optimizations.facts import Facts
from speedkit_jupyter.optimizations.twinned import internals

if TYPE_CHECKING:
    import torch

BY_REQUEST = "it makes another model of this one: by request only, and then measured"


class Quantization(Optimization):
    """By request only; one of them at a time; `for_training` says that optimizers may step."""

    effect = Effect.CHANGES_MODEL
    library = "torchao"
    variable = None
    for_training: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Where the device multiplies so, and nothing is trained that can't be."""
        if request.value == "auto":
            return request.leave(False, BY_REQUEST)
        if request.value is False:
            return request.leave(False, asked=True)
        training = "" if self.for_training else quantizing.training(facts)
        missing = self.missing_units(request.value, hardware, facts)
        if obstacle := training or missing or quantizing.obstacle(hardware, facts):
            return request.decline(False, obstacle)
        internals()
        return request.obey(request.value, self.about(facts), hint=self.hint)

    def about(self, facts: Facts) -> str:
        """What it is done to."""
        number = f"{facts.linears} linear layers"
        return number if self.for_training else f"{number}, where no gradients are recorded"

    @abstractmethod
    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Why this device does not multiply so; empty where it does."""

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether the sizes of a weight are such as its kernels take."""
        return True

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """No other has the same weights."""
        return replace(facts, quantized=self.name) if decision.active else facts

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many layers multiply so."""
        return quantizing.counted(target.model, self.name)

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Those whose weights are plain ones, and fit."""
        return quantizing.expected(target.model, self.name, self.fits)


def older_than(capability: tuple[int, int], hardware: Hardware, facts: Facts) -> str:
    """What an NVIDIA GPU of an older compute capability has, or another device is; else empty."""
    gpu = hardware.accelerator(facts.device)
    if gpu is None or not gpu.is_nvidia or gpu.capability is None:
        return f"this is {facts.device if gpu is None else gpu.name}"
    if gpu.capability < capability:
        return f"{gpu.name} has {'.'.join(map(str, gpu.capability))}"
    return "" if gpu.tensor_cores else f"{gpu.name} has no Tensor Cores"
