"""A batch that does not fit, in parts: the loss and gradients of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from speedkit_jupyter.extras.data.accumulated import Accumulated
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.step.discovery import outermost, reached
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.exceptions import StepError, in_a_line
from speedkit_jupyter.support.tracebacks import hide_internal_frames, user_code_boundary
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map, version
from speedkit_jupyter.torchglue.samples import each_taken, lengths_of, tensors_in

# The position or name of an argument.
Key = int | str
# Functions of torch.nn.functional whose mean is over the targets that count.
MEANS = ("cross_entropy", "nll_loss")
# The check takes this many samples at once, and in two parts.
TRIED = 4
# How far a mean over parts may be off, relative to the largest loss. A wrong mean is off by far
# more; rounding is some 1e-7 in float32, 5e-4 in TF32, 8e-3 in bfloat16.
CLOSE, CLOSE_IN_TF32, CLOSE_IN_HALF = 5e-6, 1e-3, 3e-2


@hide_internal_frames
def micro_batch(
    function: Callable[..., Any],
    size: int,
    *,
    whole: Collection[Key] = (),
    reduction: str = "mean",
    weight: Callable[..., Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    batch_norm: bool = False,
) -> MicroBatch:
    """Return `function`, the loss of a batch, for batches that don't fit into memory.

    The loss and its backward pass are computed part by part, and the gradients add up to the
    gradients of the whole batch's loss:

        loss_of = micro_batch(lambda x, y: F.cross_entropy(net(x), y), 16)
        optimizer.zero_grad()
        loss = loss_of(x, y)        # instead of loss = …; loss.backward()
        optimizer.step()

    The first call checks with a few samples that the parts' losses make the loss of the whole.

    Under several processes (DDP, FSDP2, `distributed`) only the last part's backward pass exchanges
    gradients, by the mean over all ranks' samples. Each rank has to have the same number of
    parts, and only the first call is checked.

    Args:
        function: a function of tensors, or of containers of tensors, whose first dimension is the
            batch. It returns a scalar loss: alone, first of a tuple, or named `loss`.
        size: samples of a part.
        whole: positions or names of arguments that are not cut.
        reduction: "mean" over samples, or over the targets that cross-entropy counts; or "sum".
        weight: a function of the same arguments that returns the divisor of the mean, for a mean
            over something else (a mask).
        scaler: scales the loss before the backward pass.
        batch_norm: allows BatchNorm in training mode, which sees the statistics of each part.

    Returns:
        A function of the same arguments. It returns the loss of the batch, without a graph.

    Raises:
        StepError: if the parts don't make up the whole, for BatchNorm in training mode, and for a
            function that writes to its arguments.
    """
    if not callable(function):
        raise StepError(f"function must be callable, not {type(function).__name__}")
    if arguments.whole("size", size) < 1:
        raise StepError(f"size must be 1 or more, not {size}")
    if reduction not in ("mean", "sum"):
        raise StepError(f"reduction must be 'mean' or 'sum', not {reduction!r:.40}")
    return MicroBatch(function, size, whole, reduction == "sum", weight, scaler, batch_norm)


@dataclass(frozen=True)
class Batch:
    """Arguments by position or name, with a value for each of `length` samples, but for `whole`."""

    given: Mapping[Key, Any]
    length: int
    whole: Collection[Key] = ()

    def cut(self, samples: slice) -> Batch:
        take = itemgetter(samples)
        given = {
            key: value if key in self.whole else each_taken(value, self.length, take)
            for key, value in self.given.items()
        }
        return Batch(given, len(range(self.length)[samples]), self.whole)

    def parts(self, size: int) -> Iterator[Batch]:
        """Yield the parts; the last part may be smaller."""
        for first in range(0, self.length, size):
            yield self.cut(slice(first, first + size))

    def call(self, function: Callable[..., Any]) -> Any:
        """Call the function with these arguments. Raises StepError where it writes to one."""
        tensors = tensors_in(list(self.given.values()))
        before = [*map(version, tensors)]
        named = {key: value for key, value in self.given.items() if isinstance(key, str)}
        result = function(*(self.given[key] for key in self.given if key not in named), **named)
        if [*map(version, tensors)] != before:
            raise StepError(
                "the call writes to its arguments, which each part would do again: micro_batch "
                "can't split it"
            )
        return result


@dataclass(repr=False)
class MicroBatch:
    """A loss that is computed with a few samples at a time; made by `micro_batch`."""

    function: Callable[..., Any]
    size: int
    whole: Collection[Key]
    is_sum: bool
    weight: Callable[..., Any] | None
    scaler: torch.amp.GradScaler | None
    batch_norm: bool
    # True after parts of different weights made up the whole, False after parts of equal weights.
    _checked: set[bool] = field(default_factory=set, init=False)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"micro_batch({name}, {self.size})"

    @hide_internal_frames
    @user_code_boundary
    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the loss of the batch, its backward pass done where gradients are enabled."""
        every: dict[Key, Any] = dict(enumerate(given))
        every |= named.items()
        length = self._length([one for key, one in every.items() if key not in self.whole])
        batch = Batch(every, length, self.whole)
        models = self._models
        if length > self.size and not self.batch_norm:
            for name, norm in _batch_norms(models):
                raise StepError(
                    f"{name or 'the model'} ({type(norm).__name__}) would see the statistics of "
                    "each part and not of the batch: put it into eval mode, or allow that by "
                    "batch_norm=True"
                )
        if not self._checked and length > self.size:
            self._check(batch)
        total, parts = Accumulated(self.scaler, models, self.size), [*batch.parts(self.size)]
        if total.models:  # a rank that checked alone would wait for the others
            self._checked |= {False, True}
        try:
            for part in parts:
                with total.kept_on_rank(part is not parts[-1]):
                    total.add(*self._loss(part), part.length)
            if len(total.weights_of_a_sample) > 1 and True not in self._checked:
                self._check(batch)
        except BaseException:
            total.undo()
            raise
        return total.result()

    def _length(self, values: list[Any]) -> int:
        """Return the number of samples. Raises StepError if it is unknown, and for arguments that
        can't be cut.
        """
        for one in tree_leaves(values, is_leaf=lambda one: isinstance(one, PackedSequence)):
            kind = "PackedSequence" * isinstance(one, PackedSequence)
            if isinstance(one, torch.Tensor) and (one.is_nested or one.layout != torch.strided):
                kind = "nested tensor" if one.is_nested else f"tensor in {one.layout}"
            if kind:
                raise StepError(
                    f"micro_batch can't cut a {kind}: give a padded or dense tensor (and lengths), "
                    "and make it in the function"
                )
        found = [one for one in map(lengths_of, values) if one]
        if not found:
            raise StepError("there is no tensor in the arguments whose first dimension is a batch")
        length, *others = min(found, key=len)
        if others and length <= self.size:  # the list is cut, and not its samples
            length, *others = others
        if length > self.size and (any(n > self.size for n in others) or [length] * 2 in found):
            raise StepError(
                "a list of tensors that are alike may be samples, or parts of a batch: stack "
                "samples, or give the parts as arguments of their own"
            )
        return length

    @property
    def _models(self) -> list[torch.nn.Module]:
        return outermost(reached([self.function]))

    def _loss(self, part: Batch, without_dropout: bool = False) -> tuple[Any, float | None]:
        """Return the loss of a part, and the divisor of its mean; None for a sum.

        The divisor is by `weight`, else the targets that torch's loss function counts, else the
        samples.
        """
        with _divisors(without_dropout) as divisors:
            loss = _loss_in(part.call(self.function))
        if loss is None:
            raise StepError(
                "the function gives no loss: one number alone, first of a tuple, or named `loss`. "
                "For results of parts, join them: torch.cat([net(x) for x in images.split(256)])"
            )
        if self.is_sum:
            return loss, None
        if self.weight is not None:
            return loss, float(part.call(self.weight))
        # With several means (a loss for each of two heads) it may be wrong: the check tells.
        return loss, divisors[-1] if divisors else float(part.length)

    def _check(self, batch: Batch) -> None:
        """Try a few samples at once and in two parts; equal parts prove nothing.

        Raises StepError if the losses of the parts don't make the loss of the whole.
        """
        number, models = min(batch.length, TRIED), self._models
        every = max(batch.length // number, 1)
        few = batch.cut(slice(0, every * number, every))
        uncut = [name for name, one in few.given.items() if _shares(one, batch.given[name])]
        # Copies, so that a trial does not write to the user's tensors.
        given = {key: tree_map(_copied, one) for key, one in few.given.items()}
        few = Batch(given, number, self.whole)
        cut = [*few.parts(max(number // 2, 1))]
        tried = self._tried((few, few, *cut), uncut)
        whole, again, *losses = (float(loss.detach()) for loss, _ in tried)
        weights = [weight for _, weight in tried[2:]]
        if math.isnan(whole) or len(set(losses)) == 1:
            return
        if whole != again:
            messages.warn(
                "micro_batch: two calls with the same samples give different losses (random "
                "numbers, or a state that they change), so the parts' loss was not checked"
            )
            self._checked.add(True)
            return
        made = _together(losses, weights)
        largest = max(abs(whole), abs(made), *map(abs, losses), 1e-6)
        if not abs(made - whole) <= _tolerance(few, models) * largest:
            raise StepError(
                f"the losses of parts don't make that of the batch ({made:.4g}, and {whole:.4g} of "
                f"{number} samples at once): it is no mean over samples. A sum needs "
                "reduction='sum'; a mean over something else (a mask) needs weight=…, its divisor"
            )
        each = {weight / one.length for weight, one in zip(weights, cut, strict=True) if weight}
        self._checked.add(len(each) > 1)

    def _tried(self, parts: Sequence[Batch], uncut: Sequence[Key]) -> list[Any]:
        """Return `_loss` of each, without dropout and batch statistics, and put back all changes.

        The second call starts from the state after the first.
        """
        snapshot = Snapshot(Walk([self.function, self.weight]), off_device=True)
        found = []
        try:
            for number, part in enumerate(parts):
                if number > 1:
                    snapshot.restore()
                for _, norm in _batch_norms(self._models):
                    norm.training = False
                found.append(self._loss(part, without_dropout=True))
        except Exception as error:
            if isinstance(error, StepError) or not uncut:
                raise
            raise StepError(
                f"the loss of a few samples fails ({in_a_line(error)}): argument {uncut[0]} is not "
                "as long as the batch, so that each part gets all of it"
            ) from error
        finally:
            snapshot.restore()
        return found


def _together(losses: list[float], weights: list[float | None]) -> float:
    """Return the sum or the weighted mean of the parts' losses."""
    if any(weight is None for weight in weights):
        return sum(losses)
    counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight]
    return sum(loss * weight for loss, weight in counted) / sum(weight for _, weight in counted)


def _loss_in(result: Any) -> Any:
    """Return the scalar in a result: alone, first of a tuple, or named `loss`."""
    if isinstance(result, tuple) and result and not hasattr(result, "loss"):
        result = result[0]
    elif isinstance(result, dict):
        result = result.get("loss")
    elif not torch.is_tensor(result):
        result = getattr(result, "loss", None)
    return result if torch.is_tensor(result) and result.ndim == 0 else None


@contextmanager
def _divisors(without_dropout: bool) -> Iterator[list[float | None]]:
    """Collect the divisor of each mean by a loss function in the block; None for a sum."""
    means = {getattr(functional, name) for name in MEANS}
    found: list[float | None] = []

    class DivisorMode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs, name = kwargs or {}, getattr(function, "__name__", "")
            if without_dropout and "dropout" in name and hasattr(functional, name):
                return args[0] if args else kwargs["input"]
            if without_dropout and "dropout_p" in kwargs:  # attention
                kwargs = {**kwargs, "dropout_p": 0.0}
            result = function(*args, **kwargs)
            if function in means and torch.is_tensor(result) and not result.ndim:
                found.append(_divisor(args, kwargs))
            return result

    with DivisorMode():
        yield found


def _divisor(args: Any, kwargs: Any) -> float | None:
    """Return the divisor by the formula of torch.nn.CrossEntropyLoss; None for a sum."""
    names = ("input", "target", "weight", "size_average", "ignore_index")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") != "mean":
        return None
    if target.is_floating_point():  # probabilities of classes
        return float(target.numel() // target.shape[1 if target.ndim > 1 else 0])
    kept = target != given.get("ignore_index", -100)
    return float(kept.sum() if weight is None else weight[target[kept]].sum())


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _shares(value: Any, other: Any) -> bool:
    """Return whether both contain the same tensor object with a first dimension."""
    ids = {id(one) for one in tensors_in([other]) if one.ndim}
    return not ids.isdisjoint(map(id, tensors_in([value])))


def _batch_norms(models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the BatchNorm modules in training mode, with their names."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, kinds) and module.training:
                yield name, module


def _tolerance(few: Batch, models: list[torch.nn.Module]) -> float:
    """Return the tolerance for the least precise dtype in the computation."""
    parameters = [one for model in models for one in model.parameters()]
    tensors = [*tensors_in(list(few.given.values())), *parameters]
    halves = any(one.dtype in (torch.float16, torch.bfloat16) for one in tensors)
    if halves or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return CLOSE_IN_HALF
    in_tf32 = torch.get_float32_matmul_precision() != "highest"
    on_gpu = any(one.device.type != "cpu" for one in tensors)
    return CLOSE_IN_TF32 if in_tf32 or (on_gpu and torch.backends.cudnn.allow_tf32) else CLOSE
