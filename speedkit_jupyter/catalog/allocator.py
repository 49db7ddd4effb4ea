"""torch's allocator on CUDA: memory in segments that grow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.snippet import Form, Snippet
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue import private as torch_private

EXPANDABLE = "expandable_segments"
NAME = "cuda.expandable_segments"
_OPTION = re.compile(rf"(^|,)\s*{EXPANDABLE}\s*:\s*(\w+)\s*")


class Allocator(Optimization):
    """Lets CUDA memory grow where shapes change, which leaves fewer gaps that nothing fits into."""

    name = "allocator"
    none = "auto"
    bare = EXPANDABLE
    effect = Effect.EXACT
    summary = "CUDA memory in segments that grow"
    helps = "models on CUDA whose shapes change from batch to batch"
    risk = "such memory can't be shared between processes everywhere"
    undone = "torch's setting is what it was, for the segments that come next"
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage"
    Options = Literal["auto", "expandable_segments"]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        if request.value == "auto":
            return request.leave("auto", "torch's own setting; growing segments are on request")
        if facts.device_type != "cuda":
            return request.decline("auto", f"the model is on {facts.device}: this is about CUDA")
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.is_nvidia or hardware.system != "Linux":
            where = f"{facts.device if gpu is None else gpu.name} on {hardware.system}"
            return request.decline("auto", f"segments grow on NVIDIA's GPUs on Linux, not {where}")
        if facts.flags and NAME not in facts.flags:
            return request.decline("auto", f"torch {hardware.torch} can't say what its setting is")
        return request.obey(EXPANDABLE, hint="for the segments that come from now on")

    def switches(self) -> Mapping[str, flags.Switch]:
        if not torch_private.has_allocator_settings():
            return {}
        return {NAME: flags.Switch(are_expandable, use, (True,))}

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        return {NAME: True}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        line = f'{torch_private.ALLOCATOR_SETTER}("{EXPANDABLE}:True")'
        return Snippet(setup=(line,))


def are_expandable() -> bool:
    """Return whether those that come next are. Raises AttributeError where torch can't be asked."""
    settings = _OPTION.findall(torch_private.allocator_settings())
    return bool(settings) and settings[-1][1] == "True"


def use(on: bool) -> None:
    """Set it from the next segment on; the other settings of the allocator stay."""
    if on == are_expandable():
        return
    others = _OPTION.sub("", torch_private.allocator_settings()).lstrip(",")
    torch_private.set_allocator_settings(",".join(filter(None, (others, f"{EXPANDABLE}:{on}"))))
    if not on:  # torch's own, which the settings need not say
        torch_private.set_allocator_settings(others)
