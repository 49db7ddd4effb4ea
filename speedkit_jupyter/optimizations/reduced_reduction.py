"""In which precision cuBLAS adds up the products of half-precision matrices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Accelerator, Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.support.torch_private import cublas

ACCUMULATION = "cuda.matmul.allow_fp16_accumulation"
REDUCTIONS = tuple(
    f"cuda.matmul.allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")
)
# Whether partial sums may be in half precision, and whether a sum may be split over blocks.
WORDS = {"fp16_accumulation": (True, True), "full": (False, True), "no_split_k": (False, False)}


class ReducedReduction(Optimization):
    """torch lets cuBLAS add partial sums in half precision, and each sum itself in float32.

    `fp16_accumulation` has fp16 sums in fp16 throughout (1.25x on whole steps where people measured
    it on GeForce RTX 30 and 40); `full` and `no_split_k` are slower and closer.
    """

    name = "reduced_reduction"
    effect = Effect.ROUNDING
    summary = "the precision in which cuBLAS adds up half-precision products"
    helps = "fp16 on GeForce RTX, which adds up in fp16 twice as fast; `full` where digits matter"
    risk = "sums in fp16 lose digits, and above 65504 they are infinite"
    undone = "the three switches are what they were"
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    Options = Annotated[
        Literal["auto", "fp16_accumulation", "full", "no_split_k"],
        Field(description="auto, fp16_accumulation, full, no_split_k"),
    ]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide for it by request; offer it in fp16 on GeForce RTX."""
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.is_nvidia:
            return request.decline(
                "auto", f"a switch of cuBLAS, and the model is on {facts.device}"
            )
        if request.value != "auto":
            return request.obey(request.value)
        if _gains(gpu) and _is_fp16(facts):
            return request.offer(
                "auto", "fp16_accumulation", f"{gpu.name} adds up in fp16 twice as fast"
            )
        return request.leave("auto", "as torch has it")

    def changes(self) -> dict[str, Any]:
        """Let the bare word mean the fastest."""
        return {self.name: "fp16_accumulation"} | super().changes()

    def as_is(self, facts: Facts) -> Any:
        """Return the word for what is in force."""
        return "auto"

    def switches(self) -> Mapping[str, flags.Switch]:
        """Return them, read below torch.backends, whose getters hide the second half."""
        import torch

        matmul, table = torch.backends.cuda.matmul, {}
        for name in REDUCTIONS:
            attribute = name.rpartition(".")[2]
            read = cublas(attribute)
            values = ((False, False), (False, True)) if isinstance(read(), tuple) else (False,)
            table[name] = flags.Switch(read, partial(setattr, matmul, attribute), values)
        return table | {ACCUMULATION: flags.attribute(matmul, "allow_fp16_accumulation", True)}

    def values(self, decision: Decision) -> Mapping[str, Any]:
        """Return what all three become."""
        is_pair = isinstance(self.switches()[REDUCTIONS[0]].read(), tuple)  # since torch 2.11
        reductions = WORDS[decision.value] if is_pair else WORDS[decision.value][0]
        accumulation = decision.value == "fp16_accumulation"
        return dict.fromkeys(REDUCTIONS, reductions) | {ACCUMULATION: accumulation}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return lines for the switches that are not torch's own values."""
        if decision.value == "fp16_accumulation":
            return Snippet(setup=(f"torch.backends.{ACCUMULATION} = True",))
        value = False if decision.value == "full" else WORDS[decision.value]
        return Snippet(setup=tuple(f"torch.backends.{name} = {value}" for name in REDUCTIONS))

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Return sums in fp16, where they are faster and there is fp16."""
        gpu = hardware.accelerator(facts.device)
        pays = gpu is not None and _gains(gpu) and (_is_fp16(facts) or not gpu.bf16)
        return ("fp16_accumulation",) if pays else ()


def _gains(gpu: Accelerator) -> bool:
    """Turing's, Ampere's and Ada's GeForce: their Tensor Cores add up in fp16 twice as fast."""
    return gpu.is_nvidia and "GeForce RTX" in gpu.name


def _is_fp16(facts: Facts) -> bool:
    return facts.precision == "fp16" or "float16" in facts.dtypes
