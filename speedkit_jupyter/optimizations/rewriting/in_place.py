"""Activations that write over what they are given, where nobody else has it.

Only an `nn.Sequential` that runs by its own forward is sure of that: what a layer has just made
goes to the activation behind it and nowhere else. A loop over its layers, a slice of it and a hook
may keep it, so the activation itself stays as it is, and each call looks for hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties import hooks

if TYPE_CHECKING:
    import torch

# Their results are new tensors, which their own backward passes don't need.
LAYERS = {"Linear", "GroupNorm", "LayerNorm"} | {
    f"{kind}{n}d" for kind in ("Conv", "ConvTranspose", "BatchNorm") for n in (1, 2, 3)
}


@cache
def layers() -> frozenset[type]:
    """The classes before an activation."""
    from torch import nn

    return frozenset(getattr(nn, name) for name in LAYERS)


@cache
def by_result() -> Mapping[type, Callable[[Any, torch.Tensor], torch.Tensor]]:
    """Activations whose gradient follows from their result, bit for bit."""
    from torch import nn
    from torch.nn import functional

    def hardtanh(module: Any, given: torch.Tensor) -> torch.Tensor:
        return functional.hardtanh(given, module.min_val, module.max_val, inplace=True)

    return {
        nn.ReLU: lambda module, given: functional.relu(given, inplace=True),
        nn.ReLU6: hardtanh,
        nn.Hardtanh: hardtanh,
    }


@cache
def by_input() -> Mapping[type, Callable[[Any, torch.Tensor], torch.Tensor]]:
    """Activations whose gradient needs what they were given: in place where there is none."""
    from torch import nn
    from torch.nn import functional

    return {
        nn.SiLU: lambda module, given: functional.silu(given, inplace=True),
        nn.Hardswish: lambda module, given: functional.hardswish(given, inplace=True),
        nn.Mish: lambda module, given: functional.mish(given, inplace=True),
        nn.LeakyReLU: lambda module, given: functional.leaky_relu(
            given, module.negative_slope, inplace=True
        ),
        nn.ELU: lambda module, given: functional.elu(given, module.alpha, inplace=True),
    }


def activations(sequential: torch.nn.Sequential) -> Iterator[int]:
    """The indices of those that stand behind a layer and are not in place by themselves."""
    children = list(sequential)
    for index, (before, child) in enumerate(pairwise(children), 1):
        knows = type(child) in by_result() or type(child) in by_input()
        if type(before) in layers() and knows and not child.inplace:
            yield index


@cache
def sequential() -> type:
    """The class that a Sequential gets; copies, slices and files of one are plain ones."""
    import torch
    from torch import nn

    known = by_result().keys() | by_input().keys()

    class Sequential(nn.Sequential):
        """Runs its children one after another, some activations in place."""

        def __new__(cls, *args: Any) -> Any:
            return nn.Sequential(*args)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Sequential, (), super().__reduce_ex__(2)[2]

        def __prepare_scriptable__(self) -> nn.Sequential:
            plain = nn.Sequential.__new__(nn.Sequential)
            plain.__dict__.update(self.__dict__)
            return plain

        def forward(self, input: Any) -> Any:
            if torch.compiler.is_compiling() or is_watched():
                return super().forward(input)
            before = None
            for module in self:
                write = writing(before, module, input) if type(module) in known else None
                input = module(input) if write is None else write(module, input)
                before = module
            return input

    Sequential.__qualname__, Sequential.__module__ = "Sequential", nn.Sequential.__module__
    return Sequential


def internals() -> tuple[Callable[[], Any], ...]:
    """Who says what else sees a result: a trace, hooks on all modules, modes. Raises where torch
    has moved them.
    """
    import torch
    from torch.nn.modules import module

    hooked = module._has_any_global_hook
    return torch._C._get_tracing_state, hooked, torch._C._len_torch_dispatch_stack


def is_watched() -> bool:
    """Whether any of these may keep what a layer has made."""
    return any(asked() for asked in internals())


def writing(
    before: torch.nn.Module | None, module: Any, given: Any
) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """How the activation writes over what the layer before it has made; None where it must not."""
    import torch

    kind = type(module)
    write = by_result().get(kind) or by_input().get(kind)
    if write is None or module.inplace or type(before) not in layers():
        return None
    if type(given) is not torch.Tensor or given._is_view() or given.layout is not torch.strided:
        return None
    if given.requires_grad and torch.is_grad_enabled() and kind in by_input():
        return None
    return write if _is_plain(before) and _is_plain(module) else None


def _is_plain(module: Any) -> bool:
    """Nothing else sees what it takes or gives."""
    return not hooks.is_watched(module) and module._compiled_call_impl is None
