"""The loop that a user pastes after `apply`: in the notebook's own words, right for the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen.training_call import Call, call_of, needs_closure
from speedkit_jupyter.plans.context import SpeedContext

if TYPE_CHECKING:
    import torch

INDENT = "    "


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
    """For optimizers that run the model themselves, and take no GradScaler."""
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
