"""A plan on a step of several models: which of them each decision changes."""

from __future__ import annotations

from collections.abc import Sequence

from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.optimizations.fused_optimizer import NONE_GIVEN
from speedkit_jupyter.plans.context import SpeedContext

UNSTEPPED = "no optimizer of the step holds its parameters"
# So many models in a line.
MOST_NAMES = 3


def changes_some(contexts: Sequence[SpeedContext], walk: Walk) -> str:
    """`fused_optimizer changes student, not teacher (why)`; empty where all have all of it."""
    told = []
    for of_each in zip(*(context.plan for context in contexts), strict=True):
        pairs = list(zip(contexts, of_each, strict=True))
        have = [context for context, decision in pairs if decision.active]
        lacks = [
            f"{_name(context, walk)} ({_why(decision.reason)})"
            for context, decision in pairs
            if not decision.active
        ]
        if have and lacks:
            names = _few([_name(context, walk) for context in have])
            told.append(f"{of_each[0].name} changes {names}, not {_few(lacks)}")
    return "; ".join(told)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _name(context: SpeedContext, walk: Walk) -> str:
    return walk.name(context.model)


def _why(reason: str) -> str:
    """As it is in a step that has optimizers, of other models."""
    return UNSTEPPED if reason == NONE_GIVEN else reason
