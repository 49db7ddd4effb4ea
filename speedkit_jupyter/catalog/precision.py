"""The switch `precision`: calls of the model under autocast to bf16 or fp16."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import TransformerEncoder

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Optimization, dotted
from speedkit_jupyter.catalog.base.target import Memo, Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.autocast import caches_in_one_dtype, cast_once
from speedkit_jupyter.catalog.model_changes.calls import Call, converted, parts_called
from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Accelerator, Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.private import current_node

# torch's dtype names by config value.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Code with the effect of the plan's call wrappers. `lower` sets a bound method, because copies and
# pickles of a module must not call the original module.
LOWERED = """\
def in_float32(result):
    return result.float() if result.dtype is torch.{dtype} else result


def lower(module):
    forward = module.forward
    function = getattr(forward, "__func__", lambda _, *inputs, **named: forward(*inputs, **named))

    @wraps(function)
    def call(self, *inputs, **named):
        if torch.is_autocast_enabled("{device}"):  # by your code, or by a call around this one
            return function(self, *inputs, **named)
        with torch.autocast("{device}", dtype=torch.{dtype}):
            results = function(self, *inputs, **named)
        return tree_map_only(torch.Tensor, in_float32, results)

    module.forward = MethodType(call, module)"""
UNNESTED = (
    "for part in model.modules():",
    "    if isinstance(part, torch.nn.TransformerEncoder):",
    "        part.use_nested_tensor = False  # CPU autocast can't compute nested tensors",
)
OUTSIDE = "the code around uses its own autocast; forward passes outside of the plan"


class Precision(Optimization):
    """Run calls of the model under autocast and return float32, as Accelerate does.

    `ctx.autocast()` covers code outside the model, such as a loss with matrix products.
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
        if facts.device_type == "meta":
            return request.decline("fp32", "parameters are on 'meta': offloaded, or not loaded yet")
        gpu = hardware.accelerator(facts.device)
        if facts.device_type != "cpu" and gpu is None:
            return request.decline("fp32", f"no {facts.device} is known on this machine")
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
        return dataclasses.replace(facts, precision=decision.value)

    def changes(self) -> dict[str, Any]:
        return {word: word for word in self.words if word != "auto"}

    def process_flags(self) -> Mapping[str, flags.Flag]:
        cached = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, (False,)
        found = {"autocast.cache_enabled": flags.Flag(*cached)}
        for kind in filter(
            torch.amp.is_autocast_available, ("cpu", *(one.name for one in devices.every()))
        ):
            others = (*({torch.float16, torch.bfloat16} - {torch.get_autocast_dtype(kind)}),)
            for name, read, write, values in (
                ("enabled", torch.is_autocast_enabled, torch.set_autocast_enabled, (True,)),
                ("dtype", torch.get_autocast_dtype, torch.set_autocast_dtype, others),
            ):
                flag = flags.Flag(partial(read, kind), partial(write, kind), values)
                found[f"autocast.{kind}.{name}"] = flag
        return found

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        target.memo.autocast = decision.value
        try:
            lowers = decision.value in DTYPES
            one_dtype = caches_in_one_dtype() if lowers else nullcontext()
            with super().applied(decision, target), one_dtype:
                yield
        finally:
            target.memo.autocast = None

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        dtype = DTYPES.get(decision.value)
        return _calls(target, getattr(torch, dtype)) if dtype else []

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        return {}  # the flags are observed, not written

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """Return the function behind `ctx.autocast`; a requested fp32 disables autocast."""
        parameter = next(iter(target.model.parameters()), None)
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
                raise SpeedKitError("Trainer has no fp16 on cpu: use --as torch")
            return Snippet(arguments={dtype: "True"})
        lines = LOWERED.format(device=device_type, dtype=DTYPES[dtype]).splitlines()
        imports = ("from functools import wraps", "from types import MethodType")
        model = UNNESTED if device_type == "cpu" and TransformerEncoder in facts.classes else ()
        return Snippet(imports=imports, setup=tuple(lines), model=model, changes_forward="lower")

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        return {"model.autocast": planned.value if planned else target.memo.autocast or "off"}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        gpu = hardware.accelerator(facts.device)
        if gpu is None:
            return ("bf16",) if facts.device_type == "cpu" and hardware.cpu.bf16 else ()
        has_fp16 = gpu.tensor_cores or not gpu.is_nvidia
        return (*["bf16"] * gpu.bf16, *["fp16"] * has_fp16)


def _on_cpu(hardware: Hardware) -> tuple[str, str, bool]:
    """Return the precision to use on the CPU, the reason, and whether it always pays off."""
    if not hardware.cpu.bf16:
        why = "no AVX512_BF16 or AMX: this CPU has no bf16 units and would emulate them"
        return "fp32", why, True
    units = " and ".join(one for one in hardware.cpu.features if one.endswith("bf16"))
    return "bf16", f"this CPU has {units}: faster for some models and not for others", False


