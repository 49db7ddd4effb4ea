"""Finding the user's models and optimizers by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from speedkit_jupyter.exceptions import did_you_mean
from speedkit_jupyter.wrappers import is_optimizer, unwrapped

if TYPE_CHECKING:
    import torch


def models(names: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    """The models in a namespace, each once, by the first of its names."""
    import torch

    return _instances(names, torch.nn.Module)


def optimizers(names: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers in a namespace, each once, by the first of its or its wrapper's names."""
    import torch

    found: dict[int, tuple[str, Any]] = {}
    for name, one in _instances(names, torch.optim.Optimizer).items():
        found.setdefault(id(unwrapped(one)), (name, unwrapped(one)))
    return dict(found.values())


def find_model(names: Mapping[str, Any], name: str | None) -> tuple[str, torch.nn.Module]:
    """The model of that name (`net`, `trainer.model`), or the only one; raises UsageError."""
    import torch

    found = models(names)
    if name is None:
        whole = _not_part_of_another(found)
        if len(whole) == 1:
            return next(iter(whole.items()))
        if not whole:
            raise UsageError("there is no model in this notebook yet: define one first")
        raise UsageError(f"which model? {', '.join(whole)}")
    value = _looked_up(names, name, list(found), "model")
    if not isinstance(value, torch.nn.Module):
        raise UsageError(f"{name} is of class {type(value).__name__}, not a torch.nn.Module")
    return name, value


def find_optimizers(
    names: Mapping[str, Any], wanted: list[str] | None, model: torch.nn.Module
) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of those names, or all that hold a parameter of the model."""
    parameters = {id(p) for p in model.parameters()}
    found = optimizers(names) if wanted is None else named_optimizers(names, wanted)
    holding = {
        name: one
        for name, one in found.items()
        if any(id(p) in parameters for group in one.param_groups for p in group["params"])
    }
    for name in wanted or ():
        if name not in holding:
            raise UsageError(f"{name} holds no parameter of this model")
    return holding


def named_optimizers(
    names: Mapping[str, Any], wanted: Sequence[str]
) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of those names; raises UsageError."""
    found = {}
    for name in wanted:
        value = _looked_up(names, name, list(optimizers(names)), "optimizer")
        if not is_optimizer(value):
            raise UsageError(
                f"{name} is of class {type(value).__name__}, not a torch.optim.Optimizer"
            )
        found[name] = unwrapped(value)
    return found


def _instances(names: Mapping[str, Any], kind: type) -> dict[str, Any]:
    found: dict[int, tuple[str, Any]] = {}
    for name, value in list(names.items()):
        if not name.startswith("_") and isinstance(value, kind):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _not_part_of_another(found: Mapping[str, Any]) -> dict[str, Any]:
    """Without loss functions and other modules that have no parameters or lie in a model."""
    inside = {id(part) for one in found.values() for part in _parts(one)}
    whole = {name: one for name, one in found.items() if id(one) not in inside}
    return {n: m for n, m in whole.items() if next(m.parameters(), None) is not None} or whole


def _parts(model: Any) -> Iterator[Any]:
    parts = model.modules()
    next(parts)
    return parts  # type: ignore[no-any-return]


def _looked_up(names: Mapping[str, Any], path: str, known: list[str], kind: str) -> Any:
    """The value of a dotted name; only attributes are followed, nothing is evaluated."""
    first, *rest = path.split(".")
    if first not in names:
        here = f" Here: {', '.join(known)}." if known else ""
        raise UsageError(f"there is no {kind} {path!r}.{did_you_mean(path, known)}{here}")
    value = names[first]
    for attribute in rest:
        try:
            value = getattr(value, attribute)
        except AttributeError:
            raise UsageError(f"{first} has no attribute {attribute!r} (in {path})") from None
    return value
