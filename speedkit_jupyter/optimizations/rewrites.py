"""Modules made others that are faster: GroupNorm for InstanceNorm, tanh in GELU, in place."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, source
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.facts.rewritable import GROUPS, Kind, Rewritable, rewritable
from speedkit_jupyter.optimizations.properties.swapped import SWAPPED, Slot, StandIn

if TYPE_CHECKING:
    import torch

WORDS: Mapping[Kind, str] = {
    "instance_norm": "as GroupNorm",
    "gelu": "by tanh",
    "inplace": "in place",
}
# What the modules become as code, by their names in the model.
LINES: Mapping[Kind, str] = {
    "instance_norm": f"new = torch.nn.GroupNorm({GROUPS}, old.num_features, eps=old.eps)\n"
    "    new.weight, new.bias = old.weight, old.bias",
    "gelu": 'new = torch.nn.GELU(approximate="tanh")',
    "inplace": "old.inplace = True  # where no hook or loop reads what the layer before gives",
}
SET = """\
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)"""


class Rewrites(Optimization):
    """Three kinds, each with a switch of its own.

    `instance_norm`: an InstanceNorm2d with weights becomes a GroupNorm of 8 groups. `gelu`: the
    tanh approximation. Both make another model, which the loss curve has to decide about.
    `inplace`: activations in an nn.Sequential write over what the layer before them gives: the same
    numbers in less memory.
    """

    name = "rewrites"
    variable = None
    effect = Effect.CHANGES_MODEL
    summary = "GroupNorm for InstanceNorm2d, tanh in GELU, activations in place"
    helps = "image models with InstanceNorm2d; the other kinds gain little, so measure each"
    risk = (
        "another model; `inplace` alone computes the same, unless a loop over the layers keeps "
        "what is written over"
    )
    undone = "the model's own modules are back, with the parameters as they were trained"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.nn.GroupNorm.html"

    class Options(Fields):
        """Whether, and which kinds; all of them without a word about it."""

        enabled: Switch = Field("auto", description="auto, true, false")
        instance_norm: bool = Field(True, strict=True, description="true, false")
        gelu: bool = Field(True, strict=True, description="true, false")
        inplace: bool = Field(True, strict=True, description="true, false")

    default = Options()

    def changes(self) -> dict[str, Any]:
        """Return all kinds, and each by itself."""
        return {self.name: True} | {
            f"{self.name}:{kind}": {"enabled": True, **{other: other == kind for other in WORDS}}
            for kind in WORDS
        }

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide for it by request only."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, asked=True)
        if facts.compiled == "script":
            return request.decline(False, "the modules of TorchScript are compiled as they are")
        details = options.model_dump(exclude={"enabled"})
        counts = Counter(place.change for place in facts.rewritable if details[place.kind])
        if not counts:
            kinds = ", ".join(kind for kind, is_on in details.items() if is_on)
            return request.decline(False, f"the model has nothing for {kinds or 'no kind'}")
        counted = ", ".join(f"{count} {change}" for change, count in counts.items())
        if options.enabled == "auto":
            return request.leave(False, f"{counted}: it is there on request only")
        return request.obey(True, counted, details=details)

    def effect_of(self, decision: Decision, facts: Facts) -> Effect:
        """Return EXACT where all is in place, which computes the same."""
        kinds = {place.kind for place in facts.rewritable if decision.details.get(place.kind)}
        return Effect.CHANGES_MODEL if kinds - {"inplace"} else Effect.EXACT

    def observe(self, target: Target) -> Mapping[str, Any]:
        """Return how many modules of each kind are others by now, where there are any."""
        return self._state(target, {})

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Count those that are others already, and all of the chosen kinds."""
        return self._state(target, decision.details)

    def _state(self, target: Target, switches: Mapping[str, Any]) -> dict[str, str]:
        able = Counter(place.kind for place, *_ in rewritable(target.model))
        standing = [SWAPPED.standing(module).values() for module in target.model.modules()]
        done = Counter(one.word for each in standing for one in each)
        return {
            f"model.{kind}": f"{done[kind] + able[kind] * bool(switches.get(kind))} of "
            f"{done[kind] + able[kind]} {words}"
            for kind, words in WORDS.items()
            if done[kind] + able[kind]
        }

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Put each module in the place of another."""
        overrides = _overrides(decision, target)
        with SWAPPED.overriding(overrides.items()):
            overrides.clear()  # which hold the model
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return lines for each module by its path, before the optimizer is made."""
        lines: list[str] = []
        for kind, line in LINES.items():
            places = [place for place in facts.rewritable if place.kind == kind]
            if places and decision.details.get(kind):
                lines += _loop(places, line if kind == "inplace" else f"{line}\n{SET}")
        return Snippet(model=tuple(lines))


def _overrides(decision: Decision, target: Target) -> dict[torch.nn.Module, dict[Slot, StandIn]]:
    """Return what stands in, by the modules that hold it; the notes say which."""
    overrides: dict[torch.nn.Module, dict[Slot, StandIn]] = {}
    chosen = [one for one in rewritable(target.model) if decision.details.get(one[0].kind)]
    for place, parent, name in chosen:
        new = StandIn(_made(place.kind, parent._modules[name]), place.kind)
        overrides.setdefault(parent, {})["_modules", name] = new
    target.notes["rewrites"] = "; ".join(f"{place.path}: {place.change}" for place, *_ in chosen)
    return overrides


def _loop(places: Sequence[Rewritable], line: str) -> list[str]:
    names = [f"    {source(place.path)}," for place in places]
    body = f"    old = model.get_submodule(name)\n    {line}".splitlines()
    return ["for name in (", *names, "):", *body]


def _made(kind: Kind, old: Any) -> torch.nn.Module:
    """Return what stands in for the module, with the same parameters."""
    from torch import nn

    if kind == "inplace":
        new = copy.copy(old)
        new.inplace = True
        return new  # type: ignore[no-any-return]
    if kind == "gelu":
        return nn.GELU(approximate="tanh").train(old.training)
    norm = nn.GroupNorm(GROUPS, old.num_features, old.eps, device="meta").train(old.training)
    norm.weight, norm.bias = old.weight, old.bias
    return norm
