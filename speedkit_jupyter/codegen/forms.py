"""A plan as plain code to paste into a script, without SpeedKit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from typing import TYPE_CHECKING

from speedkit_jupyter.codegen import frameworks
from speedkit_jupyter.codegen.given import Given, is_patched, of_model, precision_of, wrapped
from speedkit_jupyter.codegen.optimizer_source import makeable, making
from speedkit_jupyter.codegen.script import MODEL, Script, assembled, gather, header
from speedkit_jupyter.codegen.training_call import call_of
from speedkit_jupyter.codegen.training_step import function
from speedkit_jupyter.optimizations.facts import OptimizerFacts
from speedkit_jupyter.optimizations.fused_optimizer import met_later
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.plans.planning import plan as plan_for
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Code, Section
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, did_you_mean
from speedkit_jupyter.support.wrappers import each_once, unwrapped

if TYPE_CHECKING:
    import torch

    Optimizers = Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]

FORMS = ("torch", "yaml", "accelerate", "fabric", "transformers")


def code(
    plan: Plan | SpeedContext,
    form: str = "torch",
    optimizers: Optimizers = (),
    *,
    model: torch.nn.Module | None = None,
    name: str = MODEL,
) -> str:
    """The plan as source: plain torch, a YAML config, or Accelerate, Fabric or Trainer.

    `optimizers` are those that the plan was made with, by name where they are a mapping; their
    hyperparameters are written out. `model` is the one that the plan is for, so that the step
    calls it as its forward asks (`model(**batch).loss`, several inputs), and `name` your word for
    it. An applied plan (a SpeedContext) knows model and optimizers. The framework need not be
    installed. Raises SpeedKitError for an unknown form, for other optimizers than
    the plan's, and where a framework can't do what was planned; TypeError for what is no plan, and
    for a name that is none.
    """
    if not isinstance(plan, Plan | SpeedContext):
        kind = type(plan).__name__
        raise ArgumentError(
            f"code() takes a plan or the context of apply_speedups, not {kind}: "
            "code(plan(facts=Facts.read(model))) is what the rules would do"
        )
    if isinstance(plan, SpeedContext):
        model, (plan, members) = plan.model, as_of_now(plan, each_once(_listed(optimizers)))
        optimizers = optimizers or members
    if form == "yaml":
        return plan.to_yaml()
    name = arguments.word("name", name)
    own = precision_of(model)
    if own and not plan["precision"].active:
        plan = plan_for(plan.config.changed("precision", own), plan.hardware, plan.facts)
    writers: dict[str, Callable[[Script], str]] = {
        "torch": _torch,
        "accelerate": frameworks.accelerate,
        "fabric": frameworks.fabric,
        "transformers": frameworks.transformers,
    }
    if form not in writers:
        forms = ", ".join(FORMS)
        raise SpeedKitError(f"there is no form {form!r}: {forms}.{did_you_mean(form, FORMS)}")
    named = _named(plan, optimizers)
    pairs = zip(named, _in_order(optimizers), strict=False)
    given = Given(
        of_model(model, form),  # type: ignore[arg-type]
        is_patched(model),
        wrapped(pairs),
    )
    call = call_of(model)
    return writers[form](gather(plan, form, named, call, name, given))  # type: ignore[arg-type]


def as_of_now(
    context: SpeedContext, wanted: Optimizers = ()
) -> tuple[Plan, list[torch.optim.Optimizer]]:
    """The plan of a context with the optimizers that it met after it was made, and with those.

    Where some are `wanted`, with these instead, as they were before the plan.
    """
    made, own = context.plan, list(context.target.optimizers)
    whole = len(own) == len(made.facts.optimizers)  # none is gone
    readings = dict(zip(own, made.facts.optimizers, strict=True)) if whole else {}
    readings |= met_later(context.target)
    optimizers = _listed(wanted) or list(readings)
    if optimizers == own or not optimizers:
        return made, optimizers
    facts = tuple(
        readings.get(optimizer) or OptimizerFacts.read(optimizer, [context.model])
        for optimizer in optimizers
    )
    replaced = replace(made.facts, optimizers=facts)
    return plan_for(made.config, made.hardware, replaced), optimizers


def _in_order(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """As they were handed over, wrappers and all; each once."""
    return list({id(unwrapped(optimizer)): optimizer for optimizer in _listed(optimizers)}.values())


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return list(optimizers.values() if isinstance(optimizers, Mapping) else optimizers)


def code_report(
    plan: Plan | SpeedContext,
    form: str,
    optimizers: Optimizers,
    name: str,
    model: torch.nn.Module | None = None,
) -> Document:
    """The same to be shown; `name` is the user's word for the model."""
    text = code(plan, form, optimizers, model=model, name=name)
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
    given = ["model", *(name for name in script.optimizers if not makeable(script, name))]
    body = function(script, "compiled_model" if compiled else "model", "{loss}.backward()")
    return assembled(header(script, given), script, blocks, body)


def _named(plan: Plan, optimizers: Optimizers) -> dict[str, torch.optim.Optimizer | None]:
    """By name: the user's own, `optimizer`, or `optimizer_1` and so on."""
    number = len(plan.facts.optimizers)
    if not isinstance(optimizers, Mapping):
        optimizers = each_once(optimizers)
    if optimizers and len(optimizers) != number:
        raise SpeedKitError(f"the plan was made with {number} optimizers, not {len(optimizers)}")
    if isinstance(optimizers, Mapping):
        return {_word(name): unwrapped(optimizer) for name, optimizer in optimizers.items()}
    names = ["optimizer"] if number == 1 else [f"optimizer_{i + 1}" for i in range(number)]
    values: Sequence[torch.optim.Optimizer | None] = optimizers or [None] * number
    return dict(zip(names, values, strict=True))


def _word(name: str) -> str:
    """A variable for it: the name itself, where it is one (`os_` is not `os`)."""
    if _is_variable(name):
        return name
    word = re.sub(r"\W+", "_", name).strip("_")
    return word if _is_variable(word) else f"optimizer_{word}".rstrip("_")


def _is_variable(name: str) -> bool:
    """Whether Python lets something be called so."""
    return name.isidentifier() and not iskeyword(name)
