"""In which precision cuBLAS adds up the products of half-precision matrices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Accelerator, Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target, overridden
from speedkit_jupyter.optimizations.facts.model import Facts

ACCUMULATION = "cuda.matmul.allow_fp16_accumulation"
REDUCTIONS = tuple(
    f"cuda.matmul.allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")
)
# What each word writes into the switches of the reductions: what may be added up in half precision,
# and whether a sum may be split over several blocks (since torch 2.11).
WORDS = {
    "fp16_accumulation": (True, True),
    "reduced": (True, True),
    "full": (False, True),
    "no_split_k": (False, False),
}
# Their Tensor Cores add up in fp16 twice as fast as in float32; source: NVIDIA's white papers on
# Turing, Ampere and Ada. Others are as fast in both.
_TWICE_AS_FAST = re.compile(r"GeForce RTX")


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
    page = (
        "https://docs.pytorch.org/docs/stable/notes/cuda.html"
        "#reduced-precision-reduction-in-fp16-gemms"
    )
    Options = Annotated[
        Literal["auto", "fp16_accumulation", "reduced", "full", "no_split_k"],
        Field(description="auto, fp16_accumulation, reduced (torch's own), full, no_split_k"),
    ]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request, and worth measuring in fp16 on GeForce RTX."""
        now, gpu = self.as_is(facts), hardware.accelerator(facts.device)
        if facts.device_type != "cuda":
            return request.decline(now, f"cuBLAS does not run on {facts.device_type}")
        if gpu is None or not gpu.is_nvidia:
            name = facts.device if gpu is None else gpu.name
            return request.decline(now, f"switches of NVIDIA's cuBLAS; this is {name}")
        if request.value == "auto":
            if _gains(gpu) and now == "reduced" and _is_fp16(facts):
                reason = f"{gpu.name} adds up in fp16 twice as fast as in float32"
                return request.offer(now, "fp16_accumulation", reason)
            return request.leave(now, "torch's own" if now == "reduced" else "as you have set it")
        if request.value == now == "reduced":
            return request.leave(now, "torch's own, as it is", asked=True)
        if request.value == "no_split_k" and not isinstance(_first(facts), tuple):
            return request.decline(now, f"torch {hardware.torch} has no switch for split-K")
        if request.value == "fp16_accumulation" and facts.precision == "bf16":
            return request.decline(now, "inside bf16 autocast no product is in fp16")
        halves = facts.precision != "fp32" or not {"float16", "bfloat16"}.isdisjoint(facts.dtypes)
        hint = "" if halves else "for half-precision products of your own: this plan has none"
        return request.obey(request.value, hint=hint)

    def changes(self) -> dict[str, Any]:
        """Its bare word is the fastest."""
        return {self.name: "fp16_accumulation"} | super().changes()

    def switches(self) -> Mapping[str, flags.Switch]:
        """Read below torch.backends, whose getters hide the second half (split-K)."""
        import torch

        matmul, table = torch.backends.cuda.matmul, {}
        for name in REDUCTIONS:
            attribute = name.rpartition(".")[2]
            read = getattr(torch._C, f"_get_cublas_{attribute}")
            values = ((False, False), (False, True)) if isinstance(read(), tuple) else (False,)
            table[name] = flags.Switch(read, partial(setattr, matmul, attribute), values)
        return table | {ACCUMULATION: flags.attribute(matmul, "allow_fp16_accumulation", True)}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """The three switches."""
        return _values(decision.value, has_split_k=isinstance(_first(facts), tuple))

    def as_is(self, facts: Facts) -> Any:
        """The word for what is in force; `auto` where the two types differ, which has no word."""
        if facts.flags.get(ACCUMULATION, False):
            return "fp16_accumulation"
        values = [facts.flags.get(name, (True, True)) for name in REDUCTIONS]
        pairs = {value if isinstance(value, tuple) else (value, True) for value in values}
        words = [*WORDS][1:]  # without fp16_accumulation
        return next((word for word in words if pairs == {WORDS[word]}), "auto")

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Set all three."""
        table = self.switches()
        wanted = _values(decision.value, isinstance(table[REDUCTIONS[0]].read(), tuple))

        def change() -> None:
            for name, value in wanted.items():
                table[name].write(value)

        with overridden(target, tuple(wanted), change):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torch's switches, those that are not its own values."""
        values = _values(decision.value, has_split_k=decision.value == "no_split_k")
        usual = {ACCUMULATION: False, **dict.fromkeys(REDUCTIONS, True)}
        changed = {name: value for name, value in values.items() if usual[name] != value}
        return Snippet(
            setup=tuple(
                f"torch.backends.{name} = {value}" for name, value in (changed or usual).items()
            )
        )

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Sums in fp16, where they are faster and there is fp16."""
        gpu = hardware.accelerator(facts.device)
        pays = gpu is not None and _gains(gpu) and (_is_fp16(facts) or not gpu.bf16)
        return ("fp16_accumulation",) if pays else ()


def _gains(gpu: Accelerator) -> bool:
    return gpu.is_nvidia and bool(_TWICE_AS_FAST.search(gpu.name))


def _is_fp16(facts: Facts) -> bool:
    return facts.precision == "fp16" or "float16" in facts.dtypes


def _first(facts: Facts) -> Any:
    """How torch says it: a pair, or before torch 2.11 only its first half."""
    return facts.flags.get(REDUCTIONS[0], (True, True))


def _values(word: str, has_split_k: bool) -> dict[str, Any]:
    pair = WORDS[word]
    reductions: Any = pair if has_split_k else pair[0]
    return {ACCUMULATION: word == "fp16_accumulation", **dict.fromkeys(REDUCTIONS, reductions)}
