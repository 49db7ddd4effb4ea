"""Activations of repeated blocks computed again in the backward pass, rather than kept for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.blocks import repeated_blocks
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.calls import CALLS, around, is_compiled
from speedkit_jupyter.optimizations.recomputing.recomputed import Recomputed

if TYPE_CHECKING:
    import torch

HUGGING_FACE = '{"use_reentrant": False}'
# As they are written without SpeedKit; `blocks` are found by class, which is in the facts.
CODE = """\
from functools import partial

blocks = [block for block in model.modules() if type(block).__name__ in {kinds}]
for block in blocks{every}:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"""


class ActivationCheckpointing(Optimization):
    """Costs about one more forward pass of the blocks, so it is there on request, and for those
    who search for the least memory.
    """

    name = "activation_checkpointing"
    effect = Effect.EXACT
    excludes = frozenset({"compile"})  # which passes by it, and chooses itself what it keeps
    summary = "activations of repeated blocks are computed again instead of kept"
    helps = "training that needs more memory than there is: larger batches, longer sequences"
    risk = (
        "the blocks' forward pass runs twice, and so does what else their code does in it; weights "
        "must not change before backward()"
    )
    undone = "the blocks are called as before, and nothing lies on them"
    page = "https://docs.pytorch.org/docs/stable/checkpoint.html"

    class Options(Fields):
        """`every`: each so many blocks; fewer save less and cost less."""

        enabled: Switch = Field("auto", description="auto, true, false")
        every: int = Field(1, ge=1, strict=True, description="1, 2, 3 …: each so many blocks")

    default = Options()

    def changes(self) -> dict[str, Any]:
        """Also each second block."""
        return super().changes() | {f"{self.name}:2": {"enabled": True, "every": 2}}

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, asked=True)
        if options.enabled == "auto":
            return request.leave(False, "it saves memory and takes time; it is there on request")
        if facts.compiled != "no":
            return request.decline(False, "compiled code chooses itself what it keeps")
        if facts.own_checkpointing == "on":
            return request.decline(False, "the model's own gradient checkpointing is on")
        if not facts.blocks:
            return request.decline(
                False,
                "the model has no ModuleList or Sequential with two or more blocks of a class",
            )
        count = len(range(0, facts.blocks, options.every))
        kinds = " and ".join(facts.block_classes)
        reason = f"{count} of {facts.blocks} blocks are computed again: {kinds}"
        return request.obey(True, reason, details={"every": options.every})

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Compiled code would pass by it."""
        return replace(facts, passed_by=self.name) if decision.active else facts

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """How many blocks will be computed again."""
        blocks = repeated_blocks(target.model)
        return {"model.checkpointed": f"{len(_chosen(blocks, decision))} of {len(blocks)} blocks"}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """A layer around the calls of each block; in a benchmark for its own thread's alone."""
        import torch._dynamo  # noqa: F401  (checkpoint loads it, for a second, in the first step)

        with CALLS.wished(_layers(target, decision)):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torch's own function around each block, or what a Hugging Face model brings along."""
        every = decision.details.get("every", 1)
        if facts.own_checkpointing == "off" and every == 1:
            return _of_hugging_face(form)
        first, _, *lines = CODE.format(
            kinds=_listed(facts.block_classes), every="" if every == 1 else f"[::{every}]"
        ).splitlines()
        imports = (first, "from torch.utils.checkpoint import checkpoint")
        return Snippet(imports=imports, model=tuple(lines))

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many blocks are computed again."""
        blocks = repeated_blocks(target.model)
        if not blocks:
            return {}
        count = sum(around(block, Recomputed) for block in blocks)
        return {"model.checkpointed": f"{count} of {len(blocks)} blocks"}

    def saving(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """All blocks, or each second one."""
        if facts.blocks < 2 or facts.compiled != "no" or facts.own_checkpointing == "on":
            return ()
        return (True, {"enabled": True, "every": 2}) if facts.blocks > 2 else (True,)


def _listed(words: Sequence[str]) -> str:
    return "(" + " ".join(f'"{word}",' for word in words) + ")"


def _of_hugging_face(form: Form) -> Snippet:
    if form != "transformers":
        return Snippet(model=(f"model.gradient_checkpointing_enable({HUGGING_FACE})",))
    arguments = {"gradient_checkpointing": "True", "gradient_checkpointing_kwargs": HUGGING_FACE}
    return Snippet(arguments=arguments)


def _chosen(blocks: list[torch.nn.Module], decision: Decision) -> list[torch.nn.Module]:
    """Not those that the user has compiled: such code chooses itself what it keeps."""
    every = decision.details.get("every", 1)
    return [block for block in blocks[::every] if decision.value and not is_compiled(block)]


def _layers(target: Target, decision: Decision) -> list[tuple[torch.nn.Module, Recomputed]]:
    chosen = _chosen(repeated_blocks(target.model), decision)
    return [(block, _layer(target, block)) for block in chosen]


def _layer(target: Target, block: torch.nn.Module) -> Recomputed:
    """The same one whenever the plan is in force: it knows what its block writes to."""
    layer: Recomputed = target.memo.calls.setdefault(block, Recomputed(block))
    layer.only_in = target.only_in
    return layer
