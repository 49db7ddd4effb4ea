"""Linear layers that multiply in 8-bit integers, by torchao."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

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
from speedkit_jupyter.optimizations.snippet import Form, Snippet, call

if TYPE_CHECKING:
    import torch

# The first compute capability with Tensor Cores for int8.
INTEGER_TENSOR_CORES = (7, 5)
OVERFLOWS = "this CPU's products of 8-bit integers overflow (it has no VNNI), so 7 bits are used"
CONFIGS = {
    "dynamic": "Int8DynamicActivationInt8WeightConfig",
    "weights": "Int8WeightOnlyConfig",
}


def _meant(value: Any) -> Any:
    """`true`, as a shell may spell it, is the one that gains more."""
    return "dynamic" if value in (True, "true", "on", "yes") else value


class Int8(Optimization):
    """For inference: the weights stay in the model, and integers multiply in their stead.

    `dynamic` rounds what comes in as well, row by row, and multiplies integers; `weights` rounds
    only the weights, for products that wait for memory.
    """

    name = "int8"
    effect = Effect.CHANGES_MODEL
    summary = "linear layers in 8-bit integers, by torchao"
    helps = "inference of models with large linear layers, on CPUs with VNNI or AMX too"
    risk = (
        "another model, by about 1 % of its outputs; a quarter more memory, since the weights "
        "stay; nothing where gradients are recorded"
    )
    undone = "the weights never left their places: nothing multiplies in their stead any more"
    page = (
        "https://docs.pytorch.org/ao/stable/api_reference/generated/torchao.quantization."
        "Int8DynamicActivationInt8WeightConfig.html"
    )
    library = "torchao"
    Options = Annotated[
        Literal["auto", False, "dynamic", "weights"],
        BeforeValidator(_meant),
        Field(description="auto, false, dynamic, weights"),
    ]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only, for inference."""
        if request.value == "auto":
            return request.leave(False, quantizing.BY_REQUEST)
        if request.value is False:
            return request.leave(False, asked=True)
        obstacle = quantizing.training(facts) or quantizing.obstacle(hardware, facts)
        if not obstacle and request.value == "dynamic":
            obstacle = _no_products(hardware, facts)
        if obstacle:
            return request.decline(False, obstacle)
        return request.obey(
            request.value, f"{facts.linears} linear layers, where no gradients are recorded"
        )

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """No other has the same weights."""
        return replace(facts, quantized=self.name) if decision.active else facts

    def changes(self) -> dict[str, Any]:
        """The word alone is `dynamic`."""
        return {self.name: "dynamic"} | super().changes()

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Those whose weights are plain ones."""
        return quantizing.expected(target.model, self.name)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Lay an integer twin beside every weight."""
        quantization, notes = quantizing.imported(), target.notes

        def make(weight: torch.Tensor) -> torch.Tensor:
            narrow = decision.value == "dynamic" and _overflows(weight.device.type)
            if narrow:
                notes["int8"] = OVERFLOWS
            config = getattr(quantization, CONFIGS[decision.value])
            more = {"reduce_range": True} if narrow else {}
            return quantizing.by_torchao(config(set_inductor_config=False, **more), weight)

        with quantizing.quantized(target, self.name, make):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own call, which replaces the weights for good."""
        name, imports, more = CONFIGS[decision.value], [], []
        if decision.value == "dynamic" and facts.device_type == "cpu":
            imports.append("from torchao.utils import should_reduce_range")
            more.append('reduce_range=should_reduce_range(torch.device("cpu"))')
        config = call(name, *more, set_inductor_config=False)
        return Snippet(
            f"{decision.reason}; it takes the float weights' place for good",
            imports=(f"from torchao.quantization import {name}, quantize_", *imports),
            model=("quantize_(", "    model,", f"    {config},", ")"),
        )

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many layers multiply so."""
        return quantizing.counted(target.model, self.name)


def _no_products(hardware: Hardware, facts: Facts) -> str:
    """Why this device does not multiply integers; empty where it does."""
    if facts.device_type == "cpu":
        return ""
    gpu = hardware.accelerator(facts.device)
    if gpu is None or not gpu.is_nvidia:
        return (
            f"products of integers are torchao's on CPUs and NVIDIA GPUs; this is {facts.device}: "
            "int8: weights is there"
        )
    capability = gpu.capability or (0, 0)
    if capability < INTEGER_TENSOR_CORES or not gpu.tensor_cores:
        needs, has = (".".join(map(str, one)) for one in (INTEGER_TENSOR_CORES, capability))
        return (
            f"int8 Tensor Cores come with compute capability {needs}; {gpu.name} has {has}, or "
            "none at all: int8: weights is there"
        )
    return ""


@cache
def _overflows(device_type: str) -> bool:
    """Whether products of integers are wrong on this CPU: without VNNI sums of two saturate."""
    import torch

    if device_type != "cpu":
        return False
    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most.t()) != 127 * 127 * 64).any())
