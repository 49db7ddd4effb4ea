"""Change strides and devices of tensors in place, and switch optimizers to fused kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.catalog.model_changes.overrides import (
    MISSING,
    Optimizers,
    Property,
    put_back_entries,
)
from speedkit_jupyter.torchglue.modules import FUSED_ATTRIBUTES, SCALES_IN_STEP, parameter_table
from speedkit_jupyter.torchglue.private import users_of_storage
from speedkit_jupyter.torchglue.storage import is_in_memory

Stride = tuple[int, ...]


class WeightLayout(NamedTuple):
    """A weight's strides; `odd` maps names of gradient and state tensors to strides that differ."""

    stride: Stride
    odd: dict[str, Stride]


def weight_of(module: torch.nn.Module) -> torch.nn.Parameter:
    """Return the module's own weight."""
    weight = parameter_table(module)["weight"]
    assert weight is not None
    return weight


def channels_last_stride(tensor: torch.Tensor) -> Stride:
    """Return the channels-last strides of a 4-D or 5-D tensor, in elements."""
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty(tensor.shape, memory_format=layout, device="meta").stride()


def is_channels_last(convolution: torch.nn.Module) -> bool:
    """Return whether the weight is channels-last; `is_contiguous` can't tell for 1 × 1 kernels."""
    weight = weight_of(convolution)
    return weight.stride() == channels_last_stride(weight)


class WeightStrides(Property):
    """The strides of a module's weight, and of the weight's gradient and optimizer state.

    `thing` is the module, because `swap_tensors` fails for weights with weak references.
    """

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> WeightLayout:
        weight = weight_of(thing)
        strides = {name: t.stride() for name, t in _followers(weight, optimizers)}
        odd = {name: stride for name, stride in strides.items() if stride != weight.stride()}
        return WeightLayout(weight.stride(), odd)

    def put(self, thing: torch.nn.Module, override: Stride, optimizers: Optimizers) -> None:
        weight = weight_of(thing)
        restride(weight, override)
        for _, tensor in _followers(weight, optimizers):
            restride(tensor, override)

    def holds(self, thing: torch.nn.Module, override: Stride) -> bool:
        weight = parameter_table(thing).get("weight")
        return weight is not None and weight.dim() == len(override) and weight.stride() == override

    def put_back(self, thing: Any, original: Any, override: Any, optimizers: Optimizers) -> None:
        if not self.holds(thing, override):
            return
        weight = weight_of(thing)
        restride(weight, original.stride)
        offloaded = getattr(getattr(thing, "_hf_hook", None), "weights_map", None)
        if weight.is_meta and offloaded and "weight" in offloaded:  # Accelerate holds the values
            restride(offloaded["weight"], original.stride)
        for name, tensor in _followers(weight, optimizers):
            restride(tensor, original.odd.get(name, original.stride))


# Global, like PLACE and FUSED, because several plans may override the same object.
LAYOUT = WeightStrides()


def restride(tensor: torch.Tensor, stride: Stride) -> None:
    """Give a tensor new memory with these strides if they differ; keep the object and values."""
    if tensor.stride() != stride:
        dtype, device = tensor.dtype, tensor.device
        new = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device)
        _replace_memory(tensor, new)


def _replace_memory(tensor: torch.Tensor, new: torch.Tensor) -> None:
    if is_in_memory(tensor):
        new.copy_(tensor.detach())
    else:  # optimizer state with released memory: release the new memory, too
        new.untyped_storage().resize_(tensor.untyped_storage().nbytes())
    tensor.data = new


def has_own_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its storage, and the storage is not in shared memory."""
    if tensor.device.type == "cpu" and tensor.is_shared():  # after model.share_memory()
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def has_views(tensor: torch.Tensor) -> bool:
    """Return whether a view, a `state_dict()` or an array shares the tensor's storage."""
    return users_of_storage(tensor) > users_of_storage(torch.empty(1))


