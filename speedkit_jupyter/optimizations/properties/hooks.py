"""What of the user's runs around the call of a module, or in place of its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_watched(module: torch.nn.Module) -> bool:
    """Whether something sees what it takes or gives, in either pass, or computes in its place."""
    hooks = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    return bool(hooks) or "forward" in module.__dict__


def has_hooks_of_all() -> bool:
    """Whether something of the user's runs whenever any module does."""
    from torch.nn.modules import module

    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether something of the user's runs whenever a part of it runs."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
