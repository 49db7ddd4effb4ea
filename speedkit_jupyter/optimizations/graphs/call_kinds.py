"""Of what kind a call is: all that what it does may depend on, but for the values of tensors.

Calls of one kind do the same work. What Python code reads elsewhere (globals, what a closure
holds) is not in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import flags

if TYPE_CHECKING:
    import torch

# Values that are what they are: compared by value, and kept.
PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
# How deep, and how far, what lies on a module is looked at, at every call.
DEPTH, MOST_VALUES = 2, 100


class Unfit(Exception):
    """Why a call is made as ever."""


@dataclass
class State:
    """What a model is made of: where its tensors lie (`weights`), and all else that its code may
    read on its modules (`marks`). `device` is that of its first weight; `parameters` are its
    parameters, each once.
    """

    weights: list[int] = field(default_factory=list)
    marks: list[Hashable] = field(default_factory=list)
    device: torch.device | None = None
    hooked: bool = False
    first: torch.Tensor | None = field(default=None, compare=False)
    parameters: list[torch.Tensor] = field(default_factory=list, compare=False)


def arguments(values: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Lists, tuples and dicts of tensors and plain values; each tensor goes into `tensors` once.

    Raises Unfit for anything else: what a call does with it can't be known.
    """
    import torch

    kind = type(values)
    if isinstance(values, torch.Tensor):
        return _tensor(values, tensors)
    if kind in (tuple, list):
        return (kind, *(arguments(value, tensors) for value in values))
    if kind is dict:
        return (kind, *((key, arguments(value, tensors)) for key, value in values.items()))
    if kind in PLAIN or kind in _plain_of_torch():
        return (kind, values)
    raise Unfit(f"a {kind.__name__} is among its arguments")


def filled(values: Any, instead: Mapping[int, torch.Tensor]) -> Any:
    """The same arguments with other tensors, by the ids of those that were there."""
    kind = type(values)
    if id(values) in instead:
        return instead[id(values)]
    if kind in (tuple, list):
        return kind(filled(value, instead) for value in values)
    if kind is dict:
        return {key: filled(value, instead) for key, value in values.items()}
    return values


def _tensor(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> Hashable:
    import torch

    for number, known in enumerate(tensors):
        if known is tensor:
            return number
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unfit(f"a {type(tensor).__name__} is among its arguments")
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise Unfit("a sparse or conjugated tensor is among its arguments")
    tensors.append(tensor)
    needs = tensor.requires_grad
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, needs


@cache
def _plain_of_torch() -> tuple[type, ...]:
    import torch

    return torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format


def modes(device_type: str) -> tuple[Hashable, ...]:
    """What around a call decides how it computes: autograd's modes, autocast, every switch."""
    import torch

    autocast = torch.is_autocast_enabled(device_type)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast and torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        torch.get_deterministic_debug_mode(),
        *(f"{name} {value}" for name, value in flags.snapshot().items() if _acts(name)),
        *(str(getattr(mode, "device", "")) for mode in _function_modes()),
    )


def _acts(switch: str) -> bool:
    """Whether it acts on calls as they are: compiled ones are none of these, and their switches are
    there only once torch.compile is loaded, by whatever.
    """
    return not switch.startswith(("dynamo.", "compiler."))


def hindrance() -> str:
    """Why no call at all is recorded or replayed just now; empty where nothing speaks against it.

    Each of these wants to see, or to change, every operation of the call.
    """
    import torch
    from torch.autograd import forward_ad
    from torch.nn.modules import module
    from torch.utils._device import DeviceContext

    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    top = getattr(autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "it is traced or compiled"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it runs under torch.func"
    if forward_ad._current_level >= 0:
        return "it is differentiated forwards"
    if torch._C._len_torch_dispatch_stack() or any(
        not isinstance(mode, DeviceContext) for mode in _function_modes()
    ):
        return "something looks at each of its operations"
    if not autograd._saved_tensors_hooks_is_enabled() or top(True) is not None:
        return "something looks at what is kept for its backward pass"
    if torch.is_anomaly_enabled():
        return "torch looks for anomalies"
    return "all modules have a hook" if module._has_any_global_hook() else ""


def _function_modes() -> list[Any]:
    import torch

    if not torch._C._len_torch_function_stack():
        return []
    from torch.overrides import _get_current_function_mode_stack

    return list(_get_current_function_mode_stack())


def state(model: torch.nn.Module) -> State:
    """Of a model, as it is at this call. Raises Unfit where its tensors have no plain memory.

    At every call, so it has to be quick: some 5 microseconds a module.
    """
    import torch

    common, plain = _of_every_module(), frozenset((*PLAIN, *_plain_of_torch()))
    found, seen, met, waiting = State(), set[int](), set[int](), [model]
    marks = found.marks
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.jit.ScriptModule):
            raise Unfit("a part of it is a TorchScript module")
        attributes = part.__dict__
        marks += (id(part), attributes["training"])
        _add_tensors(found, attributes["_parameters"], seen, found.parameters)
        _add_tensors(found, attributes["_buffers"], seen, None)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            found.hooked = True
        if attributes["_backward_hooks"] or attributes["_backward_pre_hooks"]:
            found.hooked = True
        waiting += [child for child in attributes["_modules"].values() if child is not None]
        for name, value in attributes.items():
            if name in common:
                continue
            kind: Any = type(value)
            if kind in plain:
                marks += (name, kind, value)
            else:
                marks.append(name)
                marks += _marks(value, met)
    found.device = found.first.device if found.first is not None else None
    return found


def _add_tensors(
    found: State, holder: Mapping[str, Any], seen: set[int], parameters: list[Any] | None
) -> None:
    for name, tensor in holder.items():
        if tensor is None:
            continue
        try:
            found.weights.append(tensor.data_ptr())
        except RuntimeError:
            raise Unfit("a weight of it has no memory of its own") from None
        found.marks += (name, tensor.requires_grad)
        found.first = tensor if found.first is None else found.first
        if parameters is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            parameters.append(tensor)


@cache
def _of_every_module() -> frozenset[str]:
    import torch

    return frozenset(torch.nn.Module().__dict__)


def _marks(value: Any, seen: set[int], depth: int = 0) -> Iterator[Hashable]:
    """Plain values, and those that small lists, dicts and plain objects hold; all else is what it
    is by its id.
    """
    import torch

    kind = type(value)
    if kind in PLAIN or kind in _plain_of_torch():
        yield (kind, value)
        return
    yield id(value)
    if id(value) in seen or depth > DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module | torch.Tensor | type):
        return
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, dict):
        value = vars(value)
    if isinstance(value, list | tuple | set | frozenset | dict):
        yield len(value)
        if len(value) > MOST_VALUES:
            return
        for part in value:
            yield part if type(part) in PLAIN else id(part)
        held = value.values() if isinstance(value, dict) else value
        for part in held:
            yield from _marks(part, seen, depth + 1)
