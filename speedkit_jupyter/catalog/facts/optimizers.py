"""What an optimizer is: read once, before anything is decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from speedkit_jupyter.catalog.facts.layers import attribute
from speedkit_jupyter.catalog.properties.settings import users_own


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer, as the user set it: what plans have put there does not count."""

    name: str = "AdamW"
    has_fused: bool = True
    fused: tuple[bool | None, ...] = (None,)  # the distinct values of its groups
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
        modules = [module for model in models for module in model.modules()]
        layers = [module for module in modules if attribute(module, "sparse") is True]
        sparse = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        gradients = [p.grad for p in parameters if p.is_leaf and p.grad is not None]
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
            sparse_gradients=any(id(p) in sparse for p in parameters)
            or any(gradient.layout is not torch.strided for gradient in gradients),
        )


def words(values: Iterable[torch.device | torch.dtype]) -> tuple[str, ...]:
    """Return `cuda:0` or `float32` for each value once."""
    return tuple(str(value).removeprefix("torch.") for value in dict.fromkeys(values))


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return each value once, in order."""
    return tuple(dict.fromkeys(values))
