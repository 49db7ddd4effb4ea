"""An optimizer's own step, some parameters at a time, whose moments are plain for just so long.

torch hands what runs before a step the optimizer that it is going to run on, and takes another one
in its stead: one with the parameters that are left, and the same state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.moments.narrow import is_large, narrowed, widen

if TYPE_CHECKING:
    import torch

    Group = dict[str, Any]

# So much of the parameters, at most, is stepped at a time; or one of them.
SHARE = 8
# State at module level, on purpose: two plans may have one optimizer, whose step is one.
_NARROW: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def narrow_moments(
    optimizer: torch.optim.Optimizer, bits: str, only_in: int | None
) -> Iterator[None]:
    """Between the steps its large moments are narrow; plain again in the end.

    Acts in the thread of this number alone, in all where it is None.
    """

    if optimizer in _NARROW:  # by a plan on another model of it
        yield
        return

    def before(twin: Any, args: Any, kwargs: Any) -> Any:
        if only_in not in (None, threading.get_ident()) or twin is not optimizer:
            return None
        step: Any = type(optimizer).step
        is_torchs = getattr(step, "__wrapped__", None) is not None
        if len(args) > 1 or kwargs or not is_torchs:  # a closure makes the gradients, in the step
            _widen(optimizer)
            return None
        for groups in _portions(optimizer, bits):
            parameters = [parameter for group in groups for parameter in group["params"]]
            for parameter in parameters:
                widen(optimizer.state.get(parameter, {}))
            step.__wrapped__(_with(optimizer, groups))
            for parameter in parameters:
                narrowed(optimizer.state.get(parameter, {}), parameter, bits)
        return (_with(optimizer, _small(optimizer, bits)),), {}

    def after(twin: Any, args: Any, kwargs: Any) -> None:
        if twin is optimizer:  # in one piece
            for parameter, state in optimizer.state.items():
                if is_large(parameter, bits):
                    narrowed(state, parameter, bits)

    def in_files(twin: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {number: dict(entry) for number, entry in state_dict["state"].items()}
        for entry in state.values():
            widen(entry)
        return state_dict | {"state": state}

    with ExitStack() as stack:
        _NARROW.add(optimizer)
        stack.callback(_NARROW.discard, optimizer)
        stack.callback(_widen, optimizer)
        stack.callback(optimizer.register_step_pre_hook(before).remove)
        stack.callback(optimizer.register_step_post_hook(after).remove)
        stack.callback(optimizer.register_state_dict_post_hook(in_files).remove)
        yield


def _portions(optimizer: torch.optim.Optimizer, bits: str) -> Iterator[list[Group]]:
    """Groups of large parameters that have a gradient, so many at a time."""
    large = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and is_large(parameter, bits)
    ]
    most = sum(parameter.numel() for _, parameter in large) / SHARE
    portion: list[Group] = []
    taken = 0
    for group, parameter in large:
        if portion and taken + parameter.numel() > most:
            yield portion
            portion, taken = [], 0
        portion.append({**group, "params": [parameter]})
        taken += parameter.numel()
    if portion:
        yield portion


def _small(optimizer: torch.optim.Optimizer, bits: str) -> list[Group]:
    groups = optimizer.param_groups
    return [{**g, "params": [p for p in g["params"] if not is_large(p, bits)]} for g in groups]


def _with(optimizer: torch.optim.Optimizer, groups: list[Group]) -> Any:
    """The same optimizer and state, for other parameters."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = groups
    return twin


def _widen(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        widen(state)
