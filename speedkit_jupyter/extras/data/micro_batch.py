"""Compute loss and gradients of a batch in parts, if the batch does not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from speedkit_jupyter.extras.processes.distributed import Distributed, exchanges
from speedkit_jupyter.right.reference import without_dropout
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.step.reachable import outermost, reached
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.tracebacks import hide_internal_frames, user_code_boundary
from speedkit_jupyter.torchglue.private import has_gradient_hooks, tree_leaves, version
from speedkit_jupyter.torchglue.storage import tensors_in

Key = int | str  # the position or name of an argument
# Losses in torch.nn.functional that by default average over targets that are not ignored.
MEANS = (functional.cross_entropy, functional.nll_loss)
# The check computes the loss of up to this many samples, whole and in two parts.
TRIED = 7
# Limits for the relative error of the loss that parts make. A wrong mean is off by far more. One
# rounding is off by up to 6e-8 in float32, 5e-4 in TF32, 4e-3 in bfloat16.
CLOSE, CLOSE_IN_TF32, CLOSE_IN_HALF = 5e-6, 1e-3, 3e-2
UNEQUAL = (
    "cross-entropy counts another share of targets in each part: give its divisor, as in "
    "weight=lambda x, y: (y != -100).sum(); for several divisors a sum, and reduction='sum'"
)


@hide_internal_frames
def micro_batch(
    function: Callable[..., Any],
    size: int,
    *,
    whole: Key | Collection[Key] = (),
    reduction: str = "mean",
    weight: Callable[..., Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    batch_norm: bool = False,
) -> MicroBatch:
    """Return a function that computes a batch's loss and gradients in parts of `size` samples.

    The gradients of the parts add up to the gradients of the whole batch's loss:

        loss_of = micro_batch(lambda x, y: F.cross_entropy(net(x), y), 16)
        optimizer.zero_grad()
        loss = loss_of(x, y)        # instead of loss = …; loss.backward()
        optimizer.step()

    The first call with several parts checks, with up to 7 samples, that the parts' losses add up.
    With several ranks (DDP, FSDP2, `distributed`), only the last part's backward pass exchanges
    gradients, averaged over the ranks. All ranks need the same number of parts.

    Args:
        function: a function of tensors, or of containers of tensors, whose first dimension is the
            batch. It returns a scalar loss: alone, first of a tuple, or named `loss`.
        size: number of samples in a part.
        whole: positions or names of arguments not to split. Tensors of other lengths stay whole.
        reduction: "mean" over samples, or "sum".
        weight: a function of the same arguments that returns the divisor of the mean, if it is not
            the number of samples: unmasked tokens, or targets that are not ignored.
        scaler: a GradScaler for the loss.
        batch_norm: allow BatchNorm in training mode, with the statistics of each part.

    Returns:
        A function of the same arguments. It returns a detached loss, and adds gradients if enabled.

    Raises:
        StepError, ArgumentError: an argument is invalid. In a call: arguments can't be split, parts
            don't add up, BatchNorm is in training mode, a parameter has a gradient hook, or the
            function returns no loss or changes arguments. Gradients of some parts may remain.
    """
    for name, one in {"function": function, "weight": weight}.items():
        if not callable(one) and (one is not None or name == "function"):
            raise StepError(f"{name} must be callable, not {type(one).__name__}")
    whole = [whole] if isinstance(whole, str | int) else whole
    arguments.of_kind("whole", whole, Collection, optional=False)
    arguments.of_kind("scaler", scaler, torch.amp.GradScaler)
    if arguments.whole("size", size) < 1:
        raise StepError(f"size must be 1 or more, not {size}")
    if reduction not in ("mean", "sum"):
        raise StepError(f"reduction must be 'mean' or 'sum', not {reduction!r:.40}")
    return MicroBatch(function, size, whole, reduction == "sum", weight, scaler, batch_norm)


@dataclass(frozen=True)
class Batch:
    """The arguments of a call, by position or name. Arguments in `whole` are not split."""

    given: Mapping[Key, Any]
    length: int
    whole: Collection[Key] = ()

    def part(self, samples: range) -> Batch:
        take = itemgetter(slice(samples.start, samples.stop))
        return self._taken(samples, lambda one: each_taken(one, self.length, take))

    def sample(self, samples: Sequence[int]) -> Batch:
        return self._taken(samples, lambda one: selected(one, self.length, samples))

    def _taken(self, samples: Sequence[int], take: Callable[[Any], Any]) -> Batch:
        given = {key: one if key in self.whole else take(one) for key, one in self.given.items()}
        return Batch(given, len(samples), self.whole)

    def call(self, function: Callable[..., Any]) -> Any:
        """Return the function's result. Raises StepError if the function writes to an argument."""
        tensors = tensors_in(list(self.given.values()))
        before = [*map(version, tensors)]
        named = {key: value for key, value in self.given.items() if isinstance(key, str)}
        result = function(*(self.given[key] for key in self.given if key not in named), **named)
        if [*map(version, tensors)] != before:
            raise StepError("the function changes its arguments in place: let it change copies")
        return result


