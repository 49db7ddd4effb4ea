"""glibc's heap on CPUs: freed memory stays with the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.snippet import Form, Snippet
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import LARGE_BYTES, Facts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue import heap

NAME = "malloc.keep"
# A step that gets this much anew from the system spends tens of milliseconds on it. A few times
# less costs little, and a search loses more by toggling than it may win.
MUCH_BYTES = 4 * LARGE_BYTES
FRESH = "each step gets about {} MiB anew from the system, which clears it page by page"


class Malloc(Optimization):
    """Large tensors are handed back to the system when they are freed, and cleared when they come
    again, in every step. Kept memory is only used again.
    """

    name, flag = "malloc", NAME
    effect = Effect.EXACT
    summary = "freed memory stays with the process (glibc, CPUs)"
    helps = "CPUs, gradients or activations of 32 MiB and more: no page faults in each step"
    risk = "free memory stays taken until restore: a third more, with ever new shapes three times"
    undone = "glibc does as before, and what is free goes back to the system"
    page = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
    Options = Literal["auto", True, False]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        obstacle = ""
        if facts.device_type != "cpu":
            obstacle = f"the model is on {facts.device}: this is about CPUs"
        elif hardware.system != "Linux" or (facts.flags and NAME not in facts.flags):
            obstacle = "this is about glibc with its own defaults, on Linux"
        rule = FRESH.format(facts.fresh_bytes >> 20) if self._is_much(facts) else ""
        if request.word == "auto" and not obstacle and rule:
            return request.offer(False, True, rule)
        otherwise = "worth it where a step gets much memory anew: on request, or by measuring"
        return request.on_request(obstacle, otherwise, rule)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Keep what is freed; at the end hand it back, unless a benchmark goes on with it."""
        try:
            with super().applied(decision, target):
                yield
        finally:
            if target.search:
                heap.give_back()

    def switches(self) -> Mapping[str, flags.Switch]:
        if heap.library() is None:
            return {}
        return {NAME: flags.Switch(heap.is_kept, heap.keep, (True,))}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        setting = f"glibc.mallopt({heap.M_TRIM_THRESHOLD}, {heap.NEVER_TRIMMED})"
        return Snippet(
            imports=("import ctypes",),
            setup=(
                "glibc = ctypes.CDLL(None)  # freed memory stays with the process",
                f"{setting}; glibc.mallopt({heap.M_MMAP_MAX}, 0)",
            ),
        )

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        is_cpu = facts.device_type == "cpu" and hardware.system == "Linux"
        return (True,) if is_cpu and self._is_much(facts) else ()

    def _is_much(self, facts: Facts) -> bool:
        return facts.fresh_bytes >= MUCH_BYTES
