"""The switch `tf32`: TF32 for float32 products; on a CPU, bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Optimization, dotted
from speedkit_jupyter.catalog.base.target import Target, overridden
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags, fp32_precision
from speedkit_jupyter.machines.fp32_precision import CUDNN_TF32, NAMES
from speedkit_jupyter.machines.hardware import Accelerator, Hardware


class Tf32(Optimization):
    """Use TF32 on CUDA (`high`, `medium`). On a CPU, `medium` uses bf16; `high` has no effect."""

    name = "tf32"
    bare = "high"
    flag, none = "float32_matmul_precision", "highest"
    effect = Effect.ROUNDING
    lowers = True
    summary = "TF32 (on a CPU: bf16) inside float32 matrix products"
    helps = "NVIDIA GPUs from compute capability 8.0; on CPUs with bf16 units `medium`"
    risk = "float32 products are rounded to 11 bits (TF32) or 8 (bf16)"
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    Options = Literal["auto", "highest", "high", "medium"]
    aliases = ("tf32_matmul_precision",)
    frameworks_choose = True

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        now = self.as_is(facts)
        if request.value == "highest":
            if facts.device_type == "cpu" and now == "highest":
                return request.leave("highest", "full float32, unchanged", asked=True)
            return request.obey("highest", "full float32 everywhere")
        if facts.no_float32.startswith(("float64", "complex128")):
            own = facts.no_float32
            return request.decline(now, f"parameters are {own}: tf32 is for float32 products")
        if facts.device_type == "cpu":
            return self._decide_on_cpu(request, hardware, now)
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.tf32:
            return request.decline(now, f"no TF32 on {_described(gpu, facts)}")
        if request.value != "auto":
            return request.obey(request.value)
        if now != "highest" and facts.flags.get("cudnn.allow_tf32", True):
            return request.leave(now, f"you have set it to {now} already")
        return request.apply("high", f"{_described(gpu, facts)} has TF32 Tensor Cores")

    def _decide_on_cpu(self, request: Request, hardware: Hardware, now: str) -> Decision:
        if request.value == "high":
            return request.decline(now, "'high' changes nothing on a CPU; 'medium' is bf16 there")
        if not hardware.cpu.bf16:
            return request.decline(now, "no TF32 on a CPU, and this one has no AVX512_BF16 or AMX")
        if request.value == "auto":
            return request.leave(now, "'medium' rounds float32 products to bf16: on request")
        return request.obey("medium", "oneDNN multiplies float32 in bf16")

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        lower = "ieee" if decision.value == "highest" else "tf32"
        values = {
            "float32_matmul_precision": decision.value,
            "cuda.matmul.fp32_precision": lower,
            "mkldnn.matmul.fp32_precision": "bf16" if decision.value == "medium" else lower,
        }
        on = decision.value != "highest"
        if now.get("cudnn.allow_tf32") is not on:
            inner = "tf32" if on else now.get("cuda.fp32_precision", "none")
            values |= {f"cuda.{operation}.fp32_precision": inner for operation in ("conv", "rnn")}
            values["cudnn.allow_tf32"] = on
        return values

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Set the precision of matrix products in the block, and cuDNN's TF32 accordingly."""

        def change() -> None:
            torch.set_float32_matmul_precision(decision.value)
            # Write the flag only to change it: no setter can restore the state of a fresh process.
            lowers = decision.value != "highest"
            if fp32_precision.read()[CUDNN_TF32] is not lowers:
                torch.backends.cudnn.allow_tf32 = lowers

        with overridden(target, NAMES, change):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return the code, even for full float32: cuDNN and a compiling Trainer default to TF32."""
        now = self.as_is(facts)
        full = (decision.value if decision.active else now) == "highest"
        if form == "transformers" and facts.device_type == "cuda" and (full or decision.active):
            return Snippet(arguments={"tf32": str(not full)})
        if not decision.active:
            return Snippet()
        lines = [f'torch.set_float32_matmul_precision("{decision.value}")']
        if full:
            lines.append("torch.backends.cudnn.allow_tf32 = False")
        return Snippet(setup=tuple(lines))

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        gpu = hardware.accelerator(facts.device)
        if gpu is not None:
            return ("high",) if gpu.tf32 else ()
        is_able = facts.device_type == "cpu" and hardware.cpu.bf16 and not facts.convolves
        return ("medium",) if is_able else ()


def _described(gpu: Accelerator | None, facts: Facts) -> str:
    if gpu is None:
        return f"{facts.device_type}, which this machine does not have"
    old = f" (compute capability {dotted(gpu.capability or ())} < 8.0)"
    return gpu.name + (old if gpu.is_nvidia and not gpu.tf32 else "")
