"""The function at the end of generated code: a training step, or a prediction."""

from __future__ import annotations

from speedkit_jupyter.report.script import Block, Script, indented


def function(script: Script, model: str, backward: str) -> Block:
    """`train_step`, or `predict` where there is no optimizer.

    `model` is what is called; `backward` the line that runs it, with `{loss}` for the loss.
    """
    moves = "".join(snippet.batch for snippet in script.snippets)
    if not script.optimizers:
        move = [f"inputs = inputs{moves}"] if moves else []
        body = [*move, *script.surrounded([f"return {model}(inputs)"])]
        return ["def predict(inputs):", *indented(body)]
    move = [f"inputs, targets = inputs{moves}, targets{moves}"] if moves else []
    head = "def train_step(inputs, targets, loss_fn):"
    forward = script.surrounded([f"loss = loss_fn({model}(inputs), targets)"])
    if any(one.name == "LBFGS" for one in script.plan.facts.optimizers):
        return [head, *indented([*move, *_with_closure(script, forward, backward)])]
    body = [*move, *forward, backward.format(loss=_loss(script))]
    for optimizer in script.optimizers:
        steps = [s.step for s in script.snippets if s.training] or ["{optimizer}.step()"]
        body += [step.format(optimizer=optimizer) for step in steps]
    body += [line for snippet in script.snippets for line in snippet.after_step]
    body += [f"{optimizer}.zero_grad()" for optimizer in script.optimizers]
    return [head, *indented([*body, "return loss.detach()"])]


def _with_closure(script: Script, forward: Block, backward: str) -> Block:
    """For LBFGS, which runs the model several times a step (and takes no GradScaler)."""
    clear = [f"{optimizer}.zero_grad()" for optimizer in script.optimizers]
    inside = [*clear, *forward, backward.format(loss="loss"), "return loss"]
    steps = [f"loss = {optimizer}.step(closure)" for optimizer in script.optimizers]
    return ["def closure():", *indented(inside), "", *steps, "return loss.detach()"]


def _loss(script: Script) -> str:
    return next((s.loss for s in script.snippets if s.training), "loss")
