"""Modules made others that are faster: GroupNorm for InstanceNorm, tanh in GELU, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.by_kind import ByKind, chosen
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, source
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.rewriting import in_place
from speedkit_jupyter.optimizations.rewriting.others import (
    APPROXIMATION,
    CLASS,
    GROUPS,
    Other,
    by_tanh,
    group_norm,
    is_rewritten,
)
from speedkit_jupyter.optimizations.rewriting.rewritable import Rewritable, rewritable

WORDS = {"instance_norm": "as GroupNorm", "gelu": "by tanh", "inplace": "in place"}
NOTHING = (
    "the model has no exact GELU module, no InstanceNorm2d with weights and a multiple of 8 "
    "channels, and no activation behind a layer in an nn.Sequential"
)
# Of the operation alone, torch 2.13 on a CPU with AVX-512: 2 to 4 times as long.
TANH_ON_CPUS = "on CPUs torch's exact GELU has been the faster one"
HOOKS = "# as long as nothing else reads what is written over: no hooks, no loop over the layers"


class Rewrites(ByKind):
    """Three kinds, each with a switch of its own.

    `instance_norm`: an InstanceNorm2d with weights becomes a GroupNorm of 8 groups, another norm
    that is one kernel. `gelu`: the tanh approximation. Both make another model, which the loss
    curve has to decide about. `inplace`: activations write over what the layer before them has
    made, in an nn.Sequential and where no hook sees it: the same numbers in less memory.
    """

    name = "rewrites"
    kinds = WORDS
    nothing = NOTHING
    effect = Effect.CHANGES_MODEL
    summary = "GroupNorm for InstanceNorm2d, tanh in GELU, activations in place"
    helps = "image models with InstanceNorm2d; the other kinds gain little, so measure each"
    risk = (
        "another model: weights that were trained with one norm fit the other badly; "
        "`inplace` alone computes the same"
    )
    undone = "every module is in its own class, with the setting that it had"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.nn.GroupNorm.html"

    class Options(Fields):
        """Whether, and which kinds; all of them without a word about it."""

        enabled: Switch = Field("auto", description="auto, true, false")
        instance_norm: bool = Field(True, strict=True, description="true, false")
        gelu: bool = Field(True, strict=True, description="true, false")
        inplace: bool = Field(True, strict=True, description="true, false")

    default = Options()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, asked=True)
        if facts.compiled == "script":
            return request.decline(False, "the modules of TorchScript are compiled as they are")
        details = options.model_dump(exclude={"enabled"})
        places = chosen(facts.rewritable, details)
        if why := self.missing(places, details):
            return request.decline(False, why)
        if any(place.kind == "inplace" for place in places):
            in_place.internals()
        if options.enabled == "auto":
            return request.leave(False, f"{_counted(places)}: it is there on request only")
        on_cpu = facts.device_type == "cpu" and any(place.kind == "gelu" for place in places)
        hint = TANH_ON_CPUS if on_cpu else ""
        return request.obey(True, _counted(places), details=details, hint=hint)

    def effect_of(self, decision: Decision, facts: Facts) -> Effect:
        """What is in place computes the same."""
        kinds = {place.kind for place in chosen(facts.rewritable, decision.details)}
        return Effect.CHANGES_MODEL if kinds - {"inplace"} else Effect.EXACT

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many modules of each kind are others by now, where there are any."""
        return self._state(target, {})

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Those that are others already, and all of the chosen kinds."""
        return self._state(target, decision.details)

    def _state(self, target: Target, switches: Mapping[str, Any]) -> dict[str, str]:
        return self.as_state(_modules(target), switches, is_rewritten)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Each module in its own place."""
        modules = [pair for pair in _modules(target) if decision.details.get(pair[0].kind)]
        gelus = [(module, by_tanh(module)) for place, module in modules if place.kind == "gelu"]
        others = [
            (module, group_norm(module))
            for place, module in modules
            if place.kind == "instance_norm"
        ]
        blocks = {id(module): module for place, module in modules if place.kind == "inplace"}
        others += [(module, Other(in_place.sequential(), {})) for module in blocks.values()]
        target.notes[self.name] = "; ".join(
            f"{place.path or 'the model'}: {place.change}" for place, _ in modules
        )
        with ExitStack() as stack:
            stack.enter_context(APPROXIMATION.wished(gelus))
            stack.enter_context(CLASS.wished(others))
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Each module by its path, before the optimizer is made."""
        places = chosen(facts.rewritable, decision.details)
        lines = _norms([place.path for place in places if place.kind == "instance_norm"])
        gelus = [place for place in places if place.kind == "gelu"]
        lines += _loop(
            [place.path for place in gelus if place.holder == "approximate"],
            'model.get_submodule(name).approximate = "tanh"',
        )
        functions = [place.path for place in gelus if place.holder == "act"]
        tanh = 'functools.partial(torch.nn.functional.gelu, approximate="tanh")'
        lines += _loop(functions, "gelu = model.get_submodule(name)", f"gelu.act = {tanh}")
        written = [place.path for place in places if place.kind == "inplace"]
        lines += [HOOKS] * bool(written)
        lines += _loop(written, "model.get_submodule(name).inplace = True")
        return Snippet(imports=("import functools",) if functions else (), model=tuple(lines))


def _modules(target: Target) -> list[tuple[Rewritable, Any]]:
    """What can be rewritten; a shared module at the first of its places."""
    places: dict[tuple[int, str], tuple[Rewritable, Any]] = {}
    for place, module in rewritable(target.model):
        which = place.path.rpartition(".")[2] if place.kind == "inplace" else ""
        places.setdefault((id(module), which), (place, module))
    return list(places.values())


def _counted(places: Sequence[Rewritable]) -> str:
    counts = Counter(place.change for place in places)
    return ", ".join(f"{count} {change}" for change, count in counts.items())


def _loop(paths: Sequence[str], *lines: str) -> list[str]:
    """The lines for each of these modules."""
    names = [f"    {source(path)}," for path in paths]
    return ["for name in (", *names, "):", *(f"    {line}" for line in lines)] if paths else []


def _norms(paths: Sequence[str]) -> list[str]:
    """Others in their places, of the same parameters."""
    return _loop(
        paths,
        "norm = model.get_submodule(name)",
        f"group = torch.nn.GroupNorm({GROUPS}, norm.num_features, eps=norm.eps)",
        "group.weight, group.bias = norm.weight, norm.bias",
        'parent, _, child = name.rpartition(".")',
        "setattr(model.get_submodule(parent), child, group)",
    )
