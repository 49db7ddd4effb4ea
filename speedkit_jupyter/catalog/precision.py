"""Autocast inside of the model's calls: products in bf16 or fp16, results in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base import lowered
from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Optimization, dotted
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.calls import Call
from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Accelerator, Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError

# The config's words, as torch calls them.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class Precision(Optimization):
    """Calls of the model compute under autocast and return float32, as Accelerate's do.

    `ctx.autocast()` surrounds more, such as a loss function that multiplies matrices.
    """

    name = "precision"
    none = "fp32"
    effect = Effect.ROUNDING
    lowers = True
    summary = "autocast to bf16 or fp16"
    helps = "hardware that multiplies bf16 or fp16 natively, models with large products"
    risk = "products are rounded to 8 or 11 bits; fp16 overflows where bf16 does not"
    page = "https://docs.pytorch.org/docs/stable/amp.html"
    Options = Literal["auto", "fp32", "bf16", "fp16"]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        if request.value == "fp32":
            return request.leave("fp32", asked=True)
        if own := facts.no_float32:
            return request.decline("fp32", f"parameters are {own}: autocast only lowers float32")
        gpu = hardware.accelerator(facts.device)
        if facts.device_type != "cpu" and gpu is None:
            return request.decline("fp32", f"this machine has no {facts.device}")
        if request.value != "auto":
            return self._decide_explicit(request, hardware, facts, gpu)
        value, reason, always_pays = _native(gpu) if gpu else _on_cpu(hardware)
        if value == "fp16" and any(dtype.startswith("complex") for dtype in facts.dtypes):
            return request.leave("fp32", "complex parameters: fp16 gradients could not be scaled")
        if value == "fp32":
            return request.leave(value, reason)
        if not always_pays:
            return request.offer("fp32", value, reason)
        return request.apply(value, reason)

    def _decide_explicit(
        self, request: Request, hardware: Hardware, facts: Facts, gpu: Accelerator | None
    ) -> Decision:
        asked = request.value
        if gpu is None:
            native = asked == "bf16" and hardware.cpu.bf16
            if facts.lstms and not native:
                reason = f"oneDNN has no {asked} LSTM on this CPU; it would fail"
                if not hardware.cpu.bf16:
                    return request.decline("fp32", reason)
                return request.apply("bf16", f"{reason}; bf16 works", declined=True)
            slow = "" if native else f"this CPU emulates {asked}, which is usually far slower"
            return request.obey(asked, hint=slow)
        if asked == "fp16" or gpu.bf16:
            return request.obey(asked)
        nearest, reason, _ = _native(gpu)
        reason = f"{gpu.name} has no bf16 units; the nearest that works is {nearest}: {reason}"
        if nearest == "fp32":
            return request.decline("fp32", reason)
        return request.apply(nearest, reason, declined=True)

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        return replace(facts, precision=decision.value)

    def changes(self) -> dict[str, Any]:
        return {word: word for word in self.words if word != "auto"}

    def switches(self) -> Mapping[str, flags.Switch]:
        cached = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, (False,)
        switches = {"autocast.cache_enabled": flags.Switch(*cached)}
        for kind in filter(torch.amp.is_autocast_available, ("cpu", *devices.KINDS)):
            others = (*({torch.float16, torch.bfloat16} - {torch.get_autocast_dtype(kind)}),)
            for name, read, write, values in (
                ("enabled", torch.is_autocast_enabled, torch.set_autocast_enabled, (True,)),
                ("dtype", torch.get_autocast_dtype, torch.set_autocast_dtype, others),
            ):
                switch = flags.Switch(partial(read, kind), partial(write, kind), values)
                switches[f"autocast.{kind}.{name}"] = switch
        return switches

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        target.memo.autocast = decision.value
        try:
            with super().applied(decision, target):
                yield
        finally:
            target.memo.autocast = None

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        dtype = DTYPES.get(decision.value)
        return lowered.layers(target, getattr(torch, dtype)) if dtype else []

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        return {}  # its switches are only watched

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """Return `torch.autocast` for the model's device; fp32 by request switches autocast off."""
        parameter = next(target.model.parameters(), None)
        device_type = "cpu" if parameter is None else parameter.device.type
        if decision.value in DTYPES:
            return partial(torch.autocast, device_type, getattr(torch, DTYPES[decision.value]))
        if decision.source != "auto" and not decision.declined:
            return partial(torch.autocast, device_type, enabled=False)
        return nullcontext

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        dtype, device_type = decision.value, facts.device_type
        if form == "transformers":
            if (dtype, device_type) == ("fp16", "cpu"):
                raise SpeedKitError("Trainer has no fp16 on cpu: take --as torch")
            return Snippet(arguments={dtype: "True"})
        return Snippet(forward=(f'torch.autocast("{device_type}", dtype=torch.{DTYPES[dtype]})',))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        return {"model.autocast": planned.value if planned else target.memo.autocast or "off"}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        gpu = hardware.accelerator(facts.device)
        if gpu is None:
            return ("bf16",) if facts.device_type == "cpu" and hardware.cpu.bf16 else ()
        has_fp16 = gpu.tensor_cores or not gpu.is_nvidia
        return (*["bf16"] * gpu.bf16, *["fp16"] * has_fp16)


def _on_cpu(hardware: Hardware) -> tuple[str, str, bool]:
    """Return the CPU's precision, the reason, and whether it always pays."""
    if not hardware.cpu.bf16:
        why = "no AVX512_BF16 or AMX: this CPU has no bf16 units and would emulate them"
        return "fp32", why, True
    units = " and ".join(one for one in hardware.cpu.features if one.endswith("bf16"))
    return "bf16", f"this CPU has {units}: faster for some models and not for others", False


def _native(gpu: Accelerator) -> tuple[str, str, bool]:
    """Return the accelerator's precision, the reason, and whether it always pays."""
    kind = devices.KINDS[gpu.kind]
    if not gpu.is_nvidia:
        if not gpu.bf16:
            return "fp32", f"{gpu.name} {kind.no_bf16}", True
        if set(kind.emulating) & set(gpu.name.split()):
            return "fp32", f"{gpu.name} emulates bf16; fp16 is there on request", True
        return "bf16", f"{gpu.name} {kind.bf16}", False
    capability = f"compute capability {dotted(gpu.capability or ())}"
    if gpu.bf16:
        return "bf16", f"{capability} >= 8.0: bf16 Tensor Cores", True
    if gpu.tensor_cores:
        return "fp16", f"{capability}: fp16 Tensor Cores, no bf16 (it would be emulated)", True
    return "fp32", f"{gpu.name} ({capability}) has no Tensor Cores", True
