"""The forms of `%speedkit code --as`: torch, transformers' Trainer, YAML, torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.codegen import script as scripts
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.plans.planning import plan as plan_for
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    from speedkit_jupyter.codegen.script import Optimizers

# Forms of code that catalog entries add, each with the module that writes the form.
ADDED = {form: module for entry in CATALOG for form, module in entry.forms.items()}
FORMS = ("torch", *ADDED, "yaml", "transformers")


@hide_internal_frames
def code(
    plan: Plan | SpeedContext,
    form: str = "torch",
    optimizers: Optimizers = (),
    *,
    model: torch.nn.Module | None = None,
    name: str = scripts.MODEL,
    names: Mapping[str, Any] | None = None,
) -> str:
    """Return the plan as source code that does not need SpeedKit.

    Args:
        plan: a plan, or the context of `apply_speedups`, which knows its model and optimizers.
        form: "torch" for a plain loop; "transformers" for a Trainer and its arguments; "yaml" for a
            config; or "torchrun" for a script for several processes.
        optimizers: the plan's optimizers, whose hyperparameters are written out; or a mapping from
            your expressions to these optimizers.
        model: a Plan's model, which decides how the code calls it (default: `model(inputs)`).
        name: the expression for the model in the code.
        names: the notebook's variables; the code omits keys of `optimizers` that they don't define.

    Returns:
        The source code, or YAML, as text.

    Raises:
        SpeedKitError: the form is unknown or can't express the plan, or `optimizers` don't fit it.
        ArgumentError: `plan` or `optimizers` has the wrong type, or `name` is not an expression.

    Example::

        print(code(plan(facts=Facts.read(model, [optimizer]))))
    """
    if not isinstance(plan, Plan | SpeedContext):
        raise ArgumentError(f"code() takes a plan or a SpeedContext, not {type(plan).__name__}")
    if not isinstance(optimizers, Mapping):
        optimizers = arguments.optimizers("optimizers", optimizers)
    if isinstance(plan, SpeedContext):
        model = plan.model
        plan, members = as_of_now(plan, optimizers)
        optimizers = optimizers or members
    if form == "yaml":
        return plan.to_yaml()
    if form not in FORMS:
        forms = ", ".join(FORMS)
        raise SpeedKitError(f"there is no form {form!r}: {forms}.{did_you_mean(form, FORMS)}")
    name = arguments.word("name", name)
    given = optimizers, names, scripts.call_of(model), name
    if form in ADDED:
        written: str = import_module(ADDED[form]).write(plan, *given)
        return written
    known: Any = form
    return WRITERS[form](scripts.gather(plan, known, *given))


def as_of_now(
    context: SpeedContext, wanted: Optimizers = ()
) -> tuple[Plan, list[torch.optim.Optimizer]]:
    """Return the context's plan for `wanted` optimizers (default: all), and the optimizers."""
    made, own = context.plan, list(context.target.optimizers)
    readings = dict(context.facts_of) | dict(context.target.memo.met_later)
    given = wanted.values() if isinstance(wanted, Mapping) else wanted
    optimizers = each_once(given) or list(readings)
    is_whole = len(own) == len(made.facts.optimizers)  # all optimizers still exist
    if (optimizers == own and is_whole) or not optimizers:
        return made, optimizers
    facts = tuple(readings.get(o) or OptimizerFacts.read(o, [context.model]) for o in optimizers)
    return plan_for(made.config, made.hardware, replace(made.facts, optimizers=facts)), optimizers


def _torch(script: scripts.Script) -> str:
    compiled = next((one.compiled for one in script.snippets if one.compiled), "")
    called, prepare = scripts.MODEL, []
    if compiled and script.call.own_loss == scripts.LIGHTNING:  # `training_step` calls the model
        prepare = [f"model.forward = {compiled.replace('(model', '(model.forward', 1)}"]
    elif compiled:
        called, prepare = "compiled_model", [f"compiled_model = {compiled}"]
    blocks = [
        *script.setup(), *script.blocks("model"), scripts.making(script), prepare,
        script.lowered(called), *script.blocks("training"),
    ]  # fmt: skip
    return scripts.assembled(script, blocks, scripts.function(script, called))


def _transformers(script: scripts.Script) -> str:
    """Return code with a Trainer and its arguments. Raises SpeedKitError for several optimizers."""
    if len(script.optimizers) > 1:
        raise SpeedKitError("Trainer takes one optimizer, and the plan has more: use --as torch")
    options = {k: v for snippet in script.snippets for k, v in snippet.arguments.items()}
    make = [
        *scripts.comment("Add your own arguments to these."),
        f"arguments = TrainingArguments({scripts.keywords(options)})",
    ]
    given = {"model": "model", "args": "arguments", "train_dataset": "train_dataset"}
    if script.optimizers:
        given["optimizers"] = f"({script.names[0]}, None)"
    body = [
        f"trainer = Trainer({scripts.keywords(given)}, **more)",
        *script.surrounded(["trainer.train()"]),
        "return trainer",
    ]
    return scripts.assembled(
        script,
        [*script.setup(), make, *script.blocks("model"), scripts.making(script)],
        ["def train(train_dataset, **more):", *scripts.indented(body)],
        "from transformers import Trainer, TrainingArguments",
    )


WRITERS = {"torch": _torch, "transformers": _transformers}
