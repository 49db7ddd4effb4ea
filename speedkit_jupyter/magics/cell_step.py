"""The code of a `%%speedbench` cell as a step, for all that measures one, and its profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from IPython.core.error import UsageError

from speedkit_jupyter.magics.cell import Cell
from speedkit_jupyter.magics.namespace import find_model, named_optimizers
from speedkit_jupyter.magics.namespace import models as models_of
from speedkit_jupyter.measure.subject.discovery import (
    bystanders_among,
    optimizers_among,
    outermost,
    reached,
)
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import StepError, did_you_mean

R = TypeVar("R")
NO_MODEL = (
    "the cell uses no model that was there before: make it in an earlier cell, and name it with "
    "--model where the code hides it"
)


def step_of_cell(shell: Any, cell: Cell, arguments: Any, quiet: bool = False) -> Step:
    """Return the cell with the models and optimizers that it uses, or those that were named."""
    names = shell.user_ns
    objects = reached([cell.names()])
    models, optimizers = outermost(objects), optimizers_among(objects)
    if arguments.model:
        models = [find_model(names, name)[1] for name in arguments.model]
    if not models and (arguments.compare or arguments.tune):
        raise UsageError(_why_no_model(names, cell))
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
        say=messages.debug if quiet else messages.important,
    )


def profiler(shell: Any, cell: Cell, arguments: Any, command: str, budget_s: float | None) -> Any:
    """Return the profiler of a cell whose loops tell what they wait for."""
    from speedkit_jupyter.profiling.instruments import Loops
    from speedkit_jupyter.profiling.profiler import Profiler

    loops = Loops()
    step = step_of_cell(shell, cell.rewritten(loops.rewritten), arguments)
    called = {id(model): name for name, model in models_of(shell.user_ns).items()}
    return Profiler(step, budget_s, command, called, loops)


def again(make: Callable[..., R], *arguments: Any) -> R:
    """Call one of the above later, with what the cell's names mean by then; raises StepError."""
    try:
        return make(*arguments)
    except UsageError as error:
        raise StepError(str(error)) from None


def _why_no_model(names: Mapping[str, Any], cell: Cell) -> str:
    if missing := cell.undefined():
        hint = did_you_mean(missing[0], [name for name in names if name[:1] != "_"])
        return f"the name {missing[0]!r} is not defined.{hint}"
    return NO_MODEL


def _is_free(ctx: Any, models: Sequence[Any]) -> bool:
    """Whether the cell's `ctx` is to be the variant's: not the user's own of that name, nor one of
    these models', which stands for the variant's anyway.
    """
    if isinstance(ctx, SpeedContext):
        return not any(ctx.model is model for model in models)
    return ctx is None
