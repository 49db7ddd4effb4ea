"""An optimizer switched to torch's fused kernel in place: its settings, and where `step` lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.optimizations.properties.overrides import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)

if TYPE_CHECKING:
    import torch

ATTRIBUTES = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
Values = Mapping[str, Any]
# Where a parameter's `step` lay, and its dtype.
Step = tuple["torch.device", "torch.dtype"]


class Found(NamedTuple):
    """Settings of the defaults, and of the groups by their first parameter; attributes; steps.

    Parameters are known by their `id()`: `torch.utils.swap_tensors` refuses tensors that something
    refers to weakly, and a strong reference would keep them alive.
    """

    defaults: Values
    groups: dict[int, Values]
    attributes: Values
    steps: dict[int, Step]

    def of_group(self, group: Mapping[str, Any]) -> Values:
        """Return those of a group; one that was added meanwhile has the defaults'."""
        return self.groups.get(_key(group), self.defaults)

    def of_step(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, step: torch.Tensor
    ) -> Step:
        """Return where a parameter's `step` lies without the plan, a new one as torch makes it."""
        import torch

        capturable = any(group.get("capturable") for group in optimizer.param_groups)
        device = parameter.device if capturable else torch.device("cpu")
        return self.steps.get(id(parameter), (device, step.dtype))


class Fused(Property):
    """`fused=True` in an optimizer's defaults and groups, and what goes with it."""

    def found(self, thing: torch.optim.Optimizer, optimizers: Optimizers) -> Found:
        groups = {_key(g): _settings(g) for g in thing.param_groups if g["params"]}
        steps = {id(p): (step.device, step.dtype) for p, step in _stepped(thing)}
        attributes = {name: thing.__dict__.get(name, MISSING) for name in ATTRIBUTES}
        return Found(_settings(thing.defaults), groups, attributes, steps)

    def adopted(self, thing: Any, original: Found, optimizers: Optimizers) -> Found:
        now = self.found(thing, optimizers)
        for group in thing.param_groups:
            if group["params"] and group.get("fused") is True:
                now.groups[_key(group)] = original.of_group(group)
        ours = thing.defaults.get("fused") is True
        defaults = original.defaults if ours else now.defaults
        return Found(defaults, now.groups, original.attributes, original.steps)

    def holds(self, thing: torch.optim.Optimizer, override: bool) -> bool:
        return all(holder.get("fused") is True for holder in (thing.defaults, *thing.param_groups))

    def put(self, thing: Any, override: bool, optimizers: Optimizers) -> None:
        import torch

        for holder in (thing.defaults, *thing.param_groups):
            holder["fused"] = True
            if holder.get("foreach"):
                holder["foreach"] = False
        thing._step_supports_amp_scaling = True
        for parameter, step in _stepped(thing):
            _move(step, parameter.device, torch.float32)

    def put_back(self, thing: Any, original: Found, override: Any, optimizers: Optimizers) -> None:
        _put_back(thing.defaults, original.defaults)
        for group in thing.param_groups:
            _put_back(group, original.of_group(group))
        put_back_entries(thing.__dict__, original.attributes)
        for parameter, step in _stepped(thing):
            _move(step, *original.of_step(thing, parameter, step))


# State at module level, on purpose: what is set in an optimizer is known for the whole process.
FUSED = Fused()


def in_files(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's `state_dict()` as it is without plans; other values are shared."""
    import torch

    original = FUSED.original(optimizer)
    if original is MISSING:
        return state
    groups, kept = [dict(group) for group in state["param_groups"]], dict(state["state"])
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        _put_back(saved, original.of_group(group))
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            values: Any = kept.get(number)
            step = values.get("step") if isinstance(values, dict) else None
            if isinstance(step, torch.Tensor):
                device, dtype = original.of_step(optimizer, parameter, step)
                kept[number] = {**values, "step": step.to(device=device, dtype=dtype)}
    return state | {"state": kept, "param_groups": groups}


def users_own(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Values:
    """Return what the user set in a group, beneath what plans in force have put there."""
    original = FUSED.original(optimizer)
    if original is MISSING or group.get("fused") is not True:
        return group
    return {name: v for name, v in original.of_group(group).items() if v is not MISSING}


def _settings(holder: Mapping[str, Any]) -> Values:
    return {name: holder.get(name, MISSING) for name in ("fused", "foreach")}


def _put_back(holder: Any, values: Values) -> None:
    if holder.get("fused") is True:
        foreach = {} if holder.get("foreach") else {"foreach": values["foreach"]}
        put_back_entries(holder, {"fused": values["fused"], **foreach})


def _key(group: Mapping[str, Any]) -> int:
    """Return what stays of a group when a loaded state replaces its dict: its first parameter."""
    return id(group["params"][0]) if group["params"] else 0


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter with its `step`, where that is a tensor."""
    for parameter, state in optimizer.state.items():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None and hasattr(step, "dtype"):
            yield parameter, step


def _move(step: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
    if step.device != device or step.dtype != dtype:
        step.data = step.to(device=device, dtype=dtype)
