"""A language model's last layer and its loss in one: logits of all words are never all there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.head import head
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.heads.head_calls import NAME, Counts, HeadCalls
from speedkit_jupyter.optimizations.properties.calls import CALLS, layer_of
from speedkit_jupyter.support.exceptions import SpeedKitError

NEEDS = (2, 13)
NO_HEAD = "the model has no linear layer that chooses among 1000 classes or more, at least twice " \
          "as many as it takes features"  # fmt: skip
# As it is written without SpeedKit: the model gives features, and the loss takes them.
CODE = """\
head = model.get_submodule("{path}")
head.forward = lambda features: features


def cross_entropy(features, target, **more):
    features, target = features.flatten(0, -2), target.flatten()
    options = LinearCrossEntropyOptions(
        batch_chunk_size=-(-len(target) // {chunks}), chunking_method=None
    )
    return linear_cross_entropy(
        features, head.weight, target, linear_bias=head.bias, options=options, **more
    )"""
COMMENT = "the model gives features then: the loss is cross_entropy(model(…), target), from below"
TRAINER = "models give Trainer their loss themselves: use_liger_kernel=True has such a one on GPUs"


class LinearCrossEntropy(Optimization):
    """Computes products twice, in parts, where the plain loss keeps logits and their gradients."""

    name = NAME
    effect = Effect.ROUNDING
    excludes = frozenset({"compile", "micro_batches", "cuda_graphs"})
    summary = "cross entropy of a large vocabulary in parts, without all of its logits at once"
    helps = "training language models: logits of a large vocabulary are often most of the memory"
    risk = (
        "slower on CPUs; no second derivatives, no gradients of the logits themselves, and no "
        "logits once optimizer.step() has changed the weights"
    )
    undone = "the layer is called as before, and nothing lies on it"
    page = (
        "https://docs.pytorch.org/docs/stable/generated/"
        "torch.nn.functional.linear_cross_entropy.html"
    )

    class Options(Fields):
        """`chunks`: in how many parts the loss is computed."""

        enabled: Switch = Field("auto", description="auto, true, false")
        chunks: int = Field(4, ge=2, strict=True, description="2, 3, 4 …: so many parts")

    default = Options()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, asked=True)
        if why := _obstacle(hardware, facts):
            return request.decline(False, why)
        assert facts.head is not None
        words = f"{facts.head.path} chooses among {facts.head.classes:,} classes"
        if options.enabled == "auto":
            return request.leave(False, f"{words}; it saves memory, and is there on request")
        hint = "where the loss is torch's cross entropy of what it gives"
        return request.obey(True, words, hint=hint, details={"chunks": options.chunks})

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Compiled code would pass by it."""
        return replace(facts, passed_by=self.name) if decision.active else facts

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Nothing is called yet."""
        on = decision.value and head(target.model) is not None
        return {"model.linear_cross_entropy": str(Counts()) if on else False}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """A layer around the calls of the last layer; in a benchmark for its own thread's alone."""
        with CALLS.wished(_layers(decision, target)):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torch's own function in place of layer and loss."""
        if form == "transformers":
            raise SpeedKitError(TRAINER)
        path = facts.head.path if facts.head else "head"
        lines = CODE.format(path=path, chunks=decision.details.get("chunks", 4)).splitlines()
        imports = (
            "from torch.nn import LinearCrossEntropyOptions",
            "from torch.nn.functional import linear_cross_entropy",
        )
        return Snippet(COMMENT, imports, model=tuple(lines))

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many losses were computed in parts; False where none can be."""
        found = head(target.model)
        layer = found and layer_of(target.model.get_submodule(found.path), HeadCalls)
        return {"model.linear_cross_entropy": str(layer.counts) if layer else False}

    def saving(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Where there is such a layer that trains."""
        return (True,) if facts.training and not _obstacle(hardware, facts) else ()


def _obstacle(hardware: Hardware, facts: Facts) -> str:
    """Why it is nothing for this model here; empty where it can be."""
    if facts.head is None:
        return NO_HEAD
    major, minor = (int(part) for part in hardware.torch.split(".")[:2])
    if (major, minor) < NEEDS:
        return f"needs torch {'.'.join(map(str, NEEDS))}; this is {hardware.torch}"
    if facts.compiled != "no":
        return "compiled code passes by it"
    if facts.passed_by == "micro_batches":
        return "micro_batches joins the logits of its parts"
    return ""


def _layers(decision: Decision, target: Target) -> list[tuple[Any, HeadCalls]]:
    """The same layer whenever the plan is in force: it counts."""
    found = head(target.model)
    if not decision.value or found is None:
        return []
    module = target.model.get_submodule(found.path)
    new = HeadCalls(module, decision.details.get("chunks", 4), target.notes)
    layer: HeadCalls = target.memo.calls.setdefault(module, new)
    layer.only_in = target.only_in
    return [(module, layer)]
