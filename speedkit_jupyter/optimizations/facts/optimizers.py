"""What an optimizer is: read once, before anything is decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.facts.layers import attribute
from speedkit_jupyter.optimizations.properties.settings import users_own

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer. `fused` and `foreach` hold the distinct values of its groups, as the user set
    them: what a plan on another model of the same optimizer put there does not count.
    `sparse_gradients` says that it holds a parameter whose gradients are sparse.
    """

    name: str = "AdamW"
    has_fused: bool = True
    fused: tuple[bool | None, ...] = (None,)
    foreach: tuple[bool | None, ...] = (None,)
    differentiable: bool = False
    capturable: bool = False
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)
    sparse_gradients: bool = False

    @classmethod
    def read(
        cls, optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module] = ()
    ) -> OptimizerFacts:
        """Read the facts of one, which steps parameters of these models."""
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        sparse = {id(p) for model in models for p in _with_sparse_gradients(model)}
        settings = [users_own(optimizer, group) for group in groups]
        own_step = type(optimizer).step.__module__.startswith("torch.optim")
        return cls(
            name=type(optimizer).__name__,
            has_fused=own_step and all("fused" in group for group in groups),
            fused=distinct(values.get("fused") for values in settings),
            foreach=distinct(values.get("foreach") for values in settings),
            differentiable=any(group.get("differentiable") for group in groups),
            capturable=any(group.get("capturable") for group in groups),
            devices=words(p.device for p in parameters),
            dtypes=words(p.dtype for p in parameters),
            sparse_gradients=any(id(p) in sparse or _has_sparse_gradient(p) for p in parameters),
        )


def _with_sparse_gradients(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield the weights of `Embedding(sparse=True)` and of all that has such a switch."""
    for module in model.modules():
        if attribute(module, "sparse") is True:
            yield from module.parameters(recurse=False)


def _has_sparse_gradient(parameter: torch.Tensor) -> bool:
    """Return whether it is so now: a function can make it so, without a module."""
    import torch

    gradient = parameter.grad if parameter.is_leaf else None
    return gradient is not None and gradient.layout is not torch.strided


def words(values: Iterable[torch.device | torch.dtype]) -> tuple[str, ...]:
    """Return `cuda:0` or `float32` for each value once."""
    return tuple(str(value).removeprefix("torch.") for value in dict.fromkeys(values))


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return each value once, in order."""
    return tuple(dict.fromkeys(values))
