"""The switch `activation_checkpointing`: recompute activations of blocks in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts, repeated_blocks
from speedkit_jupyter.catalog.model_changes.calls import Call, around, has_hooks, is_compiled
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.dynamo import dynamo_config
from speedkit_jupyter.torchglue.modules import FORWARD_HOOKS
from speedkit_jupyter.torchglue.private import version
from speedkit_jupyter.torchglue.storage import marks

CHANGED = (
    "weights or modes were changed between the forward and the backward pass, which would compute "
    "with the new ones: run backward() before, or leave activation_checkpointing out"
)
WRITES = "a {} writes to its inputs: leave activation_checkpointing out"
PASSED = "a {} is passed a {}, which it may write to, so it is called once (use_cache=False?)"
HUGGING_FACE = '{"use_reentrant": False}'
CODE = """\
for name in {names}:  # running statistics, as of batch norm, change twice in a step
    block = model.get_submodule(name)
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"""


class ActivationCheckpointing(Optimization):
    """Save memory at the cost of about one more forward pass per step; applied on request only."""

    name = "activation_checkpointing"
    before = "cuda_graphs"
    effect = Effect.EXACT
    summary = "activations of repeated blocks are computed again instead of kept"
    helps = "training that runs out of memory: larger batches, longer sequences"
    risk = "the blocks' forward pass runs twice, with all side effects"
    page = "https://docs.pytorch.org/docs/stable/checkpoint.html"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        why = ""
        if facts.compiled != "no":
            why = "compiled code chooses by itself"
        elif facts.own_checkpointing == "on":
            why = "the model's own gradient checkpointing is on"
        elif not facts.blocks:
            why = "the model has no ModuleList or Sequential with two or more blocks of a class"
        rule = f"{facts.blocks} blocks are computed again: {' and '.join(facts.block_classes)}"
        return request.on_request(why, "it saves memory but takes time: on request", rule)

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        return replace(facts, recomputed=decision.active)

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        dynamo_config()  # imports Dynamo; in the first step this would take a second
        blocks = _plain_blocks(target.model) if decision.value else []
        return [Recomputed(block, target.notes, target.only_in) for block in blocks]

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if facts.own_checkpointing == "off":
            if form != "transformers":
                return Snippet(model=(f"model.gradient_checkpointing_enable({HUGGING_FACE})",))
            own = "gradient_checkpointing"
            return Snippet(arguments={own: "True", f"{own}_kwargs": HUGGING_FACE})
        lines = CODE.format(names=list(facts.block_names)).splitlines()
        checkpoint = "from torch.utils.checkpoint import checkpoint"
        return Snippet(imports=("from functools import partial", checkpoint), model=tuple(lines))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        blocks = repeated_blocks(target.model)
        now = [block for block in blocks if around(block, Recomputed)]
        count = len(_plain_blocks(target.model) if planned else now)
        return {"model.checkpointed": f"{count} of {len(blocks)} blocks"} if blocks else {}


def _plain_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [block for block in repeated_blocks(model) if not is_compiled(block)]


class Recomputed(Call):
    """A wrapper around a block's calls that recomputes activations with `torch.utils.checkpoint`.

    Nothing is recomputed if gradients are disabled, torch forbids hooks on saved tensors, an
    argument may change, or the block has forward hooks, which must run only once.
    """

    recomputes = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = torch_private.tree_leaves((args, kwargs))
        keeps = torch_private.can_hook_saved_tensors() and torch.is_grad_enabled() and self.acts()
        is_watched = has_hooks(self.module, FORWARD_HOOKS)
        if not keeps or is_watched or self._is_passed_an_object(leaves):
            return self.below(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        before = [version(tensor) for tensor in tensors]
        again = _repeatable(self.module, lambda: self.below(*args, **kwargs))
        # checkpoint() repeats random numbers on the CPU and on the tensor arguments' devices.
        result = checkpoint(again, *tensors, use_reentrant=False)
        if before != [version(tensor) for tensor in tensors]:
            raise SpeedKitError(WRITES.format(type(self.module).__name__))
        return result

    def _is_passed_an_object(self, leaves: Sequence[Any]) -> bool:
        """Return True and add a note if an argument is an object that may change, like a cache."""
        for leaf in leaves:
            is_own = type(leaf).__module__.partition(".")[0] not in ("torch", "builtins")
            if is_own and hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor):
                names = type(self.module).__name__, type(leaf).__name__
                self.notes["activation_checkpointing"] = PASSED.format(*names)
                return True
        return False


def _repeatable(block: torch.nn.Module, call: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that calls the block, first for the forward pass and then to recompute.

    Later calls use the first call's small buffers. Changed weights or modes raise SpeedKitError.
    """
    weights, modes, is_first = [*block.parameters()], _modes(block), True
    before = marks(weights)
    # Running statistics are vectors or scalars; larger buffers, such as masks, count as constants.
    buffers = [buffer for buffer in block.buffers() if buffer.dim() < 2]
    then = [buffer.detach().clone() for buffer in buffers]

    def again(*tensors: torch.Tensor) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return call()
        if modes != _modes(block) or marks(weights) != before:
            raise SpeedKitError(CHANGED)
        now = [buffer.detach().clone() for buffer in buffers]
        try:
            _write(buffers, then)
            return call()
        finally:
            _write(buffers, now)

    return again


def _modes(block: torch.nn.Module) -> list[Any]:
    """Return weights' ids and `requires_grad`, and training modes, which must not change."""
    weights = [(id(weight), weight.requires_grad) for weight in block.parameters()]
    return [*weights, *(part.training for part in block.modules())]


def _write(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write through `.data`, so that autograd sees no change of buffers that it has saved."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)
