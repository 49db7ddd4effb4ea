"""A plan as plain code, without SpeedKit: for torch, or for a framework.

What Accelerate, Lightning Fabric or transformers' Trainer has an argument for is its argument; the
rest stays plain torch beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen import optimizers as of_optimizers
from speedkit_jupyter.codegen.optimizers import is_made, making
from speedkit_jupyter.codegen.script import (
    MODEL,
    Script,
    assembled,
    comment,
    function,
    gather,
    has_closures,
    header,
    indented,
    keywords,
)
from speedkit_jupyter.codegen.training_loop import call_of
from speedkit_jupyter.codegen.wrapped import Block, given, new_state, precision_of
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.optimizations.fused_optimizer import met_later
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.plans.planning import plan as plan_for
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Section
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, did_you_mean
from speedkit_jupyter.support.tracebacks import lets_go
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.codegen.optimizers import Optimizers

FRAMEWORKS = ("accelerate", "fabric", "transformers")
FORMS = ("torch", "yaml", *FRAMEWORKS)
# Where the notebook has an instance that is set otherwise.
OTHERS = "In place of your own: give it your other arguments, too."


@lets_go
def code(
    plan: Plan | SpeedContext,
    form: str = "torch",
    optimizers: Optimizers = (),
    *,
    model: torch.nn.Module | None = None,
    name: str = MODEL,
) -> str:
    """Return the plan as source: plain torch, a YAML config, or Accelerate, Fabric or Trainer.

    `optimizers` are those that the plan was made with; their hyperparameters are written out. Where
    they are a mapping, its keys are your words for them, and a framework goes on with your own
    objects. `model` is the one that the plan is for, so that the step
    calls it as its forward asks (`model(**batch).loss`, several inputs), and `name` your word for
    it. An applied plan (a SpeedContext) knows model and optimizers. The framework need not be
    installed. Raises SpeedKitError for an unknown form, for other optimizers than
    the plan's, and where a framework can't do what was planned; TypeError for what is no plan, and
    for a name that is none.
    """
    return _written(plan, form, optimizers, model, name)


def _written(
    plan: Plan | SpeedContext,
    form: str,
    optimizers: Optimizers,
    model: torch.nn.Module | None,
    name: str,
    names: Mapping[str, Any] | None = None,
) -> str:
    """Return what `code` does; `names` is the notebook that it is for, where it is for one."""
    if not isinstance(plan, Plan | SpeedContext):
        kind = type(plan).__name__
        raise ArgumentError(
            f"code() takes a plan or the context of apply_speedups, not {kind}: "
            "code(plan(facts=Facts.read(model))) is what the rules would do"
        )
    if isinstance(plan, SpeedContext):
        model, wanted = plan.model, each_once(of_optimizers.listed(optimizers))
        plan, members = as_of_now(plan, wanted)
        optimizers = optimizers or members
    if form == "yaml":
        return plan.to_yaml()
    name = arguments.word("name", name)
    own = precision_of(model)
    if own and not plan["precision"].active:
        plan = plan_for(plan.config.changed("precision", own), plan.hardware, plan.facts)
    writers = {
        "torch": _torch,
        "accelerate": _accelerate,
        "fabric": _fabric,
        "transformers": _transformers,
    }
    if form not in writers:
        forms = ", ".join(FORMS)
        raise SpeedKitError(f"there is no form {form!r}: {forms}.{did_you_mean(form, FORMS)}")
    own_names = of_optimizers.named(plan, optimizers)
    as_given = dict(zip(own_names, of_optimizers.in_order(optimizers), strict=False))
    words = of_optimizers.words_of(optimizers, names)
    wrapped = given(model, form, as_given, words, names or {})  # type: ignore[arg-type]
    script = gather(plan, form, own_names, call_of(model), name, wrapped)  # type: ignore[arg-type]
    return writers[form](_with_own(script, form))


def _with_own(script: Script, form: str) -> Script:
    """Return the script with the optimizers that it takes from the user as they are.

    These are, in a framework, those with a name, and elsewhere those that the plan changes nothing
    about, or that one line can't make.
    """
    taken = script.given.words if form in FRAMEWORKS else {}
    own = [
        name
        for name in script.optimizers
        if name in taken
        or not of_optimizers.keywords_of(script, name)
        or not of_optimizers.makeable(script, name)
    ]
    return replace(script, given=replace(script.given, own=frozenset(own)))


def as_of_now(
    context: SpeedContext, wanted: Optimizers = ()
) -> tuple[Plan, list[torch.optim.Optimizer]]:
    """Return the plan of a context with the optimizers that it met after it was made, and with
    those.

    Where some are `wanted`, with these instead, as they were before the plan.
    """
    made, own = context.plan, list(context.target.optimizers)
    readings = dict(context.facts_of) | met_later(context.target)
    optimizers = of_optimizers.listed(wanted) or list(readings)
    is_whole = len(own) == len(made.facts.optimizers)  # none is gone
    if (optimizers == own and is_whole) or not optimizers:
        return made, optimizers
    facts = tuple(
        readings.get(optimizer) or OptimizerFacts.read(optimizer, [context.model])
        for optimizer in optimizers
    )
    replaced = replace(made.facts, optimizers=facts)
    return plan_for(made.config, made.hardware, replaced), optimizers


def code_report(
    plan: Plan | SpeedContext,
    form: str,
    optimizers: Optimizers,
    name: str,
    model: torch.nn.Module | None = None,
    names: Mapping[str, Any] | None = None,
) -> Document:
    """Return a report of it; `name` is the user's word for the model, `names` the notebook."""
    text = _written(plan, form, optimizers, model, name, names)
    title = {"torch": "plain PyTorch", "yaml": "a config"}.get(form, form.capitalize())
    language = "yaml" if form == "yaml" else "python"
    body = Section(Code(text.rstrip("\n"), language))
    return Document(f"The plan for `{name}` as {title}", (body,), {"form": form, "code": text})


