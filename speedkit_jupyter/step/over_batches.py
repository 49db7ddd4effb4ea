"""A function that takes batches, as a step: an epoch of a loader."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.samples import EMPTY


def over_batches(
    step: Callable[..., object], loader: DataLoader[Any] | None, name: str, advice: str
) -> Callable[..., object]:
    """Return an epoch of the loader for a step that takes batches; another step as it is."""
    takes = arguments_of(step) if callable(step) else 0
    words = "a batch" if takes == 1 else f"{takes} arguments"
    # What a benchmark's step takes may be SpeedKit's own context.
    if not takes or (takes == 1 and {*inspect.signature(step).parameters} & {"ctx", "context"}):
        return step
    if loader is None:
        raise StepError(f"{name} takes {words}: {advice}, or name a function that takes none")
    return partial(loop, loader, step, takes > 1)


def loop(
    loader: DataLoader[Any], step: Callable[..., object] = lambda batch: None, spread: bool = False
) -> None:
    """Go through an epoch; a batch of several is `spread` over the arguments of the step."""
    is_empty = True
    for batch in loader:
        is_empty = False
        if spread and isinstance(batch, tuple | list):
            step(*batch)
        else:
            step(batch)
    if is_empty:
        raise StepError(EMPTY)


def arguments_of(step: Callable[..., object]) -> int:
    """Return how many arguments a step needs; a `*batch` counts as two."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some of those that are written in C
        return 1
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 2
    return sum(
        one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and one.default is one.empty
        for one in parameters
    )
