"""What a cell changed, back into objects that exist: states of models and optimizers, containers.

A model that is sharded over the workers is gathered on the way out and split on the way in.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from speedkit_jupyter.support import torch_private

CONTAINERS = (list, dict, set, deque, bytearray)


@dataclass(frozen=True)
class State:
    """What `load_state_dict` takes, and whether a module trains."""

    values: Mapping[str, Any]
    training: bool | None = None


def has_state(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def dtensor() -> tuple[Any, ...]:
    """Return the class of sharded tensors; empty before torch loads it, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return (module.DTensor,) if module else ()


def whole(value: Any) -> Any:
    """Return a value with its sharded tensors gathered; every rank has to call it."""
    kind = dtensor()
    full = lambda one: one.full_tensor() if isinstance(one, kind) else one  # noqa: E731
    return torch_private.tree_map(full, value)


def state_of(value: Any) -> State:
    """Return the state of a model, an optimizer or a scheduler, gathered."""
    return State(whole(value.state_dict()), getattr(value, "training", None))


def is_wrapped(value: Any) -> bool:
    """Return whether a module belongs to its process group: it makes no sense elsewhere."""
    ddp, kind = torch.nn.parallel.DistributedDataParallel, dtensor()
    return isinstance(value, torch.nn.Module) and (
        any(isinstance(part, ddp) for part in value.modules())
        or any(isinstance(one, kind) for one in value.parameters())
    )


def put_state(value: Any, state: State) -> None:
    """Write a state into a model, an optimizer or a scheduler, whose tensors stay the same."""
    if isinstance(value, torch.nn.Module):
        own = value.state_dict()
        given = {name: _split_like(own.get(name), one) for name, one in state.values.items()}
        if given.keys() == own.keys():
            own.update(given)  # which has torch's numbers of versions too
        value.load_state_dict(own if given.keys() == own.keys() else given)
        if state.training is not None and state.training != value.training:
            value.train(state.training)
    else:
        value.load_state_dict(_like_parameters(value, dict(state.values)))


def _split_like(own: Any, given: Any) -> Any:
    if not isinstance(own, dtensor()) or isinstance(given, dtensor()):
        return given
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = own.device_mesh, own.placements
    return distribute_tensor(given.to(mesh.device_type), mesh, placements, src_data_rank=None)


def _like_parameters(value: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, split as its parameters are."""
    own = [one for group in getattr(value, "param_groups", ()) for one in group["params"]]
    if not any(isinstance(one, dtensor()) for one in own):
        return state
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, own, strict=True))
    split = {
        number: {
            key: _split_like(of[number], one) if _shape(one) == of[number].shape else one
            for key, one in held.items()
        }
        for number, held in state["state"].items()
    }
    return {**state, "state": split}


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _shapes(model: Any) -> dict[str, Any]:
    return {name: _shape(value) for name, value in model.state_dict().items()}


def fits(old: Any, new: Any) -> bool:
    """Return whether a state of `new` may be written into `old`."""
    if not has_state(new):
        return True

    if not isinstance(old, type(new)):
        return False
    if isinstance(new, torch.nn.Module):
        return _shapes(old) == _shapes(new)
    groups = ([len(g["params"]) for g in getattr(one, "param_groups", ())] for one in (old, new))
    return next(groups) == next(groups)


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
