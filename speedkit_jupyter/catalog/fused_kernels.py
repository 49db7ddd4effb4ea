"""Liger's kernels for the layers of language models, in one model while its plan is in force.

Liger patches the instance for good, and classes of transformers too. Here its patch is taken back
at once, and the plan puts the changes of the instance's modules into force.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization, imported, lacks, no_triton
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.overrides import SWAPPED, Slot, Slots, StandIn
from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.wrappers import unwrapped

LIBRARY = "liger-kernel"
SINCE = (0, 8)  # the first version that was tested
# Types of transformers' models whose patches were compared with the plain models.
TYPES = (
    *("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3"),
    *("qwen2", "qwen3", "smollm3"),
)
# Liger's words for the kernels in use: RMSNorm, and MLPs with a gate.
TAKEN = ("rms_norm", "swiglu", "geglu")
LEFT = ("rope", "cross_entropy", "fused_linear_cross_entropy")


class FusedKernels(Optimization):
    """RMSNorm is one kernel instead of six; a gated MLP fuses activation and product."""

    name = "fused_kernels"
    variable = None
    effect = Effect.ROUNDING
    library = LIBRARY
    excludes = frozenset({"compile"})  # which fuses by itself
    summary = "RMSNorm and gated MLPs by Liger's Triton kernels"
    helps = "training language models on GPUs without torch.compile, in time and in memory"
    risk = "sums in another order; no second derivatives, no second backward pass through a graph"
    undone = "the modules compute as before, and nothing stays on them or on their classes"
    page = "https://linkedin.github.io/Liger-Kernel/"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Offer it on NVIDIA's GPUs, where Triton runs and Liger knows the model."""
        why = _obstacle(hardware, facts)
        rule = f"a {facts.model_type} model, which Liger has kernels for"
        if request.word == "auto" and self.candidates(hardware, facts):
            return request.offer(False, True, rule)
        return request.on_request(why, f"{rule}: on request", rule)

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        current = [SWAPPED.current(module).values() for module in target.model.modules()]
        number = sum(any(one.word == "liger" for one in each) for each in current)
        return {"model.fused_kernels": f"{number} modules by Liger"} if number else {}

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        """Return the changes of modules by Liger's patch. Raises SpeedKitError without Liger."""
        return patched_by_liger(unwrapped(target.model)) if decision.value else {}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form == "transformers":
            pairs = [f'"{name}": {name in TAKEN}' for name in (*TAKEN, *LEFT)]
            arguments = {"use_liger_kernel": "True"}
            arguments["liger_kernel_config"] = f"{{{', '.join(pairs)}}}"
            return Snippet(arguments=arguments)
        patch = "_apply_liger_kernel_to_instance"
        switches = (f"    {name}={name in TAKEN}," for name in (*TAKEN, *LEFT))
        lines = (f"{patch}(", "    model=model,", *switches, ")")
        return Snippet(imports=(f"from liger_kernel.transformers import {patch}",), model=lines)

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        gpu = hardware.accelerator(facts.device)
        is_able = gpu is not None and gpu.is_nvidia and not _obstacle(hardware, facts)
        return (True,) * is_able


def patched_by_liger(model: Any) -> dict[torch.nn.Module, dict[Slot, StandIn]]:
    """Return the changes of modules by Liger's patch of this instance, and take them back."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", "") not in TYPES:
        return {}
    patches = imported("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    patch = patches[config.model_type]
    named = {n for n, p in inspect.signature(patch).parameters.items() if type(p.default) is bool}
    namespaces = [vars(sys.modules[kind.__module__]) for kind in type(model).__mro__[:-2]]
    modules = list(model.modules())
    before: list[tuple[Any, Any]] = [
        (holder, dict(holder)) for holder in (*namespaces, *map(vars, modules))
    ]
    try:
        patch(**{name: name in TAKEN for name in named}, model=model)
        after = [dict(vars(module)) for module in modules]
    finally:
        for holder, entries in before:
            for name in holder.keys() - entries.keys():
                del holder[name]
            holder.update(entries)
    found: dict[torch.nn.Module, dict[Slot, StandIn]] = {}
    for module, (_, own), now in zip(modules, before[len(namespaces) :], after, strict=True):
        new = {name: v for name, v in now.items() if name not in own or own[name] is not v}
        put = {("", n): StandIn(getattr(v, "__func__", v), "liger") for n, v in new.items()}
        found |= {module: put} if put else {}
    return found


def _obstacle(hardware: Hardware, facts: Facts) -> str:
    """Return the reason why Liger's kernels can't run here; empty if they can."""
    kind = devices.kind_of(facts.device)
    if facts.model_type not in TYPES:
        return f"Liger patches models of transformers: {', '.join(TYPES)}"
    if facts.compiled != "no":
        return "compiled code fuses such operations itself"
    if kind is None or not kind.has_triton:
        return f"its kernels are written in Triton, for GPUs; this is {facts.device}"
    return no_triton(hardware, facts) or lacks(hardware, LIBRARY, SINCE)
