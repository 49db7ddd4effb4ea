"""Liger's kernels for what language models are made of, in one model, and for as long as asked.

Liger itself replaces classes and functions of transformers for the whole process, and attributes of
instances, and none of it comes back. So its patches are not used here, only its functions: a layer
around the calls of each module that it has a kernel for, which goes as all of them do
(`calls.CALLS`): in any order, and without a trace in copies and files. The rotation of queries and
keys is a function that an attention finds by a global name: it runs its own forward, for which
that one name means Liger's (`fused_rotations.with_other`). Which modules there are kernels for is
told by what their forward computes (`fusible`), not by Liger's list of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.by_kind import ByKind, chosen
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.fusible import Fusible, fusible
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.fusing import liger
from speedkit_jupyter.optimizations.fusing.fused_calls import NAME, Fused
from speedkit_jupyter.optimizations.fusing.fused_mlps import FusedMlp
from speedkit_jupyter.optimizations.fusing.fused_norms import FusedNorm
from speedkit_jupyter.optimizations.fusing.fused_rotations import FusedRotation
from speedkit_jupyter.optimizations.fusing.fused_source import fused_source
from speedkit_jupyter.optimizations.properties.calls import CALLS, around

if TYPE_CHECKING:
    import torch

CALLS_OF: Mapping[str, type[Fused]] = {
    calls.kind: calls for calls in (FusedNorm, FusedMlp, FusedRotation)
}
WORDS = {"rms_norm": "RMSNorm", "swiglu": "gated MLP", "rope": "rotation"}
NOTHING = (
    "the model has no RMSNorm, no MLP with a SiLU or tanh-GELU gate, and no rotary attention of "
    "transformers"
)


class FusedKernels(ByKind):
    """Three kinds, each with a switch of its own: `rms_norm`, `swiglu` (MLPs with a gate), `rope`.

    They give what the modules give, within rounding.
    """

    name = NAME
    kinds = dict.fromkeys(CALLS_OF, "by Liger")
    nothing = NOTHING
    effect = Effect.ROUNDING
    library = liger.LIBRARY
    excludes = frozenset({"compile"})  # which passes by them, and fuses what it finds itself
    summary = "RMSNorm, gated MLPs and rotary embeddings by Liger's Triton kernels"
    helps = "training language models on GPUs without torch.compile, in time and in memory"
    risk = "sums in another order; no second derivatives, no second backward pass through a graph"
    undone = "the modules are called as before, and nothing lies on them or on their classes"
    page = "https://linkedin.github.io/Liger-Kernel/"

    class Options(Fields):
        """Whether, and which kinds; all of them without a word about it."""

        enabled: Switch = Field("auto", description="auto, true, false")
        rms_norm: bool = Field(True, strict=True, description="true, false")
        swiglu: bool = Field(True, strict=True, description="true, false")
        rope: bool = Field(True, strict=True, description="true, false")

    default = Options()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Where there are such modules and Triton runs; rules offer it on NVIDIA's GPUs alone."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, asked=True)
        details = options.model_dump(exclude={"enabled"})
        places = chosen(facts.fusible, details)
        if why := self.missing(places, details) or _obstacle(hardware, facts):
            return request.decline(False, why)
        liger.internals()
        if options.enabled == "auto":
            return _offered(request, hardware, facts, _counted(places))
        return request.obey(True, _counted(places), details=details)

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Compiled code would pass by it."""
        return replace(facts, passed_by=self.name) if decision.active else facts

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many modules of each kind run by such a kernel, where there are any."""
        return self._state(target, {})

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """All of the chosen kinds."""
        return self._state(target, _details(decision))

    def _state(self, target: Target, switches: Mapping[str, Any]) -> dict[str, str]:
        return self.as_state(fusible(target.model), switches, partial(around, kind=Fused))

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """A layer around the calls of each module; in a benchmark for its own thread's alone."""
        with CALLS.wished(_layers(decision, target)):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Liger's functions on the modules, or Trainer's own word for it."""
        return fused_source(chosen(facts.fusible, _details(decision)), form)

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """On, where NVIDIA's GPU has something to run."""
        places = chosen(facts.fusible, _details(None))
        able = _is_nvidia(hardware, facts) and not _obstacle(hardware, facts)
        return (True,) if places and able else ()


def _details(decision: Decision | None) -> dict[str, Any]:
    """Which kinds; those of a plain `true` where nothing else is said."""
    default = FusedKernels.default.model_dump(exclude={"enabled"})
    return default | dict(decision.details if decision else {})


def _obstacle(hardware: Hardware, facts: Facts) -> str:
    """Why Liger's kernels are nothing for this model here; empty where they can be."""
    if facts.compiled == "script":
        return "the modules of TorchScript are compiled as they are"
    if facts.compiled != "no":
        return "compiled code passes by them, and fuses such operations itself"
    return liger.obstacle(hardware, facts)


def _offered(request: Request, hardware: Hardware, facts: Facts, rule: str) -> Decision:
    if _is_nvidia(hardware, facts):
        return request.offer(False, True, rule)
    return request.leave(False, f"{rule}: on request")


def _is_nvidia(hardware: Hardware, facts: Facts) -> bool:
    gpu = hardware.accelerator(facts.device)
    return gpu is not None and gpu.is_nvidia


def _counted(places: Sequence[Fusible]) -> str:
    counts = Counter(f"{WORDS[place.kind]} ({place.name})" for place in places)
    return ", ".join(f"{count} {words}" for words, count in counts.items())


def _layers(decision: Decision, target: Target) -> list[tuple[torch.nn.Module, Fused]]:
    """Liger is imported only where there is something for it."""
    details = _details(decision) if decision.value else {}
    pairs = [pair for pair in fusible(target.model) if details.get(pair[0].kind)]
    functional = liger.imported() if pairs else None
    layers = []
    for place, module in pairs:
        layer = CALLS_OF[place.kind](module, functional, place.how, target.notes)
        layer.only_in = target.only_in
        layers.append((module, layer))
    return layers
