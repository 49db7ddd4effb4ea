"""An optimizer switched to torch's fused kernel in place: its settings, and where `step` lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.catalog.properties.overrides import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)
from speedkit_jupyter.torchglue.modules import FUSED_ATTRIBUTES, SCALES_IN_STEP

Values = Mapping[str, Any]


class OptimizerSettings(NamedTuple):
    """Settings of the defaults, and of the groups by their first parameter; attributes.

    Parameters are known by their `id()`: `torch.utils.swap_tensors` refuses tensors that something
    refers to weakly.
    """

    defaults: Values
    groups: dict[int, Values]
    attributes: Values

    def of_group(self, group: Mapping[str, Any]) -> Values:
        """Return those of a group; one that was added meanwhile has the defaults'."""
        return self.groups.get(_key(group), self.defaults)


class Fused(Property):
    """`fused=True` in an optimizer's defaults and groups, and what goes with it."""

    def found(self, thing: torch.optim.Optimizer, optimizers: Optimizers) -> OptimizerSettings:
        groups = {_key(g): _settings(g) for g in thing.param_groups if g["params"]}
        attributes = {name: thing.__dict__.get(name, MISSING) for name in FUSED_ATTRIBUTES}
        return OptimizerSettings(_settings(thing.defaults), groups, attributes)

    def adopted(
        self, thing: Any, original: OptimizerSettings, optimizers: Optimizers
    ) -> OptimizerSettings:
        now = self.found(thing, optimizers)
        for group in thing.param_groups:
            if group["params"] and group.get("fused") is True:
                now.groups[_key(group)] = original.of_group(group)
        ours = thing.defaults.get("fused") is True
        defaults = original.defaults if ours else now.defaults
        return OptimizerSettings(defaults, now.groups, original.attributes)

    def holds(self, thing: torch.optim.Optimizer, override: bool) -> bool:
        return all(holder.get("fused") is True for holder in (thing.defaults, *thing.param_groups))

    def put(self, thing: Any, override: bool, optimizers: Optimizers) -> None:
        for holder in (thing.defaults, *thing.param_groups):
            holder["fused"] = True
            if holder.get("foreach"):
                holder["foreach"] = False
        setattr(thing, SCALES_IN_STEP, True)
        for _, parameter, step in _stepped(thing):
            step.data = step.to(parameter.device, torch.float32)

    def put_back(
        self, thing: Any, original: OptimizerSettings, override: Any, optimizers: Optimizers
    ) -> None:
        _put_back(thing.defaults, original.defaults)
        for group in thing.param_groups:
            _put_back(group, original.of_group(group))
        put_back_entries(thing.__dict__, original.attributes)
        for group, parameter, step in _stepped(thing):
            step.data = _as_torch_makes_it(group, parameter, step)


# State at module level, on purpose: what is set in an optimizer is known for the whole process.
FUSED = Fused()


def in_files(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's `state_dict()` as it is without plans; other values are shared."""
    original = FUSED.original(optimizer)
    if original is MISSING:
        return state
    groups, kept = [dict(group) for group in state["param_groups"]], dict(state["state"])
    numbers: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        numbers.update(zip(map(id, group["params"]), saved["params"], strict=True))
        _put_back(saved, original.of_group(group))
    for owner, parameter, step in _stepped(optimizer):
        number = numbers[id(parameter)]
        own = _as_torch_makes_it(users_own(optimizer, owner), parameter, step)
        kept[number] = {**kept[number], "step": own}
    return state | {"state": kept, "param_groups": groups}


def users_own(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Values:
    """Return what the user set in a group, beneath what plans in force have put there."""
    original = FUSED.original(optimizer)
    if original is MISSING or group.get("fused") is not True:
        return group
    own = {**group, **original.of_group(group)}
    return {name: value for name, value in own.items() if value is not MISSING}


def _settings(holder: Mapping[str, Any]) -> Values:
    return {name: holder.get(name, MISSING) for name in ("fused", "foreach")}


def _put_back(holder: Any, values: Values) -> None:
    if holder.get("fused") is True:
        foreach = {} if holder.get("foreach") else {"foreach": values["foreach"]}
        put_back_entries(holder, {"fused": values["fused"], **foreach})


def _key(group: Mapping[str, Any]) -> int:
    """Return what stays of a group when a loaded state replaces its dict: its first parameter."""
    return id(group["params"][0]) if group["params"] else 0


def _stepped(optimizer: Any) -> Iterator[tuple[Values, torch.Tensor, torch.Tensor]]:
    """Yield each parameter with its group and its `step`, where that is a tensor."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            step = state.get("step") if isinstance(state, dict) else None
            if step is not None and hasattr(step, "dtype"):
                yield group, parameter, step


def _as_torch_makes_it(group: Values, parameter: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return `step` with the device and dtype that it has in an optimizer with such settings."""
    if group.get("capturable") or group.get("fused"):
        return step.to(parameter.device)
    is_double = torch.get_default_dtype() is torch.float64
    return step.to("cpu", torch.float64 if is_double else torch.float32)
