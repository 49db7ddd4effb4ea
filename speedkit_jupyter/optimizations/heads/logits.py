"""Logits that are computed where somebody asks for them, and that their own loss never asks for.

Such a tensor knows what it would be made of. `cross_entropy` takes that, and views between the two
stay such tensors. To everybody else it is the layer's plain result, with its graph, computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.heads.losses import cross_entropy
from speedkit_jupyter.optimizations.heads.source import Source, views
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.marks import are_changed, marks

if TYPE_CHECKING:
    import torch

# What a tensor is, not its values.
PROPERTIES = ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_sparse",
              "is_quantized", "is_meta", "is_mps", "is_xpu", "_version")  # fmt: skip
METHODS = ("size", "dim", "numel", "nelement", "ndimension", "__len__", "is_floating_point",
           "is_complex", "get_device")  # fmt: skip
CHANGED = (
    "logits, or their loss, were asked for after the weights or features that make them had "
    "changed: take them before optimizer.step(), or leave linear_cross_entropy out"
)


def logits_of(source: Source) -> torch.Tensor:
    """Not computed yet."""
    found: Any = _deferred().apply(source, *source.parts)
    found.source, found.computed = source, None
    found.origin, found.made_by, found.marks = found, None, marks(source.parts)
    return found  # type: ignore[no-any-return]


@cache
def kind() -> Any:
    """The class of such tensors."""
    import torch
    from torch.nn import functional

    looks = {getattr(torch.Tensor, name).__get__ for name in PROPERTIES}
    looks |= {getattr(torch.Tensor, name) for name in METHODS}
    looks |= {torch.is_floating_point, torch.is_complex, torch.numel}
    known: Mapping[Any, Any] = {**views(), functional.cross_entropy: cross_entropy}

    class Logits(torch.Tensor):
        __module__ = torch.Tensor.__module__  # a value of the user's, and no part of a plan
        source: Source
        computed: Any  # the plain tensor, once somebody has asked
        origin: Any  # what the layer gave; this is it, or a view of it
        made_by: Any  # from what, and how
        marks: Any

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            first = args[0] if args else kwargs.get("input")
            if func in looks:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            # Once somebody has the plain ones, they may write to them, or wait for their gradient.
            is_known = func in known and isinstance(first, Logits)
            if is_known and first.origin.computed is None:
                _check(first.origin)
                found = _by_source(known[func], first.source, args, kwargs)
                if isinstance(found, Source):
                    view: Any = logits_of(found)
                    view.origin = first.origin
                    view.made_by = first, func, _own(args[1:]), _own(kwargs)
                    return view
                if found is not None:
                    return found
            return func(*_plainly(args), **_plainly(kwargs))

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # For code below Python, where autograd has done its part: values alone. They keep a
            # graph all the same, for a loss that takes them later.
            with torch.overrides.enable_reentrant_dispatch(), torch.enable_grad():
                _plainly((args, kwargs))
            with torch.no_grad():
                return func(*_plainly(args, True), **_plainly(kwargs or {}, True))

    return Logits


def _by_source(function: Any, source: Source, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """None where it is called in a way that it does not know."""
    import inspect

    others = {name: value for name, value in kwargs.items() if name != "input"}
    given = (source, *args[1:]) if args else (source,)
    try:
        inspect.signature(function).bind(*given, **others)
    except TypeError:
        return None
    if any(isinstance(one, kind()) for one in (*given[1:], *others.values())):
        return None
    return function(*given, **others)


def _plainly(value: Any, detached: bool = False) -> Any:
    """With the layer's result in place of each of these."""
    from torch.utils._pytree import tree_map

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, kind()):
            return leaf
        if leaf.computed is None:
            leaf.computed = _computed(leaf)
        return leaf.computed.detach() if detached else leaf.computed

    return tree_map(of, value)


def _computed(leaf: Any) -> Any:
    """Of the layer; of a view, from what it is one of, so that they share their memory."""
    if leaf.made_by is None:
        _check(leaf)
        return leaf.source.plain()
    import torch

    before, func, args, kwargs = leaf.made_by
    plain = _plainly(before)
    others = {name: value for name, value in kwargs.items() if name != "input"}
    with torch.enable_grad():  # whoever asks first may record none; the next one may
        return func(plain, *args, **others)


def _own(value: Any) -> Any:
    """What a view was asked for with, as it was then: a mask may be written to."""
    import torch
    from torch.utils._pytree import tree_map

    def of(leaf: Any) -> Any:
        return leaf.clone() if type(leaf) is torch.Tensor else leaf

    return tree_map(of, value)


def _check(leaf: Any) -> None:
    if are_changed(leaf.source.parts, leaf.marks):
        raise SpeedKitError(CHANGED)


@cache
def _deferred() -> Any:
    """A linear layer whose values are not there yet: the graph for those who ask below Python."""
    import torch

    class Deferred(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: Source, *parts: Any) -> Any:
            ctx.source = source
            make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
            return make(kind(), source.shape, dtype=source.dtype, device=source.features.device)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return (None, *ctx.source.gradients(_plainly(gradient), ctx.needs_input_grad[1:]))

    return Deferred