def _native(gpu: Accelerator) -> tuple[str, str, bool]:
    """Return the precision to use on this GPU, the reason, and whether it always pays off."""
    kind = devices.KINDS[gpu.kind]
    if not gpu.is_nvidia:
        if not gpu.bf16:
            return "fp32", f"{gpu.name} {kind.no_bf16}", True
        if gpu.emulates_bf16:
            return "fp32", f"{gpu.name} emulates bf16; fp16 is there on request", True
        return "bf16", f"{gpu.name} {kind.bf16}", False
    capability = f"compute capability {dotted(gpu.capability or ())}"
    if gpu.bf16:
        return "bf16", f"{capability} >= 8.0: bf16 Tensor Cores", True
    if gpu.tensor_cores:
        return "fp16", f"{capability}: fp16 Tensor Cores, no bf16 (it would be emulated)", True
    return "fp32", f"{gpu.name} ({capability}) has no Tensor Cores", True


class ModelCallState(threading.local):
    """A thread's flag: `model` is True during a call under the plan's autocast."""

    model = False


class Unnested(Call):
    """A call of TransformerEncoder without nested tensors, which CPU autocast can't compute."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        encoder: Any = self.module
        before = encoder.use_nested_tensor
        try:
            if torch.is_autocast_enabled("cpu") and self.acts():
                encoder.use_nested_tensor = False
            return self.below(*args, **kwargs)
        finally:
            encoder.use_nested_tensor = before


class Lowered(Call):
    """Run a module's calls under autocast, unless the user's code has enabled autocast.

    A submodule's wrapper does nothing inside another call under the plan's autocast.
    """

    order = 1  # surrounds compiled code and CUDA graphs, which run under autocast

    def __init__(
        self,
        module: torch.nn.Module,
        target: Target,
        block: tuple[str, torch.dtype],
        inside: ModelCallState,
        is_part: bool,
    ) -> None:
        super().__init__(module, target.notes, target.only_in)
        self._block, self._inside, self._is_part = block, inside, is_part
        self._memo: Memo = target.memo
        self._acted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the call's results, with low-precision tensors in float32 if the wrapper acts."""
        if torch.compiler.is_compiling():  # the user compiles code around the model
            if self._is_part or torch.compiler.is_exporting():
                return self.below(*args, **kwargs)
            with torch.autocast(*self._block):
                return converted(self.below(*args, **kwargs), self._in_float32)
        # In a recomputation, a submodule follows the autocast that the checkpoint restores.
        follows = self._is_part and not self._acted and current_node() is not None
        if self._inside.model or not self.acts() or follows:
            return self.below(*args, **kwargs)
        if torch.is_autocast_enabled(self._block[0]):
            if "autocast" not in self._memo.asked:
                self._memo.outside += 1
                self.notes["precision"] = f"{OUTSIDE}: {self._memo.outside:,}"
            return self.below(*args, **kwargs)
        self._acted = True
        dtype = torch.get_autocast_dtype(self._block[0])
        try:
            try:
                self._inside.model = True
                torch.set_autocast_dtype(*self._block)
                torch.set_autocast_enabled(self._block[0], True)
                result = self.below(*args, **kwargs)
            finally:
                self._leave(dtype)
        finally:  # repeated, because Ctrl-C may interrupt the first line of the inner `finally`
            self._leave(dtype)
        return converted(result, self._in_float32)

    def _in_float32(self, result: torch.Tensor) -> torch.Tensor:
        return result.float() if result.dtype is self._block[1] else result

    def _leave(self, dtype: torch.dtype) -> None:
        """Turn autocast off, restore the flags, clear the cache, and mark the call as ended."""
        torch.set_autocast_enabled(self._block[0], False)
        torch.set_autocast_dtype(self._block[0], dtype)
        torch.clear_autocast_cache()
        self._inside.model = False


def _calls(target: Target, dtype: torch.dtype) -> list[Call]:
    """Return all call wrappers that autocast needs, for the model and its submodules."""
    model, inside = target.model, ModelCallState()
    parameter = next(iter(model.parameters()), None)
    block = ("cpu" if parameter is None else parameter.device.type, dtype)
    parts = [part for _, part in parts_called(model)]
    lowered = [Lowered(one, target, block, inside, one is not model) for one in (model, *parts)]
    encoders = [one for one in model.modules() if isinstance(one, TransformerEncoder)]
    unnested = [Unnested(one, target.notes, target.only_in) for one in encoders]
    return [*lowered, *unnested, *cast_once(model, target.notes, target.only_in)]
