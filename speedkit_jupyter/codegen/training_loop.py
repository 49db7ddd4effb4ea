"""The loop that a user pastes after `apply`: in the notebook's own words, right for the plan.

How a model is called in training follows from the signature of its own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.plans.context import SpeedContext

if TYPE_CHECKING:
    import torch

INDENT = "    "
Kind = Literal["inputs", "several", "batch", "loss", "outputs"]
# As transformers' Trainer takes the loss from whatever a model with labels returns.
TRAINERS_RULE = 'loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]'


@dataclass(frozen=True)
class Call:
    """`inputs`: `model(x)`; `several`: `model(src, tgt)`; `batch`: `model(**batch)`, all with a
    loss function; `loss` and `outputs` compute it themselves, from labels in the batch.

    `parameters` are the names of the inputs.
    """

    kind: Kind = "inputs"
    parameters: tuple[str, ...] = ("x",)

    @property
    def takes_batch(self) -> bool:
        """Whether a batch is a mapping."""
        return self.kind in ("batch", "loss", "outputs")

    @property
    def arguments(self) -> str:
        """What a training step is given."""
        if self.kind in ("loss", "outputs"):
            return "batch"
        return f"{'batch' if self.takes_batch else 'inputs'}, targets, loss_fn"

    def of(self, model: str, inputs: str | None = None) -> str:
        """Return the call; `inputs` in place of the names that generated code has."""
        if self.takes_batch:
            return f"{model}(**batch)"
        if inputs is None:
            inputs = "*inputs" if self.kind == "several" else "inputs"
        return f"{model}({inputs})"

    def loss(self, model: str, inputs: str | None = None, targets: str = "targets") -> list[str]:
        """Return the lines that compute `loss`."""
        if self.kind == "loss":
            return [f"loss = {self.of(model)}.loss"]
        if self.kind == "outputs":
            return [f"outputs = {self.of(model)}", TRAINERS_RULE]
        return [f"loss = loss_fn({self.of(model, inputs)}, {targets})"]

    def moved(self, move: str, trains: bool) -> list[str]:
        """Return the line that moves a batch; `move` is a method call, or nothing."""
        if not move:
            return []
        if self.takes_batch:
            batch = f"batch = {{name: one{move} for name, one in batch.items()}}"
            own = self.kind in ("loss", "outputs") or not trains
            return [batch] if own else [batch, f"targets = targets{move}"]
        if self.kind == "several":
            inputs = f"inputs = [one{move} for one in inputs]"
            return [inputs, f"targets = targets{move}"] if trains else [inputs]
        if trains:
            return [f"inputs, targets = inputs{move}, targets{move}"]
        return [f"inputs = inputs{move}"]


def call_of(model: torch.nn.Module | None) -> Call:
    """Return how this model is called; as `model(inputs)` where nothing tells."""
    parameters = _parameters(model)
    if "labels" in parameters:
        return Call("loss" if _is_transformers(model) else "outputs")
    if _is_transformers(model):
        return Call("batch")
    required = [
        parameter for parameter in parameters.values() if parameter.default is parameter.empty
    ]
    plain = [
        parameter.name
        for parameter in required
        if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
    ]
    if any(parameter.kind is parameter.KEYWORD_ONLY for parameter in required):
        return Call("batch")
    if len(plain) > 1 or (model is not None and parameters is not UNKNOWN and not parameters):
        return Call("several", tuple(plain))
    return Call()


UNKNOWN: Mapping[str, inspect.Parameter] = {}


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    """Return those of forward; of a wrapper that passes everything on, those of what it wraps."""
    for _ in range(5):
        try:
            parameters = inspect.signature(model.forward).parameters
        except (AttributeError, TypeError, ValueError):
            return UNKNOWN
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        passes_on = all(
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in parameters.values()
        )
        if not (parameters and passes_on):
            return parameters
        if inner is None:
            return UNKNOWN
        model = inner
    return UNKNOWN


def _is_transformers(model: Any) -> bool:
    """Return whether it is a model of transformers, which need not be installed to ask."""
    inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    classes = (*type(model).__mro__, *type(inner).__mro__)
    return any(base.__name__ == "PreTrainedModel" for base in classes)


def needs_closure(optimizer: torch.optim.Optimizer | None, name: str) -> bool:
    """Return whether its step can't do without a function that computes the loss; `name` is its
    class.
    """
    if optimizer is None:
        return name == "LBFGS"
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty


@dataclass(frozen=True)
class Words:
    """The user's words for a model, its optimizers and the context; `names` is the notebook."""

    model: str = "model"
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    ctx: str = "ctx"
    names: Mapping[str, Any] = field(default_factory=dict)


def loop(context: SpeedContext, words: Words) -> str:
    """Return a training step, or a prediction where the plan is for one; empty where a plain loop
    needs no edit. An optimizer that does not exist yet is called `optimizer`.
    """
    plan = context.plan
    if not any(plan[name].active for name in ("device", "precision", "grad_scaler")):
        return ""
    call, names = call_of(context.model), [*words.optimizers] or ["optimizer"]
    trains = not plan["inference"].active
    lines = _moved(call, words.ctx, trains) if plan["device"].active else []
    inputs = ", ".join(call.parameters) if call.kind == "several" else "x"
    if not trains:
        predict = [f"outputs = {call.of(words.model, inputs)}"]
        return "\n".join([*lines, *_lowered(context, words.ctx, predict)])
    forward = _lowered(context, words.ctx, call.loss(words.model, inputs, "y"))
    closures = any(
        needs_closure(optimizer, type(optimizer).__name__)
        for optimizer in words.optimizers.values()
    )
    if closures:
        return "\n".join([*lines, *_with_closure(forward, names)])
    steps = _scaled(words.ctx, names) if plan["grad_scaler"].active else _plain(names)
    return "\n".join([*lines, *forward, *steps, *(f"{name}.zero_grad()" for name in names)])


def _lowered(context: SpeedContext, ctx: str, lines: list[str]) -> list[str]:
    """Return the lines inside of autocast, where the plan lowers the precision."""
    if not context.plan["precision"].active:
        return lines
    return [f"with {ctx}.autocast():", *(INDENT + line for line in lines)]


def _plain(names: list[str]) -> list[str]:
    return ["loss.backward()", *(f"{name}.step()" for name in names)]


def _scaled(ctx: str, names: list[str]) -> list[str]:
    scaler = f"{ctx}.grad_scaler"
    clip = [f"{scaler}.unscale_({name})" for name in names]
    return [
        f"{scaler}.scale(loss).backward()",
        f"# to clip gradients, before you do: {'; '.join(clip)}",
        *(f"{scaler}.step({name})" for name in names),
        f"{scaler}.update()",
    ]


def _with_closure(forward: list[str], names: list[str]) -> list[str]:
    """Return a step for optimizers that run the model themselves, and take no GradScaler."""
    clear = [f"{name}.zero_grad()" for name in names]
    inside = [*clear, *forward, "loss.backward()", "return loss"]
    steps = [f"{name}.step(closure)" for name in names]
    return ["def closure():", *(INDENT + line for line in inside), "", *steps]


def _moved(call: Call, ctx: str, trains: bool) -> list[str]:
    to = f".to({ctx}.device)"
    if call.takes_batch:
        own = [f"batch = {{name: one{to} for name, one in batch.items()}}"]
        return own if call.kind != "batch" or not trains else [*own, f"y = y{to}"]
    inputs = call.parameters if call.kind == "several" else ("x",)
    every = [*inputs, "y"] if trains else [*inputs]
    return [f"{', '.join(every)} = {', '.join(name + to for name in every)}"]
