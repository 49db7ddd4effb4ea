"""Batch norm folded into the convolution before it, for the length of one call of the model.

The modules keep their parameters and buffers, which are the user's and what `state_dict` shows: the
convolution computes with folded copies, and the batch norm passes on what it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from speedkit_jupyter.optimizations.facts.conv_norms import pairs
from speedkit_jupyter.optimizations.properties.calls import Call
from speedkit_jupyter.optimizations.properties.hooks import has_forward_hooks, has_hooks_of_all

if TYPE_CHECKING:
    import torch

    Weights = tuple[torch.Tensor, torch.Tensor]


class _Now(threading.local):
    """In this thread: what each pair computes with, and what each batch norm is waiting for."""

    def __init__(self) -> None:
        self.weights: dict[_Pair, Weights] = {}
        self.waiting: dict[_Pair, list[torch.Tensor]] = {}


class Folding:
    """What is folded in a model, found when it is made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._now = _Now()
        self._pairs = [_Pair(self._now, conv, norm) for conv, norm in pairs(model)]

    def __len__(self) -> int:
        return sum(not pair.is_broken for pair in self._pairs)

    def calls(self) -> Iterator[tuple[torch.nn.Module, Call]]:
        """Each module with the layer around its calls."""
        for pair in self._pairs:
            for call in (pair.conv, pair.norm):
                if call.module is not None:
                    yield call.module, call

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Folded for the block, in this thread, with the weights as they are now."""
        now = self._now
        around = now.weights, now.waiting
        given = ((pair, pair.weights()) for pair in self._pairs)
        now.weights, now.waiting = (
            {pair: weights for pair, weights in given if weights is not None},
            {},
        )
        try:
            yield
        finally:
            now.weights, now.waiting = around

    def is_wrong(self) -> bool:
        """Whether, in the block, a convolution ran without its batch norm: what comes out is wrong
        then. Such a pair is not folded any more.
        """
        left = [pair for pair, results in self._now.waiting.items() if results]
        for pair in left:
            pair.is_broken = True
        return bool(left)


class _Pair:
    """A convolution and its batch norm."""

    def __init__(self, now: _Now, conv: torch.nn.Module, norm: torch.nn.Module) -> None:
        self.conv, self.norm = _Conv(conv, self, now), _Norm(norm, self, now)
        self.is_broken = False
        self._folded: Weights | None = None
        self._known: list[_Known] | None = None
        self._eps = 0.0

    def weights(self) -> Weights | None:
        """Those of both together, made anew where one has changed; None where each has to do its
        own: in training mode, or where something of the user's runs whenever one of them does.
        """
        conv, norm = self.conv.module, self.norm.module
        if conv is None or norm is None:  # the user has put others in their place
            return None
        is_hooked = has_forward_hooks(conv) or has_forward_hooks(norm) or has_hooks_of_all()
        if self.is_broken or norm.training or is_hooked:
            return None
        tensors = [*conv._parameters.values(), *norm._parameters.values(), *norm._buffers.values()]
        eps = cast("float", norm.eps)
        if self._known is None or eps != self._eps or not _are_known(tensors, self._known):
            if any(tensor is not None and tensor.is_inference() for tensor in tensors):
                self.is_broken = True  # they would not tell when they are written to
                return None
            self._known = [_known(tensor) for tensor in tensors]
            self._eps, self._folded = eps, _folded(conv, norm)
        return self._folded


class _Conv(Call):
    def __init__(self, module: torch.nn.Module, pair: _Pair, now: _Now) -> None:
        super().__init__(module)
        self._pair, self._now = pair, now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The convolution with what is folded into it."""
        weights = self._now.weights.get(self._pair)
        if weights is None or len(args) != 1 or kwargs or self.inner is not None:
            return self.below(*args, **kwargs)
        module: Any = self.module
        result = module._conv_forward(args[0], *weights)
        self._now.waiting.setdefault(self._pair, []).append(result)
        return result


class _Norm(Call):
    def __init__(self, module: torch.nn.Module, pair: _Pair, now: _Now) -> None:
        super().__init__(module)
        self._pair, self._now = pair, now

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What it is given, where that comes from its convolution."""
        waiting = self._now.waiting.get(self._pair, [])
        for number, result in enumerate(waiting):
            if args and result is args[0]:
                return waiting.pop(number)
        return self.below(*args, **kwargs)


class _Known(NamedTuple):
    """Another one after whatever torch writes to the tensor, or moves in memory."""

    tensor: torch.Tensor | None
    version: int
    place: int


def _known(tensor: torch.Tensor | None) -> _Known:
    if tensor is None:
        return _Known(None, 0, 0)
    return _Known(tensor, tensor._version, tensor.data_ptr())


def _are_known(tensors: Sequence[torch.Tensor | None], known: Sequence[_Known]) -> bool:
    if len(tensors) != len(known):
        return False
    for tensor, (before, version, place) in zip(tensors, known, strict=True):
        if tensor is not before:
            return False
        if tensor is not None and (tensor._version != version or tensor.data_ptr() != place):
            return False
    return True


def _folded(conv: torch.nn.Module, norm: torch.nn.Module) -> Weights | None:
    import torch
    from torch.nn.utils.fusion import fuse_conv_bn_weights

    mean, weight = norm._buffers["running_mean"], conv._parameters["weight"]
    assert mean is not None
    assert weight is not None
    if mean.dtype is not weight.dtype or type(weight) is not torch.nn.Parameter:
        return None
    with torch.no_grad():
        folded = fuse_conv_bn_weights(
            weight,
            conv._parameters["bias"],
            mean,
            cast("torch.Tensor", norm._buffers["running_var"]),
            cast("float", norm.eps),
            norm._parameters["weight"],
            norm._parameters["bias"],
        )
    weight, other = folded
    return weight.detach(), other.detach()
