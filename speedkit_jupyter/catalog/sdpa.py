"""The switch `sdpa`: the attention kernel of `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Fields, Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue import private as torch_private

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
TAG = "compiler.cache_key_tag"


class Sdpa(Optimization):
    """Try the chosen attention kernel first, then the other kernels. `math` is used alone."""

    name = "sdpa"
    none = "auto"
    effect = Effect.ROUNDING
    rivals = True
    summary = "the attention kernel that is tried first"
    helps = "scaled_dot_product_attention, where torch's first choice is not the fastest"
    risk = "kernels sum in another order"
    page = "https://docs.pytorch.org/docs/stable/nn.attention.html"

    class Options(Fields):
        backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        asked = request.value.backend
        if asked == "auto":
            return request.leave("auto", "torch's own order stays: no other is right everywhere")
        if asked == "math":
            return request.obey("math", "the plain kernel and no other")
        if facts.device_type == "cpu":
            own = "on a CPU torch uses its own fused one already"
            return request.decline("auto", f"{asked!r} is a CUDA kernel; {own}")
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not devices.KINDS[gpu.kind].has_attention_kernels:
            return request.decline("auto", f"{asked!r} is a CUDA kernel; this is {facts.device}")
        if gpu.is_nvidia and asked in ("flash", "cudnn") and not gpu.bf16:
            nearest = f"the nearest that {gpu.name} has is 'efficient'"
            reason = f"{asked!r} needs compute capability 8.0; {nearest}"
            return request.apply("efficient", reason, declined=True)
        return request.obey(asked, hint="inputs that it can't take go to the other kernels")

    def process_flags(self) -> Mapping[str, flags.Flag]:
        """Return the flags of the kernels and their order, and the compile cache's tag."""
        from torch.backends import cuda

        words = {name: name for name in BACKENDS} | {"efficient": "mem_efficient"}
        both = {
            name: (getattr(cuda, f"{word}_sdp_enabled"), getattr(cuda, f"enable_{word}_sdp"))
            for name, word in words.items()
        }
        order = torch_private.attention_order, torch_private.set_attention_order
        return {
            **{f"sdp.{name}": flags.Flag(*one, (False,)) for name, one in both.items()},
            "sdp.priority_order": flags.Flag(*order, ([0, 1, 2, 3, 4],)),
            TAG: flags.attribute(torch.compiler.config, "cache_key_tag", "another"),
        }

    def switched(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        """Return the context manager. On CUDA, first call attention, which resets the order."""
        parameter = None if target.model is None else next(iter(target.model.parameters()), None)
        if parameter is not None and parameter.device.type == "cuda":
            one = torch.zeros(1, 1, 1, 8, device=parameter.device, dtype=torch.float16)
            torch.nn.functional.scaled_dot_product_attention(one, one, one)
        return super().switched(decision, target)

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        from torch.nn.attention import SDPBackend

        fused = decision.value != "math"
        first = int(getattr(SDPBackend, BACKENDS[decision.value]))
        others = [number for number in now.get("sdp.priority_order", ()) if number != first]
        return {
            **{f"sdp.{kernel}": fused for kernel in ("flash", "efficient", "cudnn")},
            "sdp.math": True,
            "sdp.priority_order": [first, *others],
            TAG: f"{now.get(TAG, '')}|sdpa:{decision.value}",
        }

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """Return the function behind `ctx.sdpa`; it changes nothing for `auto`."""
        return nullcontext if decision.value == "auto" else partial(self.switched, decision, target)

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return code with torch's public context manager, and a tag for the compile cache."""
        word = decision.value
        others = [] if word == "math" else [name for name in BACKENDS if name != word]
        kernels = ", ".join(f"SDPBackend.{BACKENDS[name]}" for name in (word, *others))
        note = "# torch.compile's cache does not tell one choice of kernels from another."
        return Snippet(
            imports=("from torch.nn.attention import SDPBackend, sdpa_kernel",),
            setup=(f"attention = [{kernels}]",),
            compiling=(note, f'torch.compiler.config.cache_key_tag = "|sdpa:{word}"'),
            forward=("sdpa_kernel(attention, set_priority=True)",),
        )

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not devices.KINDS[gpu.kind].has_attention_kernels:
            return ()
        return ("flash", "cudnn", "efficient") if gpu.bf16 else ("efficient",)
