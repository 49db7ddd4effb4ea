"""The function at the end of generated code: a training step, or a prediction."""

from __future__ import annotations

from speedkit_jupyter.codegen.script import Block, Script, indented
from speedkit_jupyter.codegen.training_call import needs_closure


def function(script: Script, model: str, backward: str) -> Block:
    """`train_step`, or `predict` where there is no optimizer.

    `model` is what is called; `backward` the line that runs it, with `{loss}` for the loss.
    """
    moves = "".join(snippet.batch for snippet in script.snippets)
    call = script.call
    if not script.optimizers:
        body = script.surrounded([f"return {call.of(model)}"])
        given = "batch" if call.takes_batch else "inputs"
        return [f"def predict({given}):", *indented([*call.moved(moves, False), *body])]
    head = f"def train_step({call.arguments}):"
    move = call.moved(moves, True)
    forward = script.surrounded(call.loss(model))
    if has_closures(script):
        return [head, *indented([*move, *_with_closure(script, forward, backward)])]
    body = [*forward, backward.format(loss=_loss(script))]
    for optimizer in script.optimizers:
        body += [step.format(optimizer=optimizer) for step in _steps(script)]
    body += [line for snippet in script.snippets for line in snippet.after_step]
    body += [f"{optimizer}.zero_grad()" for optimizer in script.optimizers]
    return [head, *indented([*move, *script.accumulated(body), "return loss.detach()"])]


def has_closures(script: Script) -> bool:
    """Whether an optimizer runs the model itself."""
    facts = script.plan.facts.optimizers
    pairs = zip(script.optimizers.values(), facts, strict=False)
    return any(needs_closure(optimizer, fact.name) for optimizer, fact in pairs)


def _with_closure(script: Script, forward: Block, backward: str) -> Block:
    """For LBFGS, which runs the model several times a step (and takes no GradScaler)."""
    clear = [f"{optimizer}.zero_grad()" for optimizer in script.optimizers]
    keep = "losses.append(loss.detach())"  # Accelerate's step gives nothing back
    inside = [*clear, *forward, backward.format(loss="loss"), keep, "return loss"]
    steps = [f"{optimizer}.step(closure)" for optimizer in script.optimizers]
    return ["losses = []", "", "def closure():", *indented(inside), "", *steps, "return losses[0]"]


def _steps(script: Script) -> list[str]:
    scaled = [snippet.step for snippet in script.snippets if snippet.training]
    hint = "# To clip gradients: {scaler}.unscale_({optimizer}) and then clip, here."
    named = [step.partition(".step(")[0] for step in scaled]
    hints = [hint.replace("{scaler}", scaler) for scaler in named]
    return [*hints, *(scaled or ["{optimizer}.step()"])]


def _loss(script: Script) -> str:
    return next((s.loss for s in script.snippets if s.training), "loss")
