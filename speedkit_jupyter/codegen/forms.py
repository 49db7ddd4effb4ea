"""A plan as plain code, without SpeedKit: for torch, or with the arguments of a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.catalog.facts.optimizers import OptimizerFacts
from speedkit_jupyter.codegen.script import (
    MODEL,
    Script,
    assembled,
    comment,
    function,
    gather,
    keywords,
    listed,
    making,
    named,
    taken_as_they_are,
    words_of,
)
from speedkit_jupyter.codegen.torchrun import STARTERS, spread, torchrun
from speedkit_jupyter.codegen.training_loop import Block, call_of, indented
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.plans.planning import plan as plan_for
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, did_you_mean
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    from speedkit_jupyter.codegen.script import Optimizers

FORMS = ("torch", "torchrun", "yaml", "accelerate", "fabric", "transformers", *STARTERS)


@hide_internal_frames
def code(
    plan: Plan | SpeedContext,
    form: str = "torch",
    optimizers: Optimizers = (),
    *,
    model: torch.nn.Module | None = None,
    name: str = MODEL,
    names: Mapping[str, Any] | None = None,
) -> str:
    """Return the plan as source: plain torch, a YAML config, or Accelerate, Fabric or Trainer.

    `torchrun` is a whole script for several processes; `slurm` and `kubernetes` start it.

    `optimizers` are those that the plan was made with; their hyperparameters are written out. Where
    they are a mapping, its keys are your words for them, and a framework goes on with your own
    objects, as far as `names` (the notebook's) have them. `model` is the one that the plan is for,
    so that the step calls it as its forward asks (`model(**batch).loss`, several inputs), and
    `name` your word for it. An applied plan (a SpeedContext) knows model and optimizers. The
    framework need not be installed. Raises SpeedKitError for an unknown form, for other optimizers
    than the plan's, and where a framework can't do what was planned; TypeError for what is no plan,
    and for a name that is none.
    """
    if not isinstance(plan, Plan | SpeedContext):
        raise ArgumentError(
            f"code() takes a plan or the context of apply_speedups, not {type(plan).__name__}: "
            "code(plan(facts=Facts.read(model))) is what the rules would do"
        )
    if isinstance(plan, SpeedContext):
        model, wanted = plan.model, each_once(listed(optimizers))
        plan, members = as_of_now(plan, wanted)
        optimizers = optimizers or members
    if form == "yaml":
        return plan.to_yaml()
    if form not in FORMS:
        forms = ", ".join(FORMS)
        raise SpeedKitError(f"there is no form {form!r}: {forms}.{did_you_mean(form, FORMS)}")
    if form in STARTERS:
        return STARTERS[form](plan)
    words, name = words_of(optimizers, names), arguments.word("name", name)
    plan = spread(plan) if form == "torchrun" else plan
    known: Any = "torch" if form == "torchrun" else form  # as the catalog knows it
    script = gather(plan, known, named(plan, optimizers), words, call_of(model), name)
    taken = taken_as_they_are(script, {} if known == "torch" else words)
    return WRITERS[form](replace(script, own=taken))


def as_of_now(
    context: SpeedContext, wanted: Optimizers = ()
) -> tuple[Plan, list[torch.optim.Optimizer]]:
    """Return the plan of a context with the optimizers that it met later too, and those.

    Where some are `wanted`, with these instead, as they were before the plan.
    """
    made, own = context.plan, list(context.target.optimizers)
    readings = dict(context.facts_of) | dict(context.target.memo.met_later)
    optimizers = listed(wanted) or list(readings)
    is_whole = len(own) == len(made.facts.optimizers)  # none is gone
    if (optimizers == own and is_whole) or not optimizers:
        return made, optimizers
    facts = tuple(readings.get(o) or OptimizerFacts.read(o, [context.model]) for o in optimizers)
    return plan_for(made.config, made.hardware, replace(made.facts, optimizers=facts)), optimizers


def _torch(script: Script) -> str:
    compiled = next((one.compiled for one in script.snippets if one.compiled), "")
    prepare = [*script.reasons("compiled"), f"compiled_model = {compiled}"] if compiled else []
    model = "compiled_model" if compiled else "model"
    return _with_loop(script, prepare, "{loss}.backward()", model=model)


def _accelerate(script: Script) -> str:
    """Write it with an `Accelerator`, which compiles and scales by itself."""
    names = ", ".join(["model", *script.optimizers])
    return _with_loop(
        script,
        [f"{names} = accelerator.prepare({names})"],
        "accelerator.backward({loss})",
        [f"accelerator = Accelerator({keywords(script.arguments)})"],
        "from accelerate import Accelerator",
    )


def _fabric(script: Script) -> str:
    """Write it with a `Fabric`, which is handed the compiled model."""
    model = next((snippet.compiled for snippet in script.snippets if snippet.compiled), "model")
    names, given = (", ".join([one, *script.optimizers]) for one in ("model", model))
    return _with_loop(
        script,
        [*script.reasons("compiled"), f"{names} = fabric.setup({given})"],
        "fabric.backward({loss})",
        [f"fabric = Fabric({keywords(script.arguments)})"],
        "from lightning.fabric import Fabric",
    )


def _with_loop(
    script: Script,
    prepare: Block,
    backward: str,
    make: Sequence[str] = (),
    *imports: str,
    model: str = "model",
) -> str:
    """Write what torch, Accelerate and Fabric have in common: the loop stays the user's."""
    blocks = [
        *script.setup(),
        [*script.reasons("arguments"), *make],
        *script.blocks("model"),
        making(script),
        prepare,
        *script.blocks("training"),
    ]
    return assembled(script, blocks, function(script, model, backward), *imports)


def _transformers(script: Script) -> str:
    """Write it with `TrainingArguments`, and a Trainer that is given the optimizer."""
    if len(script.optimizers) > 1:
        raise SpeedKitError("Trainer takes one optimizer and the plan has more: take --as torch")
    make = [
        *script.reasons("arguments"),
        *comment("Add your own arguments to these."),
        f"arguments = TrainingArguments({keywords(script.arguments)})",
    ]
    given_to = {"model": "model", "args": "arguments", "train_dataset": "train_dataset"}
    for name in script.optimizers:
        given_to["optimizers"] = f"({name}, None)"
    body = [
        f"trainer = Trainer({keywords(given_to)}, **more)",
        *script.surrounded(["trainer.train()"]),
        "return trainer",
    ]
    return assembled(
        script,
        [*script.setup(), make, *script.blocks("model"), making(script)],
        ["def train(train_dataset, **more):", *indented(body)],
        "from transformers import Trainer, TrainingArguments",
    )


WRITERS = {
    "torch": _torch,
    "torchrun": torchrun,
    "accelerate": _accelerate,
    "fabric": _fabric,
    "transformers": _transformers,
}
