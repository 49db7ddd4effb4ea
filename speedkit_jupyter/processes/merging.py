"""What a cell changed, back into objects that exist: states of models and optimizers, containers.

A model that is sharded over the workers is gathered on the way out and split on the way in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support import torch_private

if TYPE_CHECKING:
    import torch

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


def whole(value: Any) -> Any:
    """Return a value with its sharded tensors gathered; every rank has to call it."""
    from torch.distributed.tensor import DTensor

    full = lambda one: one.full_tensor() if isinstance(one, DTensor) else one  # noqa: E731
    return torch_private.tree_map(full, value)


def state_of(value: Any) -> State:
    """Return the state of a model, an optimizer or a scheduler, gathered."""
    return State(whole(value.state_dict()), getattr(value, "training", None))


def is_wrapped(value: Any) -> bool:
    """Return whether a module belongs to its process group: it makes no sense elsewhere."""
    import torch
    from torch.distributed.tensor import DTensor

    ddp = torch.nn.parallel.DistributedDataParallel
    return isinstance(value, torch.nn.Module) and (
        any(isinstance(part, ddp) for part in value.modules())
        or any(isinstance(one, DTensor) for one in value.parameters())
    )


def put_state(value: Any, state: State) -> None:
    """Write a state into a model, an optimizer or a scheduler, whose tensors stay the same."""
    import torch

    if not isinstance(value, torch.nn.Module):
        value.load_state_dict(_like_parameters(value, dict(state.values)))
        return
    own = value.state_dict(keep_vars=True)
    if own.keys() != state.values.keys() or not _are_alike(own, state.values):
        value.load_state_dict(state.values)  # raises with torch's own words
        return
    with torch.no_grad():
        for name, one in own.items():
            if isinstance(one, torch.Tensor):
                one.copy_(_split_like(one, state.values[name]))
    if state.training is not None and state.training != value.training:
        value.train(state.training)


def _are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    shapes = ([getattr(value, "shape", None) for value in each.values()] for each in (one, other))
    return next(shapes) == next(shapes)


def _split_like(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor) or isinstance(given, DTensor):
        return given
    mesh, placements = own.device_mesh, own.placements
    return distribute_tensor(given.to(mesh.device_type), mesh, placements, src_data_rank=None)


def _like_parameters(value: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, split as its parameters are."""
    groups = getattr(value, "param_groups", None)
    if not groups or "state" not in state:
        return state
    parameters = [one for group in groups for one in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    own = dict(zip(numbers, parameters, strict=True))

    def split(number: int, one: Any) -> Any:
        is_alike = getattr(one, "shape", None) == own[number].shape
        return _split_like(own[number], one) if is_alike else one

    each = state["state"].items()
    per = {number: {key: split(number, one) for key, one in held.items()} for number, held in each}
    return {**state, "state": per}


def fits(old: Any, new: Any) -> bool:
    """Return whether a state of `new` may be written into `old`."""
    if not has_state(new):
        return True
    import torch

    if not isinstance(old, type(new)):
        return False
    if isinstance(new, torch.nn.Module):
        mine, other = old.state_dict(), new.state_dict()
        return mine.keys() == other.keys() and _are_alike(mine, other)
    groups = [getattr(one, "param_groups", ()) for one in (old, new)]
    counts = [[len(group["params"]) for group in every] for every in groups]
    return counts[0] == counts[1]


def put(old: Any, new: Any) -> Any:
    """Write what came back into the object of that name where it can take it; return the object."""
    import torch

    if isinstance(new, State):
        put_state(old, new)
        return old
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _fit(old, new):
        with torch.no_grad():
            old.copy_(new)
        return old
    if type(old) is type(new) and isinstance(old, CONTAINERS):
        _refill(old, new)
        return old
    return new


def _fit(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype


def _refill(old: Any, new: Iterable[Any]) -> None:
    kept = new.copy()  # type: ignore[attr-defined]
    old.clear()
    old.update(kept) if isinstance(old, dict | set) else old.extend(kept)