def companions(
    parameter: torch.Tensor, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for a parameter's gradient and optimizer state, except `step`."""
    held = parameter.is_leaf or parameter.retains_grad  # torch warns for other tensors
    if held and parameter.grad is not None:
        yield "grad", parameter.grad
    for optimizer in optimizers:
        state: Any = optimizer.state.get(parameter)
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and name != "step":
                yield str(name), value


def _followers(weight: torch.Tensor, optimizers: Optimizers) -> Sequence[tuple[str, torch.Tensor]]:
    """Return gradient and state tensors of the weight's shape, which need the weight's strides.

    Fused optimizers index all these tensors alike: another layout would mix up elements.
    """
    shape, strided, every = weight.shape, torch.strided, companions(weight, optimizers)
    return [(name, t) for name, t in every if t.shape == shape and t.layout == strided]


class Alignment:
    """A step pre-hook that gives gradients and state their parameter's strides.

    torch's fused kernels index all these tensors alike: other strides would mix up elements. State
    is read only at the first step, after `loaded()`, and when a parameter's contiguity changes.
    """

    def __init__(self) -> None:
        self._contiguous: list[bool] = []

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the next step read the state, because the optimizer has loaded it."""
        self._contiguous = []

    def __call__(self, optimizer: torch.optim.Optimizer, *step: Any) -> None:
        every = [one for group in optimizer.param_groups for one in group["params"]]
        contiguous = [one.is_contiguous() for one in every]
        for parameter, is_contiguous in zip(every, contiguous, strict=True):
            gradient = parameter.grad
            if gradient is None or (is_contiguous and gradient.is_contiguous()):
                continue
            if not _has_strides_of(parameter, gradient):
                aligned = torch.empty_like(parameter, requires_grad=False, dtype=gradient.dtype)
                parameter.grad = aligned.copy_(gradient)
        if contiguous != self._contiguous:
            for parameter in every:
                for _, tensor in _followers(parameter, [optimizer]):
                    if tensor is not parameter.grad and not _has_strides_of(parameter, tensor):
                        restride(tensor, parameter.stride())
            self._contiguous = contiguous


def _has_strides_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors of equal shape have equal strides, except in dimensions of size 1."""
    strides = one.stride(), other.stride()
    return strides[0] == strides[1] or all(
        length == 1 or own == its for length, own, its in zip(one.shape, *strides, strict=True)
    )


class TensorDevice(Property):
    """The device of a parameter or buffer, and of its gradient and optimizer state."""

    def found(self, thing: torch.Tensor, optimizers: Optimizers) -> str:
        return str(thing.device)

    def put(self, thing: torch.Tensor, override: str, optimizers: Optimizers) -> None:
        for tensor in (thing, *(other for _, other in companions(thing, optimizers))):
            if not is_in_memory(tensor):
                _replace_memory(tensor, torch.empty_like(tensor.data, device=override))
            else:
                tensor.data = tensor.data.to(override)

    def holds(self, thing: torch.Tensor, override: str) -> bool:
        return override in (str(thing.device), thing.device.type)

    def put_back(self, thing: Any, original: str, override: str, optimizers: Optimizers) -> None:
        if self.holds(thing, override) or str(thing.device) == original:
            self.put(thing, original, optimizers)


PLACE = TensorDevice()


Values = Mapping[str, Any]


class OptimizerSettings(NamedTuple):
    """The user's settings of an optimizer; `_key` computes the keys of `groups`."""

    defaults: Values
    groups: dict[int, Values]
    attributes: Values

    def of_group(self, group: Mapping[str, Any]) -> Values:
        """Return a group's settings; a group added later has the default settings."""
        return self.groups.get(_key(group), self.defaults)


class Fused(Property):
    """The setting `fused=True`. It needs each `step` as float32 on its parameter's device."""

    def found(self, thing: torch.optim.Optimizer, optimizers: Optimizers) -> OptimizerSettings:
        groups = {_key(g): _settings(g) for g in thing.param_groups if g["params"]}
        attributes = {name: thing.__dict__.get(name, MISSING) for name in FUSED_ATTRIBUTES}
        return OptimizerSettings(_settings(thing.defaults), groups, attributes)

    def adopted(self, thing: Any, original: Any, optimizers: Optimizers) -> OptimizerSettings:
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

    def put_back(self, thing: Any, original: Any, override: Any, optimizers: Optimizers) -> None:
        _put_back(thing.defaults, original.defaults)
        for group in thing.param_groups:
            _put_back(group, original.of_group(group))
        put_back_entries(thing.__dict__, original.attributes)
        for group, parameter, step in _stepped(thing):
            step.data = _as_torch_makes_it(group, parameter, step)


FUSED = Fused()


def in_files(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state_dict as without plans: the user's settings, and `step`s to match."""
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
        own = _as_torch_makes_it(settings_of_user(optimizer, owner), parameter, step)
        kept[number] = {**kept[number], "step": own}
    return state | {"state": kept, "param_groups": groups}


def settings_of_user(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Values:
    """Return a parameter group with the user's settings, without the settings of plans."""
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
    """Return a group's key: its first parameter's id, which `load_state_dict` keeps; 0 if empty."""
    return id(group["params"][0]) if group["params"] else 0


def _stepped(optimizer: Any) -> Iterator[tuple[Values, torch.Tensor, torch.Tensor]]:
    """Yield group, parameter and `step` of each parameter whose step is a tensor."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            step = state.get("step") if isinstance(state, dict) else None
            if step is not None and hasattr(step, "dtype"):
                yield group, parameter, step


def _as_torch_makes_it(group: Values, parameter: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return `step` with the device and dtype that torch uses for these settings."""
    if group.get("capturable") or group.get("fused"):
        return step.to(parameter.device)
    is_double = torch.get_default_dtype() is torch.float64
    return step.to("cpu", torch.float64 if is_double else torch.float32)
