"""The code of a `%%speedbench` cell as a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics.cell import Cell
from speedkit_jupyter.magics.namespace import find_model, named_optimizers
from speedkit_jupyter.measure.subject.discovery import (
    NO_PARAMETERS,
    bystanders_among,
    is_quantized,
    optimizers_among,
    outermost,
    reached,
)
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support.exceptions import StepError, did_you_mean


def step_of_cell(shell: Any, cell: Cell, arguments: Any, quiet: bool = False) -> Step:
    """The cell with the models and optimizers that it uses, or those that were named."""
    names = shell.user_ns
    objects = reached([cell.names()])
    models, optimizers = outermost(objects), optimizers_among(objects)
    if arguments.model:
        models = [find_model(names, name)[1] for name in arguments.model]
    if not models and (arguments.compare or arguments.tune):
        if missing := cell.undefined():
            hint = did_you_mean(missing[0], [n for n in names if n[:1] != "_"])
            raise UsageError(f"%%speedbench: the name {missing[0]!r} is not defined.{hint}")
        if inner := cell.magic():
            raise UsageError(
                f"%%speedbench: what stands behind {inner} is not looked into, and the rest of the "
                f"cell uses no model: write it without {inner}, or name the model with --model"
            )
        if is_quantized(objects):
            raise UsageError(f"%%speedbench: {NO_PARAMETERS}")
        raise UsageError(
            "%%speedbench: the cell uses no model that was there before: make it in an earlier "
            "cell, and name it with --model where the code hides it"
        )
    if arguments.optimizer:
        optimizers = list(named_optimizers(names, arguments.optimizer).values())

    lends_context = cell.reads("ctx") and _is_free(names.get("ctx"), models)

    def step(context: SpeedContext) -> Any:
        __tracebackhide__ = True
        if lends_context:
            names["ctx"] = context
        return cell.run()

    return Step(
        step,
        models,
        optimizers,
        bystanders_among(objects, [*models, *optimizers]),
        names=names,
        assigned=[*cell.assigned(), *(["ctx"] if lends_context else [])],
        others=[cell.names()],
        iterators=cell.iterators(),
        around_blocks=cell.quiet,
        say=_say_nothing if quiet else print,
    )


def step_again(shell: Any, cell: Cell, arguments: Any) -> Step:
    """The cell as a step, with what its names mean by now; raises StepError."""
    try:
        return step_of_cell(shell, cell, arguments, quiet=True)
    except UsageError as error:
        raise StepError(str(error)) from None


def _say_nothing(line: str) -> None:
    """In a panel, between the cells."""


def _is_free(ctx: Any, models: Sequence[Any]) -> bool:
    """Whether the cell's `ctx` is to be the variant's: not the user's own of that name, nor one of
    these models', which stands for the variant's anyway.
    """
    if isinstance(ctx, SpeedContext):
        return not any(ctx.model is model for model in models)
    return ctx is None
