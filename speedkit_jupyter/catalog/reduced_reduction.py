"""fp16 products summed in fp16 inside cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Accelerator, Hardware

SWITCH = "cuda.matmul.allow_fp16_accumulation"
WORD = "fp16_accumulation"
REDUCTIONS = tuple(f"allow_{one}_reduced_precision_reduction" for one in ("fp16", "bf16"))


class ReducedReduction(Optimization):
    """Public reports on GeForce RTX 30 and 40 measured 1.25x on whole steps."""

    name = "reduced_reduction"
    none = "auto"
    bare = WORD
    effect = Effect.ROUNDING
    summary = "half-precision products are summed in fp16"
    helps = "fp16 on GeForce RTX, which adds up in fp16 twice as fast"
    risk = "sums in fp16 lose digits, and above 65504 they are infinite"
    undone = "the switch is as before"
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    line = f"torch.backends.{SWITCH} = True"
    Options = Literal["auto", "fp16_accumulation"]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.is_nvidia:
            where = f"a switch of cuBLAS, and the model is on {facts.device}"
            return request.decline("auto", where)
        if request.value != "auto":
            return request.obey(request.value)
        if _gains(gpu) and _is_fp16(facts):
            return request.offer("auto", WORD, f"{gpu.name} adds up in fp16 twice as fast")
        return request.leave("auto", "as torch has it")

    def switches(self) -> Mapping[str, flags.Switch]:
        """Return the switch, and the other switches of cuBLAS, which a measurement puts back."""
        matmul, table = torch.backends.cuda.matmul, {}
        for name in REDUCTIONS:
            read, write = partial(_reduction, matmul, name), partial(setattr, matmul, name)
            values = ((False, False), (False, True)) if isinstance(read(), tuple) else (False,)
            table[f"cuda.matmul.{name}"] = flags.Switch(read, write, values)
        return table | {SWITCH: flags.attribute(matmul, "allow_fp16_accumulation", True)}

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        return {SWITCH: True}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        gpu = hardware.accelerator(facts.device)
        gains = gpu is not None and _gains(gpu) and (_is_fp16(facts) or not gpu.bf16)
        return (WORD,) * gains


def _gains(gpu: Accelerator) -> bool:
    """Return whether Tensor Cores add up in fp16 twice as fast: Turing's, Ampere's, Ada's."""
    return gpu.is_nvidia and "GeForce RTX" in gpu.name


def _is_fp16(facts: Facts) -> bool:
    return facts.precision == "fp16" or "float16" in facts.dtypes


def _reduction(matmul: Any, name: str) -> Any:
    """Return the setting; since torch 2.11 a pair, with the permission to split a sum."""
    may_split = getattr(matmul, f"{name}_split_k", None)
    return getattr(matmul, name) if may_split is None else (getattr(matmul, name), may_split)
