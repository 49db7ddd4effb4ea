"""Objects on their way between the notebook and a worker, and back into those that exist there.

By value, in memory that both share: torch.save writes them, with cloudpickle for the functions and
classes of cells. What these read by name is bound in the namespace of the other side, where they
run as if they were defined there. What comes back is written into models, optimizers and containers
of that name; a model that is sharded over the workers is gathered on the way, and split again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import cloudpickle
import torch

from speedkit_jupyter.catalog.properties.sharding import dtensor, is_sharded, split, whole
from speedkit_jupyter.torchglue import private as torch_private

CONTAINERS = (list, dict, set, deque, bytearray)
# State at module level, on purpose: pickle passes nothing to what it calls. Of this process.
_NAMESPACE: list[MutableMapping[str, Any]] = []


@dataclass
class Parcel:
    """What was packed: in memory of process `pid`, or `inline` for another host or system."""

    pid: int
    descriptor: int = -1
    inline: bytes = b""

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def close(self) -> None:
        """Free the memory."""
        if self.descriptor >= 0 and self.pid == os.getpid():
            os.close(self.descriptor)
            self.descriptor = -1


class _Globals(dict[str, Any]):
    """The globals of functions of a cell, which are the other side's own there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _namespace, ()


def _namespace() -> MutableMapping[str, Any]:
    return _NAMESPACE[0]


def _pickling(space: MutableMapping[str, Any]) -> type:
    """Return what torch.save takes as a module: a pickler for objects of this namespace."""
    groups = torch.nn.parallel.DistributedDataParallel, torch.distributed.ProcessGroup
    bound_to_a_group = (*groups, *dtensor())

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.globals_ref[id(space)] = _Globals()

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, bound_to_a_group):
                raise TypeError(f"{type(value).__name__} belongs to its process group")
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                return value.detach().__reduce_ex__(5)
            return super().reducer_override(value)

    return type("pickling", (), {"Pickler": Pickler})


def pack(value: Any, space: MutableMapping[str, Any], is_here: bool = True) -> Parcel:
    """Return a value with all that it reaches; `is_here` if it is read on this host."""
    parcel, pickling = Parcel(os.getpid()), _pickling(space)
    if not (is_here and hasattr(os, "memfd_create")):
        file = BytesIO()
        torch.save(value, file, pickling, 5)
        parcel.inline = file.getvalue()
        return parcel
    parcel.descriptor = os.memfd_create("speedkit")
    try:
        torch.save(value, parcel.path, pickling, 5)
    except BaseException:
        parcel.close()
        raise
    return parcel


def refused(values: Mapping[str, Any], space: MutableMapping[str, Any]) -> dict[str, Exception]:
    """Return those that can't be packed, with the reason."""
    found = {}
    for name, value in values.items():
        try:
            pack(value, space).close()
        except Exception as error:  # whatever an object's own pickling raises
            found[name] = error
    return found


def unpack(parcel: Parcel, space: MutableMapping[str, Any]) -> Any:
    """Return the value; functions of cells read and bind names in `space`."""
    file = parcel.path if parcel.descriptor >= 0 else BytesIO(parcel.inline)
    _NAMESPACE[:] = [space]
    try:
        return torch.load(file, _here, weights_only=False)
    finally:
        _NAMESPACE.clear()


def _here(storage: Any, location: str) -> Any:
    """Return a storage on this process's device of its kind, or on the CPU where there is none."""
    kind = location.partition(":")[0]
    kind = kind if torch.accelerator.is_available() else "cpu"
    return torch.serialization.default_restore_location(storage, kind)


# --- back into objects that exist ---


@dataclass(frozen=True)
class State:
    """What `load_state_dict` takes, and whether a module trains."""

    values: Mapping[str, Any]
    training: bool | None = None


def has_state(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def gathered(value: Any) -> Any:
    """Return a value with its sharded tensors gathered; every rank has to call it."""
    return torch_private.tree_map(whole, value)


def state_of(value: Any) -> State:
    """Return the state of a model, an optimizer or a scheduler, gathered."""
    return State(gathered(value.state_dict()), getattr(value, "training", None))


def is_wrapped(value: Any) -> bool:
    """Return whether a module belongs to its process group: it makes no sense elsewhere."""
    ddp = torch.nn.parallel.DistributedDataParallel
    return isinstance(value, torch.nn.Module) and (
        is_sharded(value) or any(isinstance(part, ddp) for part in value.modules())
    )


def put_state(value: Any, state: State) -> None:
    """Write a state into a model, an optimizer or a scheduler, whose tensors stay the same."""
    if isinstance(value, torch.nn.Module):
        own = value.state_dict()
        given = {name: split(one, own.get(name)) for name, one in state.values.items()}
        if given.keys() == own.keys():
            own.update(given)  # which has torch's numbers of versions too
        value.load_state_dict(own if given.keys() == own.keys() else given)
        if state.training is not None and state.training != value.training:
            value.train(state.training)
    else:
        value.load_state_dict(_like_parameters(value, dict(state.values)))


def _like_parameters(value: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, split as its parameters are."""
    own = [one for group in getattr(value, "param_groups", ()) for one in group["params"]]
    if not any(isinstance(one, dtensor()) for one in own):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, own, strict=True))
    parts = {
        number: {name: split(one, of[number]) for name, one in held.items()}
        for number, held in state["state"].items()
    }
    return state | {"state": parts}


def fits(old: Any, new: Any) -> bool:
    """Return whether a state of `new` may be written into `old`."""
    return not has_state(new) or (isinstance(old, type(new)) and _form(old) == _form(new))


def _form(value: Any) -> Any:
    """Return the shapes of a module's state, or how many parameters an optimizer's groups have."""
    if isinstance(value, torch.nn.Module):
        return {name: getattr(one, "shape", None) for name, one in value.state_dict().items()}
    return [len(group["params"]) for group in getattr(value, "param_groups", ())]


def put(old: Any, new: Any) -> Any:
    """Write what came back into the object of that name where it can take it; return the object."""
    if isinstance(new, State):
        put_state(old, new)
        return old
    are_tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    if are_tensors and (old.shape, old.dtype) == (new.shape, new.dtype):
        with torch.no_grad():
            old.copy_(new)
        return old
    if type(old) is type(new) and isinstance(old, CONTAINERS):
        kept = new.copy()
        old.clear()
        old.update(kept) if isinstance(old, dict | set) else old.extend(kept)
        return old
    return new
