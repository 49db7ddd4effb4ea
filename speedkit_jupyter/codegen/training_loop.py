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
BATCH = "**batch"
LIGHTNING = ("loss = {model}.training_step(batch, 0)",)
HUGGING_FACE = ("loss = {call}.loss",)
# For the result of a model with labels: an object, a dict, or a tuple as in transformers.
LABELS = (
    "outputs = {call}",
    'key = "loss" if isinstance(outputs, dict) else 0',
    'loss = outputs.loss if hasattr(outputs, "loss") else outputs[key]',
)


def indented(lines: Iterable[str]) -> Block:
    return [f"{INDENT}{line}" if line else "" for line in lines]


@dataclass(frozen=True)
class ModelCall:
    """The call of a model: with `x`, several `src, tgt` (or `*inputs`), or a whole `**batch`.

    `own_loss` are the lines of a model that computes its loss from the batch; without them a loss
    function compares with `targets`.
    """

    inputs: str = "inputs"
    targets: str = "targets"
    own_loss: tuple[str, ...] = ()

    @property
    def given(self) -> str:
        return "batch" if self.inputs == BATCH else "inputs"

    @property
    def arguments(self) -> str:
        return "batch" if self.own_loss else f"{self.given}, {self.targets}, loss_fn"

    def of(self, model: str) -> str:
        return f"{model}({self.inputs})"

    def loss(self, model: str) -> Block:
        call = self.of(model)
        own = [line.format(model=model, call=call) for line in self.own_loss]
        return own or [f"loss = loss_fn({call}, {self.targets})"]

    def moved(self, to: str, trains: bool) -> Block:
        """Return the lines that move a batch; `to` is a method call or empty."""
        if not to:
            return []
        names = [self.targets] if trains and not self.own_loss else []
        lines = []
        if self.inputs == BATCH:
            lines = [f"batch = {{name: one{to} for name, one in batch.items()}}"]
        elif trains and self.own_loss:
            lines = [f"batch = [one{to} for one in batch]"]
        elif self.inputs == "*inputs":
            lines = [f"inputs = [one{to} for one in inputs]"]
        elif self.inputs:
            names = [*self.inputs.split(", "), *names]
        if names:
            lines.append(f"{', '.join(names)} = {', '.join(name + to for name in names)}")
        return lines


def call_of(model: torch.nn.Module | None, own_names: bool = False) -> ModelCall:
    """Return the call of this model; `model(inputs)` if nothing else is known.

    With `own_names` targets are `y`, one input is `x`, and several are named as in its forward.
    """
    parameters = _parameters(model)
    one, targets = ("x", "y") if own_names else ("inputs", "targets")
    if _is_a(model, "LightningModule"):
        return ModelCall(own_loss=LIGHTNING)
    is_pretrained = _is_a(model, "PreTrainedModel")
    if "labels" in (parameters or ()):
        return ModelCall(BATCH, own_loss=HUGGING_FACE if is_pretrained else LABELS)
    required = [one for one in (parameters or {}).values() if one.default is one.empty]
    by_word = any(parameter.kind is parameter.KEYWORD_ONLY for parameter in required)
    if by_word or is_pretrained:
        return ModelCall(BATCH, targets)
    plain = [one.name for one in required if one.kind <= one.POSITIONAL_OR_KEYWORD]
    if len(plain) > 1 or parameters == {}:
        return ModelCall(", ".join(plain) if own_names else "*inputs", targets)
    return ModelCall(one, targets)


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


def needs_closure(optimizer: torch.optim.Optimizer | None, name: str) -> bool:
    """Return whether the optimizer's step requires a closure; `name` is its class."""
    if optimizer is None:
        return name == "LBFGS"
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty


def stepped(
    forward: Block,
    optimizers: Sequence[str],
    backward: str = "{loss}.backward()",
    loss: str = "loss",
    step: str = "{optimizer}.step()",
    after: Sequence[str] = (),
    closure: bool = False,
) -> Block:
    """Return the lines of forward pass, backward pass and optimizer steps.

    The backward pass runs on the expression `loss`; `step` is for each optimizer, and `after` comes
    after all. With a `closure` the optimizers call the model themselves, without a GradScaler.
    """
    clear = [f"{optimizer}.zero_grad()" for optimizer in optimizers]
    if closure:
        keep = "losses.append(loss.detach())"  # Accelerate's step returns nothing
        inside = [*clear, *forward, backward.format(loss="loss"), keep, "return loss"]
        steps = [f"{optimizer}.step(closure)" for optimizer in optimizers]
        return ["losses = []", "", "def closure():", *indented(inside), "", *steps]
    lines = [step.format(optimizer=optimizer) for optimizer in optimizers]
    if loss != "loss":
        scaler = step.partition(".step(")[0]
        unscaled = ", ".join(f"{scaler}.unscale_({optimizer})" for optimizer in optimizers)
        lines.insert(0, f"# To clip gradients: {unscaled} and then clip, here.")
    return [*forward, backward.format(loss=loss), *lines, *after, *clear]


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
    plan, call = context.plan, call_of(context.model, own_names=True)
    if not any(plan[name].active for name in ("device", "precision", "grad_scaler")):
        return ""
    trains = not plan["inference"].active
    move = call.moved(f".to({words.ctx}.device)" if plan["device"].active else "", trains)
    forward = call.loss(words.model) if trains else [f"outputs = {call.of(words.model)}"]
    if plan["precision"].active:
        forward = [f"with {words.ctx}.autocast():", *indented(forward)]
    if not trains:
        return "\n".join([*move, *forward])
    names, optimizers = [*words.optimizers] or ["optimizer"], words.optimizers.values()
    if any(needs_closure(one, type(one).__name__) for one in optimizers):
        steps = stepped(forward, names, closure=True)
    elif plan["grad_scaler"].active:
        scaler = f"{words.ctx}.grad_scaler"
        scaled = f"{scaler}.scale(loss)", f"{scaler}.step({{optimizer}})", [f"{scaler}.update()"]
        steps = stepped(forward, names, "{loss}.backward()", *scaled)
    else:
        steps = stepped(forward, names)
    return "\n".join([*move, *steps])
