"""An optimizer switched to torch's fused kernel in place: its settings, and where `step` lies."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.optimizations.properties.wishes import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)

if TYPE_CHECKING:
    import torch

ATTRIBUTES = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
Values = Mapping[str, Any]


class Step(NamedTuple):
    """Where a parameter's `step` lay and what it was made of."""

    device: torch.device
    dtype: torch.dtype


class Found(NamedTuple):
    """Settings of the defaults, and of the groups by their first parameter; attributes; steps."""

    defaults: Values
    groups: MutableMapping[torch.Tensor, Values]
    attributes: Values
    steps: MutableMapping[torch.Tensor, Step]

    def of_group(self, group: Mapping[str, Any]) -> Values:
        """Those of a group; one that was added meanwhile has the defaults'."""
        return self.groups.get(_key(group), self.defaults)


class Fused(Property):
    """`fused=True` in an optimizer's defaults and groups, and what goes with it."""

    def found(self, thing: torch.optim.Optimizer, optimizers: Optimizers) -> Found:
        """Its settings by presence, and its steps."""
        from torch.utils.weak import WeakIdKeyDictionary

        groups: MutableMapping[torch.Tensor, Values] = WeakIdKeyDictionary()
        for group in filter(_key_exists, thing.param_groups):
            groups[_key(group)] = _settings(group)
        attributes = {name: thing.__dict__.get(name, MISSING) for name in ATTRIBUTES}
        return Found(_settings(thing.defaults), groups, attributes, _steps(thing))

    def adopted(
        self, thing: torch.optim.Optimizer, original: Found, wish: bool, optimizers: Optimizers
    ) -> Found:
        """What the user set, or a loaded state brought; the rest as it was found at first."""
        now = self.found(thing, optimizers)
        for group in filter(_key_exists, thing.param_groups):
            if group.get("fused") is True:
                now.groups[_key(group)] = original.of_group(group)
        ours = thing.defaults.get("fused") is True
        defaults = original.defaults if ours else now.defaults
        return Found(defaults, now.groups, original.attributes, original.steps)

    def holds(self, thing: torch.optim.Optimizer, wish: bool) -> bool:
        """Whether all of it is fused still."""
        return all(holder.get("fused") is True for holder in (thing.defaults, *thing.param_groups))

    def put(self, thing: Any, wish: bool, optimizers: Optimizers) -> None:
        """Switch the settings, the flag for GradScaler, and where `step` lies."""
        import torch

        for holder in (thing.defaults, *thing.param_groups):
            holder["fused"] = True
            if holder.get("foreach"):
                holder["foreach"] = False
        thing._step_supports_amp_scaling = True
        for parameter in _steps(thing):
            _move_step(thing, parameter, parameter.device, torch.float32)

    def put_back(
        self, thing: torch.optim.Optimizer, original: Found, wish: bool, optimizers: Optimizers
    ) -> None:
        """By presence; what the user set otherwise stays."""
        _put_back(thing.defaults, original.defaults)
        for group in thing.param_groups:
            _put_back(group, original.of_group(group))
        put_back_entries(thing.__dict__, original.attributes)
        for parameter in _steps(thing):
            step = original.steps.get(parameter)
            capturable = any(group.get("capturable") for group in thing.param_groups)
            device = step.device if step else (parameter.device if capturable else "cpu")
            _move_step(thing, parameter, device, step.dtype if step else None)


# State at module level, on purpose: what is set in an optimizer is known for the whole process.
FUSED = Fused()


def users_own(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Values:
    """What the user set in a group, beneath what plans in force have put there."""
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


def _key_exists(group: Mapping[str, Any]) -> bool:
    return bool(group["params"])


def _key(group: Mapping[str, Any]) -> Any:
    """What stays of a group when a loaded state replaces its dict: its first parameter."""
    return group["params"][0] if group["params"] else _NOTHING


class _Nothing:
    """Stands for the first parameter of a group that has none."""


_NOTHING = _Nothing()


def _steps(optimizer: torch.optim.Optimizer) -> MutableMapping[torch.Tensor, Step]:
    from torch.utils.weak import WeakIdKeyDictionary

    steps: MutableMapping[torch.Tensor, Step] = WeakIdKeyDictionary()
    for parameter, state in optimizer.state.items():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None and hasattr(step, "dtype"):
            steps[parameter] = Step(step.device, step.dtype)
    return steps


def _move_step(optimizer: Any, parameter: Any, device: Any, dtype: Any) -> None:
    step = optimizer.state[parameter]["step"]
    if step.device != device or (dtype is not None and step.dtype != dtype):
        step.data = step.to(device=device, dtype=dtype or step.dtype)
