"""What a cell changed, back into objects that exist: states of models and optimizers, containers.

A model that is sharded over the workers is gathered on the way out and split on the way in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from speedkit_jupyter.optimizations.properties.sharding import dtensor, is_sharded, split, whole
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
