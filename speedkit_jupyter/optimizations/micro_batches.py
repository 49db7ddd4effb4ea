"""A batch in parts within each call of the model: the same results, a part's activations."""

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
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.calls import CALLS, layer_of
from speedkit_jupyter.optimizations.splitting.split_calls import Counts, SplitCalls
from speedkit_jupyter.support.exceptions import SpeedKitError

# As it is written without SpeedKit, where samples do not depend on each other.
CODE = """\
whole_forward = model.forward


def in_parts(*inputs, **named):
    tensors = [t for t in tree_leaves((inputs, named)) if isinstance(t, torch.Tensor)]
    length = len(tensors[0])
    size = -(-length // {parts})

    def part(tensor, first):
        is_cut = isinstance(tensor, torch.Tensor) and tensor.ndim and len(tensor) == length
        return tensor[first : first + size] if is_cut else tensor

    results = []
    for first in range(0, length, size):
        some, more = tree_map(partial(part, first=first), (inputs, named))
        results.append(checkpoint(whole_forward, *some, **more, use_reentrant=False))
    return tree_map(lambda *parts: torch.cat(parts), *results)


model.forward = in_parts"""
TRAINER = (
    "models give Trainer the loss of a batch, which can't be joined: "
    "per_device_train_batch_size / {parts} with gradient_accumulation_steps={parts} does the same"
)


class MicroBatches(Optimization):
    """Costs one more forward pass where it trains, so it is there on request, and for those who
    search for the least memory.
    """

    name = "micro_batches"
    effect = Effect.ROUNDING
    excludes = frozenset({"compile", "activation_checkpointing", "cuda_graphs"})
    summary = "calls of the model are made with a part of the batch at a time"
    helps = "batches that need more memory than there is, in training and inference"
    risk = "each part's forward pass runs twice in training; smaller parts use a device less"
    undone = "the model is called as before, and nothing lies on it"
    page = "https://docs.pytorch.org/docs/stable/checkpoint.html"

    class Options(Fields):
        """`parts`: how many parts a batch is cut into."""

        enabled: Switch = Field("auto", description="auto, true, false")
        parts: int = Field(2, ge=2, strict=True, description="2, 3, 4 …: so many parts")

    default = Options()

    def changes(self) -> dict[str, Any]:
        """Also in four parts."""
        return super().changes() | {f"{self.name}:4": {"enabled": True, "parts": 4}}

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, asked=True)
        if options.enabled == "auto":
            return request.leave(False, "it saves memory and takes time; it is there on request")
        if facts.compiled != "no":
            return request.decline(False, "compiled code would be called with other shapes")
        if facts.passed_by == "activation_checkpointing" or facts.own_checkpointing == "on":
            return request.decline(False, "activation checkpointing computes its blocks again")
        reason = (
            f"calls are made in {options.parts} parts, where samples don't depend on each other"
        )
        hint = "the first call of a kind tries that with a few samples"
        return request.obey(True, reason, hint=hint, details={"parts": options.parts})

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Compiled code would pass by it."""
        return replace(facts, passed_by=self.name) if decision.active else facts

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Nothing is split before the model is called."""
        return {"model.micro_batches": str(Counts()) if decision.value else False}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """A layer around the model's calls; in a benchmark for its own thread's alone."""
        import torch._dynamo  # noqa: F401  (checkpoint loads it, for a second, in the first step)

        with CALLS.wished(_layers(decision, target)):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torch's checkpoint around the forward pass of each part."""
        parts = decision.details.get("parts", 2)
        if form == "transformers":
            raise SpeedKitError(TRAINER.format(parts=parts))
        imports = (
            "import torch",
            "from functools import partial",
            "from torch.utils._pytree import tree_leaves, tree_map",
            "from torch.utils.checkpoint import checkpoint",
        )
        return Snippet(decision.reason, imports, model=tuple(CODE.format(parts=parts).splitlines()))

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many calls were made in parts, and whole; False where none can be."""
        layer = layer_of(target.model, SplitCalls)
        return {"model.micro_batches": False if layer is None else str(layer.counts)}

    def saving(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Four parts or two; not where batch norms train, which take the statistics of a batch."""
        if facts.compiled != "no" or facts.own_checkpointing == "on":
            return ()
        if facts.batch_norms and facts.training:
            return ()
        return ({"enabled": True, "parts": 4}, True)


def _layers(decision: Decision, target: Target) -> list[tuple[Any, SplitCalls]]:
    """The same layer whenever the plan is in force: it knows which calls can be split."""
    if not decision.value:
        return []
    parts = decision.details.get("parts", 2)
    new = SplitCalls(target.model, parts, target.notes)
    layer: SplitCalls = target.memo.calls.setdefault(target.model, new)
    layer.only_in = target.only_in
    return [(target.model, layer)]
