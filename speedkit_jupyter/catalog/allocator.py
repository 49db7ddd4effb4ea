"""CUDA memory in segments that grow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue import private as torch_private

EXPANDABLE = "expandable_segments"
NAME = "cuda.expandable_segments"
_OPTION = re.compile(rf"(^|,)\s*{EXPANDABLE}\s*:\s*(\w+)\s*")


class Allocator(Optimization):
    """Reduces fragmentation where shapes change."""

    name = "allocator"
    none = "auto"
    bare = EXPANDABLE
    effect = Effect.EXACT
    summary = "CUDA memory in segments that grow"
    helps = "models on CUDA whose shapes change from batch to batch"
    risk = "such memory can't be shared between processes everywhere"
    undone = "torch's setting is restored for later segments"
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage"
    line = f'{torch_private.ALLOCATOR_SETTER}("{EXPANDABLE}:True")'
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
            return request.decline("auto", f"torch {hardware.torch} can't tell its setting")
        return request.obey(EXPANDABLE, hint="for the segments that come from now on")

    def switches(self) -> Mapping[str, flags.Switch]:
        if not torch_private.has_allocator_settings():
            return {}
        return {NAME: flags.Switch(are_expandable, use, (True,))}

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        return {NAME: True}


def are_expandable() -> bool:
    """Return whether later segments grow. Raises AttributeError if torch can't say."""
    settings = _OPTION.findall(torch_private.allocator_settings())
    return bool(settings) and settings[-1][1] == "True"


def use(on: bool) -> None:
    """Let later segments grow, or not; keep the allocator's other settings."""
    if on == are_expandable():
        return
    others = _OPTION.sub("", torch_private.allocator_settings()).lstrip(",")
    torch_private.set_allocator_settings(",".join(filter(None, (others, f"{EXPANDABLE}:{on}"))))
    if not on:  # the default, which the settings need not name
        torch_private.set_allocator_settings(others)
