"""A plan as plain code to paste into a script, without SpeedKit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.codegen import frameworks
from speedkit_jupyter.codegen.instances import instance_in
from speedkit_jupyter.codegen.optimizer_names import in_order, listed, named, words_of
from speedkit_jupyter.codegen.optimizer_source import is_made, keywords_of, makeable, making
from speedkit_jupyter.codegen.script import MODEL, Script, assembled, gather, header
from speedkit_jupyter.codegen.training_call import call_of
from speedkit_jupyter.codegen.training_step import function
from speedkit_jupyter.codegen.unwrapping import (
    Given,
    is_patched,
    is_prepared,
    of_model,
    precision_of,
    wrapped,
)
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

    from speedkit_jupyter.codegen.optimizer_names import Optimizers

FRAMEWORKS = ("accelerate", "fabric", "transformers")
FORMS = ("torch", "yaml", *FRAMEWORKS)


@lets_go
def code(
    plan: Plan | SpeedContext,
    form: str = "torch",
    optimizers: Optimizers = (),
    *,
    model: torch.nn.Module | None = None,
    name: str = MODEL,
) -> str:
    """The plan as source: plain torch, a YAML config, or Accelerate, Fabric or Trainer.

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
    """As `code`; `names` is the notebook that it is for, where it is for one."""
    if not isinstance(plan, Plan | SpeedContext):
        kind = type(plan).__name__
        raise ArgumentError(
            f"code() takes a plan or the context of apply_speedups, not {kind}: "
            "code(plan(facts=Facts.read(model))) is what the rules would do"
        )
    if isinstance(plan, SpeedContext):
        model, (plan, members) = plan.model, as_of_now(plan, each_once(listed(optimizers)))
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
    own_names = named(plan, optimizers)
    given = Given(
        of_model(model, form),  # type: ignore[arg-type]
        is_patched(model),
        form in ("accelerate", "transformers") and is_prepared(model),
        wrapped(zip(own_names, in_order(optimizers), strict=False)),
        words=words_of(optimizers, names),
        instance=instance_in(names or {}, form),
    )
    script = gather(plan, form, own_names, call_of(model), name, given)  # type: ignore[arg-type]
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
        if name in taken or not keywords_of(script, name) or not makeable(script, name)
    ]
    return replace(script, given=replace(script.given, own=frozenset(own)))


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
    optimizers = listed(wanted) or list(readings)
    if optimizers == own or not optimizers:
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
    """The same to be shown; `name` is the user's word for the model, `names` the notebook."""
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
    given = ["model", *(name for name in script.optimizers if not is_made(script, name))]
    body = function(script, "compiled_model" if compiled else "model", "{loss}.backward()")
    return assembled(header(script, given), script, blocks, body)
