"""How memory is got and kept: torch's allocator on CUDA, glibc's malloc on a Linux CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines import flags, malloc, segments
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target, overridden
from speedkit_jupyter.optimizations.facts.model import Facts

EXPANDABLE, THRESHOLDS = "expandable_segments", "thresholds"
FOR_GOOD = (
    "glibc adjusts its thresholds no more in this process; restore puts back the most that it "
    "would raise them to, so that a benchmark here shows less gain than there is"
)


class Allocator(Optimization):
    """A CPU step asks malloc for every activation, and glibc gives large ones back each time.

    `thresholds` has it keep them (1.07x to 1.32x in processor time on three small models, each in a
    process of its own). `expandable_segments` lets CUDA memory grow where shapes change,
    which leaves fewer gaps that nothing fits into.
    """

    name = "allocator"
    effect = Effect.EXACT
    summary = "how memory is got from the system, and kept"
    helps = "CUDA memory in pieces, where shapes change; on Linux CPUs steps with large activations"
    risk = (
        "thresholds: up to 1 GiB that is free stays with the process, and glibc adjusts them no "
        "more; expandable segments can't be shared between processes everywhere"
    )
    undone = (
        "torch's setting is what it was, for the next segments; glibc's thresholds, which can't be "
        "read, become the most that glibc raises them to by itself (32 and 64 MiB)"
    )
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage"
    Options = Annotated[
        Literal["auto", "expandable_segments", "thresholds"],
        Field(description="auto, expandable_segments (CUDA), thresholds (of glibc, on CPUs)"),
    ]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only: the one can't be put back exactly, the other is about memory."""
        if request.value == "auto":
            return request.leave("auto", "torch's and the system's own; it is there on request")
        if facts.device_type == "cuda":
            return self._on_cuda(request, hardware, facts)
        if facts.device_type != "cpu":
            return request.decline("auto", f"{request.value} is not about {facts.device_type}")
        if request.value == EXPANDABLE:
            return request.decline("auto", f"the model is on {facts.device}: this is about CUDA")
        if hardware.system != "Linux":
            return request.decline("auto", f"glibc's malloc is not that of {hardware.system}")
        if facts.flags.get(malloc.NAME) == malloc.ENVIRONMENT:
            return request.decline("auto", "the environment has set glibc's thresholds already")
        return request.obey(THRESHOLDS, hint=FOR_GOOD)

    def _on_cuda(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.is_nvidia or hardware.system != "Linux":
            where = f"{facts.device if gpu is None else gpu.name} on {hardware.system}"
            return request.decline("auto", f"segments grow on NVIDIA's GPUs on Linux, not {where}")
        if facts.flags and segments.NAME not in facts.flags:
            return request.decline("auto", f"torch {hardware.torch} can't say what its setting is")
        if request.value == THRESHOLDS:
            about = f"glibc's thresholds are about CPUs; on {facts.device} segments can grow"
            return request.apply(EXPANDABLE, about, declined=True)
        return request.obey(EXPANDABLE, hint="for the segments that come from now on")

    def changes(self) -> dict[str, Any]:
        """Its bare word is the CPU's, which on CUDA becomes that of CUDA."""
        return {self.name: THRESHOLDS} | super().changes()

    def switches(self) -> Mapping[str, flags.Switch]:
        """Both; that of CUDA where torch can be asked."""
        import torch

        glibc = flags.Switch(malloc.thresholds, malloc.use, (malloc.RAISED,))
        if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # before torch 2.10
            return {malloc.NAME: glibc}
        cuda = flags.Switch(segments.are_expandable, segments.use, (True,))
        return {segments.NAME: cuda, malloc.NAME: glibc}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """The switch that it is about."""
        name, value, _ = _change(decision.value)
        return {name: value}

    def as_is(self, facts: Facts) -> Any:
        """Whatever is in force."""
        return "auto"

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Set it for the process. Raises SpeedKitError where malloc is not glibc's."""
        name, _, change = _change(decision.value)
        with overridden(target, (name,), change):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """The same lines everywhere."""
        if decision.value == EXPANDABLE:
            line = f'torch._C._accelerator_setAllocatorSettings("{segments.KEY}:True")'
            return Snippet(setup=(line,))
        block, trim = malloc.LARGE
        return Snippet(
            imports=("import ctypes",),
            setup=(
                "malloc = ctypes.CDLL(None).mallopt",
                f"malloc({malloc.M_MMAP_THRESHOLD}, {block >> 20} << 20)  # M_MMAP_THRESHOLD",
                f"malloc({malloc.M_TRIM_THRESHOLD}, {trim >> 20} << 20)  # M_TRIM_THRESHOLD",
            ),
        )


def _change(word: str) -> tuple[str, Any, Any]:
    """The switch, its value, and what sets it."""
    if word == EXPANDABLE:
        return segments.NAME, True, partial(segments.use, True)
    return malloc.NAME, malloc.RAISED, partial(malloc.use, malloc.RAISED)
