"""The switch `malloc`: glibc keeps freed memory in the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import LARGE_BYTES, Facts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue import heap

HEAP = "malloc.keep"
# A step that requests this much memory from the system spends tens of milliseconds on page faults.
# If a step requests less, a search loses more time by toggling the flag than the flag can save.
MUCH_BYTES = 4 * LARGE_BYTES
FRESH = "each step gets about {} MiB from the system, which clears it page by page"


class Malloc(Optimization):
    """Keep the memory of freed large tensors, so that the system needn't clear it in each step."""

    name, flag = "malloc", HEAP
    effect = Effect.EXACT
    summary = "freed memory stays with the process (glibc, CPUs)"
    helps = "CPUs, gradients or activations of 32 MiB and more: no page faults in each step"
    risk = "free memory stays taken until restore: a third more, up to three times with new shapes"
    page = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"
    Options = Literal["auto", True, False]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        obstacle = ""
        if facts.device_type != "cpu":
            obstacle = f"the model is on {facts.device}: malloc is for CPUs"
        elif hardware.system != "Linux" or (facts.flags and HEAP not in facts.flags):
            obstacle = "malloc needs Linux and glibc with its default settings"
        rule = FRESH.format(facts.fresh_bytes >> 20) if facts.fresh_bytes >= MUCH_BYTES else ""
        if request.word == "auto" and not obstacle and rule:
            return request.offer(False, True, rule)
        otherwise = "pays off if a step requests much memory: on request, or after measuring"
        return request.on_request(obstacle, otherwise, rule)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Keep freed memory in the block; then return it to the system, except in a benchmark."""
        try:
            with super().applied(decision, target):
                yield
        finally:
            if target.search:
                heap.give_back()

    def process_flags(self) -> Mapping[str, flags.Flag]:
        flag = flags.Flag(heap.is_kept, heap.keep, (True,))
        return {} if heap.library() is None else {HEAP: flag}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        setup = (
            "glibc = ctypes.CDLL(None)  # freed memory stays with the process",
            f"glibc.mallopt({heap.M_TRIM_THRESHOLD}, {heap.NEVER_TRIMMED})",
            f"glibc.mallopt({heap.M_MMAP_MAX}, 0)",
        )
        return Snippet(imports=("import ctypes",), setup=setup)

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        is_cpu = facts.device_type == "cpu" and hardware.system == "Linux"
        return (True,) if is_cpu and facts.fresh_bytes >= MUCH_BYTES else ()
