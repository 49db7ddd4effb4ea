"""A training step as source; the call of a model follows from its forward's signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support.wrappers import layers

Block = list[str]
INDENT = "    "
PASSED_ON = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
# Inputs of a call: a tensor, several positional ones, or a mapping by name.
ONE, SEVERAL, BATCH = "inputs", "*inputs", "**batch"
LIGHTNING = ("loss = {model}.training_step(batch, 0)",)
HUGGING_FACE = ("loss = {call}.loss",)
# Lines that read the loss from the result of a model with labels, as in transformers: an object,
# a dict, or a tuple.
LABELS = (
    "outputs = {call}",
    'key = "loss" if isinstance(outputs, dict) else 0',
    'loss = outputs.loss if hasattr(outputs, "loss") else outputs[key]',
)
# The optimizer of torch that calls the model itself.
BY_CLOSURE = "LBFGS"


def indented(lines: Iterable[str]) -> Block:
    return [f"{INDENT}{line}" if line else "" for line in lines]


@dataclass(frozen=True)
class ModelCall:
    """The call of a model with its `inputs`: ONE, SEVERAL or BATCH.

    `own_loss` are the lines of a model that computes its loss from the batch; without them a loss
    function compares with `targets`.
    """

    inputs: str = ONE
    own_loss: tuple[str, ...] = ()

    @property
    def given(self) -> str:
        return self.inputs.strip("*")

    @property
    def arguments(self) -> str:
        return "batch" if self.own_loss else f"{self.given}, targets, loss_fn"

    def of(self, model: str) -> str:
        return f"{model}({self.inputs})"

    def loss(self, model: str) -> Block:
        call = self.of(model)
        own = [line.format(model=model, call=call) for line in self.own_loss]
        return own or [f"loss = loss_fn({call}, targets)"]

    def moved(self, to: str, trains: bool) -> Block:
        """Return the lines that move a batch; `to` is a method call or empty."""
        if not to:
            return []
        has_targets = trains and not self.own_loss
        if self.inputs == ONE and has_targets:
            return [f"inputs, targets = inputs{to}, targets{to}"]
        lines = {
            ONE: f"inputs = inputs{to}",
            SEVERAL: f"inputs = [one{to} for one in inputs]",
            BATCH: f"batch = {{name: one{to} for name, one in batch.items()}}",
        }
        if trains and self.own_loss == LIGHTNING:
            return [f"batch = [one{to} for one in batch]"]
        return [lines[self.inputs], *[f"targets = targets{to}"] * has_targets]


def call_of(model: torch.nn.Module | None) -> ModelCall:
    """Return the call of this model; `model(inputs)` if nothing else is known."""
    parameters = _parameters(model)
    if _is_a(model, "LightningModule"):
        return ModelCall(own_loss=LIGHTNING)
    is_pretrained = _is_a(model, "PreTrainedModel")
    if "labels" in (parameters or ()):
        return ModelCall(BATCH, HUGGING_FACE if is_pretrained else LABELS)
    required = [one for one in (parameters or {}).values() if one.default is one.empty]
    if is_pretrained or any(one.kind is one.KEYWORD_ONLY for one in required):
        return ModelCall(BATCH)
    plain = [one for one in required if one.kind <= one.POSITIONAL_OR_KEYWORD]
    return ModelCall(SEVERAL if len(plain) > 1 or parameters == {} else ONE)


def _parameters(model: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of the outermost forward that doesn't just pass everything on."""
    for layer in layers(model):
        try:
            parameters = dict(inspect.signature(layer.forward).parameters)
        except (AttributeError, TypeError, ValueError):
            return None
        kinds = {parameter.kind for parameter in parameters.values()}
        if not parameters or kinds - PASSED_ON:
            return parameters
    return None


def _is_a(model: Any, name: str) -> bool:
    """Return whether some base class has this name; its library need not be installed."""
    return any(base.__name__ == name for layer in layers(model) for base in type(layer).__mro__)


def stepped(
    forward: Block,
    optimizers: Sequence[str],
    loss: str = "loss",
    step: str = "{optimizer}.step()",
    after: Sequence[str] = (),
) -> Block:
    """Return the lines of forward pass, backward pass of `loss`, and a `step` of each optimizer."""
    lines = [step.format(optimizer=optimizer) for optimizer in optimizers]
    if loss != "loss":
        scaler = step.partition(".step(")[0]
        unscaled = ", ".join(f"{scaler}.unscale_({optimizer})" for optimizer in optimizers)
        lines.insert(0, f"# To clip gradients: {unscaled} and then clip, here.")
    clear = [f"{optimizer}.zero_grad()" for optimizer in optimizers]
    return [*forward, f"{loss}.backward()", *lines, *after, *clear]


@dataclass(frozen=True)
class Words:
    """The user's names for a model, its optimizers and the context; `names` is the notebook."""

    model: str = "model"
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    ctx: str = "ctx"
    names: Mapping[str, Any] = field(default_factory=dict)


def loop(context: SpeedContext, words: Words) -> str:
    """Return a training step, or a prediction where the plan is for one; empty where a plain loop
    needs no edit. An optimizer that does not exist yet is called `optimizer`.
    """
    plan, call = context.plan, call_of(context.model)
    if not plan["device"].active:
        return ""
    trains = not plan["inference"].active
    move = call.moved(f".to({words.ctx}.device)", trains)
    forward = call.loss(words.model) if trains else [f"outputs = {call.of(words.model)}"]
    names = [*words.optimizers] or ["optimizer"]
    if trains and any(type(one).__name__ == BY_CLOSURE for one in words.optimizers.values()):
        forward = ["# In the closure:", *forward]
    elif trains:
        forward = stepped(forward, names)
    return "\n".join([*move, *forward])