def _torch(script: Script) -> str:
    compiled = [
        [*script.reasons("compiled"), f"compiled_model = {snippet.compiled}"]
        for snippet in script.snippets
        if snippet.compiled
    ]
    blocks = [
        *script.setup(),
        *script.blocks("model"),
        making(script),
        *script.blocks("training"),
        *compiled,
        script.reasons("arguments"),
    ]
    body = function(script, "compiled_model" if compiled else "model", "{loss}.backward()")
    return assembled(header(script, _yours(script)), script, blocks, body)


def _accelerate(script: Script) -> str:
    """Write it with an `Accelerator`, which compiles and scales by itself."""
    own = script.given.instance
    room, imports_too = new_state()
    given_to = dict(script.arguments)
    if own is not None and own.accumulation_steps > 1 and not has_closures(script):
        given_to["gradient_accumulation_steps"] = str(own.accumulation_steps)
    also = comment(OTHERS) if own is not None else []
    make = [*room, *also, f"accelerator = Accelerator({_listed(given_to)})"]
    imports = ["from accelerate import Accelerator", *imports_too]
    names = ", ".join(["model", *script.optimizers])
    prepare = [f"{names} = accelerator.prepare({names})"]
    return _with_loop(script, imports, make, prepare, "accelerator.backward({loss})")


def _fabric(script: Script) -> str:
    """Write it with a `Fabric`, which is handed the compiled model."""
    also = comment(OTHERS) if script.given.instance is not None else []
    make = [*also, f"fabric = Fabric({_listed(script.arguments)})"]
    imports = ["from lightning.fabric import Fabric"]
    model = next((snippet.compiled for snippet in script.snippets if snippet.compiled), "model")
    names = ", ".join(["model", *script.optimizers])
    setup = f"{names} = fabric.setup({', '.join([model, *script.optimizers])})"
    prepare = [*script.reasons("compiled"), setup]
    return _with_loop(script, imports, make, prepare, "fabric.backward({loss})")


def _with_loop(
    script: Script, imports: Sequence[str], make: Block, prepare: Block, backward: str
) -> str:
    """Write what Accelerate and Fabric have in common: the loop stays the user's."""
    if _is_kept(script):
        own = script.given.instance
        assert own is not None
        make, imports = comment(f"`{own.word}` is set so already.") if script.arguments else [], []
    blocks = [
        *script.setup(),
        [*script.reasons("arguments"), *make],
        *script.blocks("model"),
        making(script),
        prepare,
        *script.blocks("training"),
    ]
    body = function(script, "model", backward)
    return assembled(header(script, _yours(script)), script, blocks, body, *imports)


def _transformers(script: Script) -> str:
    """Write it with `TrainingArguments`, and a Trainer that is given the optimizer."""
    if len(script.optimizers) > 1:
        raise SpeedKitError("Trainer takes one optimizer and the plan has more: take --as torch")
    room, imports_too = new_state()
    make = [
        *script.reasons("arguments"),
        *room,
        *comment("Add your own arguments to these."),
        f"arguments = TrainingArguments({_listed(script.arguments)})",
    ]
    given_to = {"model": "model", "args": "arguments", "train_dataset": "train_dataset"}
    for name in script.optimizers:
        given_to["optimizers"] = f"({name}, None)"
    body = [
        f"trainer = Trainer({_listed(given_to)}, **more)",
        *script.surrounded(["trainer.train()"]),
        "return trainer",
    ]
    return assembled(
        header(script, _yours(script)),
        script,
        [*script.setup(), make, *script.blocks("model"), making(script)],
        ["def train(train_dataset, **more):", *indented(body)],
        "from transformers import Trainer, TrainingArguments",
        *imports_too,
    )


def _is_kept(script: Script) -> bool:
    """Return whether the user's own instance is as planned already; no other takes its place."""
    own = script.given.instance
    if own is None or (own.accumulation_steps > 1 and has_closures(script)):
        return False  # a closure is to run at each batch
    return own.suits(script.arguments, script.plan.facts_after.device)


def _yours(script: Script) -> list[str]:
    """Return what the code takes as given."""
    instance = script.given.instance
    kept = [instance.word] if instance is not None and _is_kept(script) else []
    return ["model", *(name for name in script.optimizers if not is_made(script, name)), *kept]


def _listed(arguments: Mapping[str, str]) -> str:
    return ", ".join(keywords(arguments))