@dataclass(eq=False, repr=False)
class MicroBatch:
    """A function of a batch that computes loss and gradients in parts; made by `micro_batch`."""

    function: Callable[..., Any]
    size: int
    whole: Collection[Key]
    is_sum: bool
    weight: Callable[..., Any] | None
    scaler: torch.amp.GradScaler | None
    batch_norm: bool
    _is_checked: bool = field(default=False, init=False)

    @hide_internal_frames
    @user_code_boundary
    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the loss of the batch; accumulate its gradients if gradients are enabled."""
        every: dict[Any, Any] = {**dict(enumerate(given)), **named}
        length = self._length([one for key, one in every.items() if key not in self.whole])
        batch, models = Batch(every, length, self.whole), self._models
        if length > self.size:
            for name, norm in () if self.batch_norm else _batch_norms(models):
                raise StepError(
                    f"{name or 'the model'} ({type(norm).__name__}) would see the statistics of "
                    "each part: put it into eval mode, or allow that by batch_norm=True"
                )
            if any(has_gradient_hooks(one) for model in models for one in model.parameters()):
                raise StepError("a parameter's gradient hook would run for each part: remove it")
            if not self._is_checked:
                self._check(batch)
        starts = range(0, length, self.size)
        parts = [batch.part(range(at, min(at + self.size, length))) for at in starts]
        return self._added_up(parts, [model for model in models if exchanges(model)])

    def _added_up(self, parts: Sequence[Batch], exchanging: Sequence[nn.Module]) -> Any:
        """Accumulate the gradients of the parts, and return the loss of the whole batch."""
        self._is_checked |= bool(exchanging)  # a later check on one rank alone would hang
        weights = [*map(self._weight, parts)]
        total = 1.0 if self.is_sum else sum(weights)
        losses, known, trains = list[Any](), list[float](), not torch.is_grad_enabled()
        for part, weight in zip(parts, weights, strict=True):
            is_last = part is parts[-1]
            with ExitStack() as stack:
                for model in () if is_last else exchanging:
                    stack.enter_context(Distributed().no_sync(model))
                loss, divisors = self._loss(part)
                trains |= loss.requires_grad
                if not self.is_sum and (weight or any(divisors)):
                    ratios = [divisor / (weight or math.nan) for divisor in divisors]
                    known = known or ratios
                    if len(known) != len(ratios) or not np.allclose(known, ratios):
                        raise StepError(UNEQUAL)
                if not weight:  # without a counted target, the mean is NaN
                    loss = loss.nan_to_num()
                share = weight / (total or math.nan)
                losses.append(loss.detach() * share)
                # Other ranks wait for the last backward pass, even if the part's weight is zero.
                if loss.requires_grad and (weight or (is_last and exchanging)):
                    scaled = loss * (share if weight else 0.0)
                    scaled = scaled if self.scaler is None else self.scaler.scale(scaled)
                    with torch.autocast(loss.device.type, enabled=False):
                        scaled.backward()
        if not trains:
            raise StepError("the loss is detached, or nothing trains")
        return torch.stack(losses).sum()

    @property
    def _models(self) -> list[nn.Module]:
        return outermost(reached([self.function]))

    def _length(self, values: list[Any]) -> int:
        """Return the number of samples. Raises StepError for arguments that can't be split."""
        found = [one for one in map(lengths_of, values) if one]
        if not found:
            raise StepError("no argument is a tensor with a row for each sample")
        length, *others = min(found, key=len)
        if others or [length] * 2 in found:
            raise StepError("a list of tensors may be samples or parts: stack it, or give parts")
        return length

    def _weight(self, part: Batch) -> float:
        if self.weight is not None:
            return float(part.call(self.weight))
        return 1.0 if self.is_sum else float(part.length)

    def _loss(self, part: Batch) -> tuple[Any, list[float]]:
        """Return a part's loss and the divisors of its means. Raises StepError without a loss."""
        with MeanMode() as mode:
            loss = _loss_in(part.call(self.function))
        if loss is None:
            raise StepError(
                "the function returns no loss: one number, first of a tuple, or named `loss`. "
                "For results of parts, join them: torch.cat([net(x) for x in images.split(256)])"
            )
        return loss, mode.divisors

    def _check(self, batch: Batch) -> None:
        """Raise StepError if two parts' losses don't add up; warn if repeated calls differ."""
        number = min(batch.length, TRIED, max(self.size, 5))
        every = range(0, batch.length // number * number, batch.length // number)
        # Parts have up to 2 and 5 samples: with equal parts, a masked mean may add up by chance.
        first = min(number // 2, 2)
        spans = [every, every, every[:first], every[first:]]
        losses, weights = zip(*self._tried(batch, spans), strict=True)
        (whole, _), (again, _), *parts = zip(map(float, losses), weights, strict=True)
        if math.isnan(whole):
            return
        # Parts with equal losses don't prove that the loss is a mean.
        self._is_checked = whole != again or not np.allclose(parts[0][0], parts[1][0])
        if whole != again:
            messages.warn("micro_batch: equal samples give different losses: it isn't checked")
            return
        made = sum(loss * weight for loss, weight in parts if weight)
        made /= 1.0 if self.is_sum else sum(weight for _, weight in parts) or 1.0
        largest = max(abs(one) for one in (whole, made, 1e-6, *(loss for loss, _ in parts)))
        if not abs(made - whole) <= _tolerance(losses, batch, self._models) * largest:
            raise StepError(
                f"the losses of parts don't make the loss of the batch: {made:.4g} instead of "
                f"{whole:.4g} for {number} samples. It is not a mean over samples: a sum needs "
                "reduction='sum', a mean over something else (a mask) weight=…, its divisor"
            )

    def _tried(self, batch: Batch, parts: Sequence[range]) -> list[tuple[Any, float]]:
        """Run each part without dropout or batch statistics; return losses and weights."""
        found = []
        with without_dropout(self._models), ExitStack() as stack:
            snapshot = Snapshot(Walk([self.function, self.weight]), off_device=True)
            stack.callback(snapshot.restore)
            for number, part in enumerate(parts):
                if number > 1:  # the second call starts from the state after the first
                    snapshot.restore()
                for _, norm in _batch_norms(self._models):
                    norm.training = False
                few = batch.sample(part)
                found.append((self._loss(few)[0].detach(), self._weight(few)))
        return found


# --- samples in the arguments of a call ---


def length_of(value: Any) -> int | None:
    """Return the length of the first tensor or array with a dimension; None without one."""
    # torch would treat a library's mapping, such as transformers' BatchEncoding, as a leaf.
    plain = dict(value) if isinstance(value, Mapping) else value
    tensors = (leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor | np.ndarray))
    return next((len(leaf) for leaf in tensors if leaf.ndim), None)


def lengths_of(value: Any) -> list[int]:
    """Return the possible numbers of samples; a list of equally long tensors has two."""
    if _are_alike(value):
        first, *others = map(length_of, value)
        is_sure = isinstance(value[0], Mapping) or any(one != first for one in others)
        return [len(value)] if is_sure else [first or 0, len(value)]
    parts = value.values() if isinstance(value, Mapping) else value
    found = map(lengths_of, parts) if isinstance(value, Mapping | list | tuple) else ()
    number = length_of(value)
    return min(filter(None, found), key=len, default=[] if number is None else [number])


def _are_alike(value: Any) -> bool:
    """Return whether a list or tuple has only mappings, or only tensors of one dtype and rank."""
    if not isinstance(value, list | tuple) or len(value) < 2 or hasattr(value, "_fields"):
        return False
    kinds = {(type(one), getattr(one, "dtype", None), getattr(one, "ndim", 0)) for one in value}
    return len(kinds) == 1 and (isinstance(value[0], Mapping) or getattr(value[0], "ndim", 0) > 0)


def each_taken(value: Any, length: int, take: Callable[[Any], Any]) -> Any:
    """Return `value` with `take` applied to each tensor, array or list of `length` samples."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return take(value) if value.ndim and len(value) == length else value
    if isinstance(value, Mapping):
        return {key: each_taken(one, length, take) for key, one in value.items()}
    if isinstance(value, list | tuple):
        are_samples = length_of(value) is None or (  # for example, a list of texts or of pictures
            _are_alike(value) and lengths_of(value) != [length, length]
        )
        if len(value) == length and are_samples:
            return take(value)
        parts = [each_taken(one, length, take) for one in value]
        if isinstance(value, tuple):
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return parts
    return value


def selected(batch: Any, length: int, samples: Sequence[int]) -> Any:
    """Return copies of the selected samples of a batch with `length` samples."""

    def take(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[[*samples]]
        if not isinstance(value, torch.Tensor):
            return type(value)(value[at] for at in samples)
        found = value.detach()[torch.tensor([*samples], device=value.device)]
        if value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last):
            found = found.contiguous(memory_format=torch.channels_last)
        return found.requires_grad_(value.requires_grad)

    return each_taken(batch, length, take)


def _loss_in(result: Any) -> Any:
    """Return the scalar loss in a result: alone, first of a tuple, or named `loss`; else None."""
    if isinstance(result, tuple) and result and not hasattr(result, "loss"):
        result = result[0]
    elif isinstance(result, dict):
        result = result.get("loss")
    elif not torch.is_tensor(result):
        result = getattr(result, "loss", None)
    return result if torch.is_tensor(result) and result.ndim == 0 else None


class MeanMode(TorchFunctionMode):
    """Collect the `divisors` of means in `cross_entropy` and `nll_loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors = list[float]()

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in MEANS:
            self.divisors += _divisor(args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _divisor(args: Any, kwargs: Any) -> Iterator[float]:
    """Yield the divisor if a loss of MEANS is a mean over class targets; else yield nothing."""
    names = ("input", "target", "weight", "size_average", "ignore_index")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") == "mean" and not target.is_floating_point():
        kept = target != given.get("ignore_index", -100)
        yield float(kept.sum() if weight is None else weight[target[kept]].sum())


def _batch_norms(models: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, module in chain.from_iterable(model.named_modules() for model in models):
        if isinstance(module, kinds) and module.training:
            yield name, module


def _tolerance(losses: Sequence[Any], batch: Batch, models: list[nn.Module]) -> float:
    tensors = tensors_in([*losses, *batch.given.values()])
    tensors += [one for model in models for one in model.parameters()]
    halves = any(one.dtype in (torch.float16, torch.bfloat16) for one in tensors)
    kinds = filter(torch.amp.is_autocast_available, {one.device.type for one in tensors})
    if halves or any(map(torch.is_autocast_enabled, kinds)):
        return CLOSE_IN_HALF
    in_tf32 = torch.get_float32_matmul_precision() != "highest"
    on_gpu = any(one.device.type != "cpu" for one in tensors)
    return CLOSE_IN_TF32 if in_tf32 or (on_gpu and torch.backends.cudnn.allow_tf32) else CLOSE
