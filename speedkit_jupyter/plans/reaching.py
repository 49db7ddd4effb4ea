"""How a plan's precision reaches the user's loop: what has to be written there.

All else that a plan decides acts on the model, its optimizers or the process, whoever runs the
loop. Autocast surrounds a block of code, and that code is the user's, or a library's trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.wrappers import unwrapped

if TYPE_CHECKING:
    import torch

# The argument by which each library's trainer computes in the plan's precision.
ARGUMENTS = {
    ("Lightning", "bf16"): 'Trainer(precision="bf16-mixed")',
    ("Lightning", "fp16"): 'Trainer(precision="16-mixed")',
    ("transformers", "bf16"): "TrainingArguments(bf16=True)",
    ("transformers", "fp16"): "TrainingArguments(fp16=True)",
}
LIGHTNING = {("lightning", "LightningModule"), ("pytorch_lightning", "LightningModule")}


def to_write(
    context: SpeedContext, ctx: str = "ctx", names: Mapping[str, Any] | None = None
) -> str:
    """Return a line that says what to write so that the precision acts; empty where nothing is.

    `ctx` is the user's word for the context, `names` the notebook, where trainers may be.
    """
    precision = context.plan["precision"]
    if not precision.active:
        return ""
    library = trained_by(context.model, names or {})
    if library:
        argument = ARGUMENTS[library, precision.value]
        return f"Write `{argument}`: {library} runs its own loop, outside of `{ctx}.autocast()`."
    block = f"with {ctx}.autocast():"
    return f"Write `{block}` around your forward pass: {precision.value} acts only in there."


def trained_by(model: torch.nn.Module, names: Mapping[str, Any]) -> str:
    """Return the library whose trainer runs the loop of this model; empty where it is the user's.

    A LightningModule is trained by Lightning, as is what is a part of one. transformers trains what
    one of the notebook's own Trainers holds.
    """
    values = [value for name, value in list(names.items()) if name[:1] != "_"]
    for value in (model, *values):
        classes = {(_package(base), base.__name__) for base in type(value).__mro__}
        if classes & LIGHTNING and any(part is unwrapped(model) for part in value.modules()):
            return "Lightning"
        if ("transformers", "Trainer") in classes:
            held = lookup.attributes_of(value).get("model")
            if held is not None and unwrapped(held) is unwrapped(model):
                return "transformers"
    return ""


def unreached(models: Sequence[torch.nn.Module]) -> str:
    """Return a line about a plan in force whose autocast() the code that ran has not entered.

    `SpeedContext.asked` notes what has been entered; whoever runs the code clears it before.
    """
    contexts = [context for model in models if (context := applied_to(model)) is not None]
    lowered = [context for context in contexts if context.plan["precision"].active]
    if not lowered or any("autocast" in context.asked for context in contexts):
        return ""
    return not_entered(lowered[0].plan["precision"].value)


def not_entered(precision: str) -> str:
    """Return the line for code that runs outside of autocast() although the plan lowers to it."""
    return f"{precision} acts only inside `ctx.autocast()`, which this step does not enter"


def _package(cls: type) -> str:
    return str(cls.__module__).partition(".")[0]
