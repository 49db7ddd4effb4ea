"""Modules made others that are faster: GroupNorm for InstanceNorm, tanh in GELU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import Fields, Flag
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, source
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.layers import GROUPS, rewritable
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.swapped import SWAPPED, Slot, Slots, StandIn

# What the modules become, in words and as code.
CHANGES = {"instance_norm": f"InstanceNorm2d -> GroupNorm({GROUPS})", "gelu": "GELU -> tanh"}
LINES = {
    "instance_norm": f"new = torch.nn.GroupNorm({GROUPS}, old.num_features, eps=old.eps)\n"
    "    new.weight, new.bias = old.weight, old.bias",
    "gelu": 'new = torch.nn.GELU(approximate="tanh")',
}
CODE = """\
for name in {names}:
    old = model.get_submodule(name)
    {line}
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)"""


class Rewrites(Optimization):
    """Both kinds make another model, which the loss curve has to decide about."""

    name = "rewrites"
    variable = None
    effect = Effect.CHANGES_MODEL
    summary = "GroupNorm for InstanceNorm2d, tanh in GELU"
    helps = "image models with InstanceNorm2d; the tanh in GELU gains little, so measure each"
    risk = "another model"
    undone = "the model's own modules are back, with the parameters as they were trained"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.nn.GroupNorm.html"

    class Options(Fields):
        enabled: Switch = "auto"
        instance_norm: Flag = True
        gelu: Flag = True

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        details = request.value.model_dump(exclude={"enabled"})
        counts, why = Counter(kind for kind, _ in facts.rewritable if details[kind]), ""
        if facts.compiled == "script":
            why = "the modules of TorchScript are compiled as they are"
        elif not counts:
            kinds = ", ".join(kind for kind, is_on in details.items() if is_on)
            why = f"the model has nothing for {kinds or 'no kind'}"
        counted = ", ".join(f"{count} {CHANGES[kind]}" for kind, count in counts.items())
        offer = f"{counted}: it is there on request only"
        return request.on_request(why, offer, counted, details=details)

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        switches = planned.details if planned else {}
        able = Counter(kind for kind, *_ in rewritable(target.model))
        done = Counter(one.word for one in SWAPPED.in_model(target.model))
        return {
            f"model.{kind}": f"{done[kind] + able[kind] * bool(switches.get(kind))} of "
            f"{done[kind] + able[kind]} {change}"
            for kind, change in CHANGES.items()
            if done[kind] + able[kind]
        }

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        """Return what stands in for modules; the notes say for which."""
        found: dict[torch.nn.Module, dict[Slot, StandIn]] = {}
        chosen = [one for one in rewritable(target.model) if decision.details.get(one[0])]
        for kind, _, parent, name in chosen:
            new = StandIn(_made(kind, parent._modules[name]), kind)
            found.setdefault(parent, {})["_modules", name] = new
        changed = (f"{path}: {CHANGES[kind]}" for kind, path, *_ in chosen)
        target.notes[self.name] = "; ".join(changed)
        return found

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        lines: list[str] = []
        for kind, line in LINES.items():
            paths = [path for each, path in facts.rewritable if each == kind]
            if paths and decision.details.get(kind):
                names = f"({' '.join(f'{source(path)},' for path in paths)})"
                lines += CODE.format(names=names, line=line).splitlines()
        return Snippet(model=tuple(lines))


def _made(kind: str, old: Any) -> torch.nn.Module:
    """Return what stands in for the module, with the same parameters."""
    if kind == "gelu":
        return nn.GELU(approximate="tanh").train(old.training)
    norm = nn.GroupNorm(GROUPS, old.num_features, old.eps, device="meta").train(old.training)
    norm.weight, norm.bias = old.weight, old.bias
    return norm
