"""Parts of a batch: their losses and gradients, added up, and whether these make up the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.subject.discovery import outermost, reached
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.samples import cut, length_of
from speedkit_jupyter.support.torch_private import tree_leaves, tree_map, version

if TYPE_CHECKING:
    import torch

# The position or name of an argument.
Key = int | str
# Functions of torch.nn.functional whose mean is over the targets that count.
MEANS = ("cross_entropy", "nll_loss")
# This many samples are tried together, and in two parts.
TRIED = 4
# How far a mean over parts may be off, relative to the largest loss. A wrong mean is off by far
# more; rounding is some 1e-7 in float32, 5e-4 in TF32, 8e-3 in bfloat16.
CLOSE, CLOSE_IN_TF32, CLOSE_IN_HALF = 5e-6, 1e-3, 3e-2


@dataclass(frozen=True)
class Batch:
    """Arguments of which some hold a value for each of `length` samples. Those whose position or
    name is `whole` are never cut.
    """

    given: Mapping[Key, Any]
    length: int
    whole: Collection[Key] = ()

    @classmethod
    def of(
        cls, arguments: tuple[Any, ...], named: Mapping[str, Any], whole: Collection[Key]
    ) -> Batch:
        """The length is that of the first tensor's first dimension. Raises StepError without."""
        given: dict[Key, Any] = dict(enumerate(arguments))
        given.update((name, value) for name, value in named.items())
        lengths = (length_of(value) for key, value in given.items() if key not in whole)
        length = next((one for one in lengths if one is not None), None)
        if length is None:
            raise StepError("there is no tensor in the arguments whose first dimension is a batch")
        return cls(given, length, whole)

    def cut(self, samples: slice) -> Batch:
        """Return these samples."""
        given = {
            key: value if key in self.whole else cut(value, self.length, samples)
            for key, value in self.given.items()
        }
        return replace(self, given=given, length=len(range(self.length)[samples]))

    def spread(self, number: int) -> Batch:
        """Return this number of samples, at equal distances."""
        every = max(self.length // number, 1)
        return self.cut(slice(0, every * number, every))

    def parts(self, size: int) -> Iterator[Batch]:
        """Give one part after another; the last may be smaller."""
        for first in range(0, self.length, size):
            yield self.cut(slice(first, first + size))

    def call(self, function: Callable[..., Any]) -> Any:
        """Call the function with these."""
        names = {key: value for key, value in self.given.items() if isinstance(key, str)}
        return function(*(value for key, value in self.given.items() if key not in names), **names)

    def run(self, function: Callable[..., Any]) -> Any:
        """Call the function. Raises StepError where it writes to an argument."""
        before = [version(one) for one in self.tensors]
        result = self.call(function)
        if [version(one) for one in self.tensors] != before:
            raise StepError(
                "the call writes to its arguments, which each part would do again: micro_batch "
                "can't split it"
            )
        return result

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors in the arguments."""
        import torch

        leaves = tree_leaves(list(self.given.values()))
        return [one for one in leaves if isinstance(one, torch.Tensor)]


def loss_in(result: Any) -> Any:
    """Return the scalar that a function gave: alone, first of a tuple, or named `loss`."""
    import torch

    if isinstance(result, tuple) and result and not hasattr(result, "loss"):
        result = result[0]
    elif isinstance(result, dict):
        result = result.get("loss")
    elif not torch.is_tensor(result):
        result = getattr(result, "loss", None)
    return result if torch.is_tensor(result) and result.ndim == 0 else None


@dataclass(frozen=True)
class PartLoss:
    """Gives the loss of a part, and what its mean is over: what `weight` says, else the targets
    that torch's loss function counts, else the samples. None for a sum.
    """

    function: Callable[..., Any]
    weight: Callable[..., Any] | None = None
    is_sum: bool = False

    @property
    def models(self) -> list[torch.nn.Module]:
        """Return the models that the function reaches."""
        return outermost(reached([self.function]))

    def __call__(self, part: Batch, still: bool = False) -> tuple[Any, float | None]:
        """Call the function, without dropout if it is `still`. Raises StepError without a loss."""
        with _divisors(still) as divisors:
            loss = loss_in(part.run(self.function))
        if loss is None:
            raise StepError(
                "the function gives no loss: one number alone, first of a tuple, or named `loss`. "
                "For results of parts, join them: torch.cat([net(x) for x in images.split(256)])"
            )
        if self.is_sum:
            return loss, None
        if self.weight is not None:
            return loss, float(part.call(self.weight))
        # Of several means (a loss for each of two heads) none need be right: the check says.
        return loss, divisors[-1] if divisors else float(part.length)


@contextmanager
def _divisors(still: bool) -> Iterator[list[float | None]]:
    """Collect what each mean of a loss function in the block divides by; None for a sum.

    If it is `still`, dropout keeps everything.
    """
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    means = {getattr(functional, name) for name in MEANS}
    found: list[float | None] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            name = getattr(function, "__name__", "")
            if still and "dropout" in name and getattr(functional, name, None) is function:
                return args[0] if args else kwargs["input"]
            if still and "dropout_p" in kwargs:  # attention
                kwargs = {**kwargs, "dropout_p": 0.0}
            result = function(*args, **kwargs)
            if function in means and torch.is_tensor(result) and not result.ndim:
                found.append(_divisor(args, kwargs))
            return result

    with Watch():
        yield found


def _divisor(args: Any, kwargs: Any) -> float | None:
    """Return it by the formula of torch.nn.CrossEntropyLoss; None for a sum."""
    names = ("input", "target", "weight", "size_average", "ignore_index")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") != "mean":
        return None
    if target.is_floating_point():  # probabilities of classes
        return float(target.numel() // target.shape[1 if target.ndim > 1 else 0])
    kept = target != given.get("ignore_index", -100)
    return float(kept.sum() if weight is None else weight[target[kept]].sum())


@dataclass
class Accumulated:
    """Takes the parts of a batch one after another, with the backward pass of each.

    What the whole batch's mean divides by is known at the end only. So each part is weighed against
    the first one, and at the end all gradients are divided by the sum of the weights. Gradients of
    before the call are set aside until then.
    """

    loss: PartLoss
    scaler: torch.amp.GradScaler | None = None
    _is_sum: bool = False
    _weights: list[float] = field(default_factory=list)
    _per_sample: set[float] = field(default_factory=set)
    _losses: list[Any] = field(default_factory=list)
    _before: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def add(self, part: Batch) -> None:
        """Add a part."""
        import torch

        loss, weight = self.loss(part)
        if weight is None:
            weight, self._is_sum = 1.0, True
        self._per_sample.add(weight / part.length)
        if not weight:  # no target in it counts, and its mean is NaN
            return
        self._weights.append(weight)
        self._losses.append(loss.detach())
        if loss.requires_grad:
            self._set_aside(loss)
            scaled = loss * (weight / self._weights[0])
            scaled = scaled if self.scaler is None else self.scaler.scale(scaled)
            with torch.autocast(loss.device.type, enabled=False):
                scaled.backward()

    @property
    def is_uneven(self) -> bool:
        """Whether the parts' weights differ otherwise than their numbers of samples."""
        return not self._is_sum and len(self._per_sample) > 1

    def result(self) -> Any:
        """Return the loss of the whole; gradients are those of it then."""
        import torch

        if not self._losses:
            return torch.tensor(float("nan"))  # as torch's own mean over no targets
        total = 1.0 if self._is_sum else sum(self._weights)
        for leaf, before in self._before.values():
            if leaf.grad is not None:
                leaf.grad.mul_(1.0 if self._is_sum else self._weights[0] / total)
            if before is not None:  # accumulated into the tensor that was there
                if leaf.grad is not None:
                    before.add_(leaf.grad)
                leaf.grad = before
        losses = torch.stack(self._losses)
        return (losses * losses.new_tensor(self._weights)).sum() / total

    def undo(self) -> None:
        """Put the gradients back as they were before the call."""
        for leaf, before in self._before.values():
            leaf.grad = before

    def _set_aside(self, loss: Any) -> None:
        """Set aside the gradients of all tensors whose `.grad` this part's backward pass writes."""
        waiting, seen = [loss.grad_fn], {None}
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is None or id(leaf) in self._before:
                continue
            if leaf._post_accumulate_grad_hooks:
                raise StepError(
                    "a parameter has a hook that runs once its gradient is there (an optimizer "
                    "that steps in the backward pass?): it would run for each part"
                )
            self._before[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None


def check(loss: PartLoss, batch: Batch) -> bool | None:
    """Try a few samples at once and in two parts; raise StepError where the losses of the parts
    don't make that of the whole.

    Return whether the parts weigh otherwise than by their samples, and None where they are alike,
    which proves nothing. Warns where the loss is random and can't be checked.
    """
    few, models = batch.spread(min(batch.length, TRIED)), loss.models
    # What a trial writes to is not the user's.
    few = replace(few, given={key: tree_map(_copied, one) for key, one in few.given.items()})
    cut = [*few.parts(max(few.length // 2, 1))]

    def tried(part: Batch) -> tuple[float, float | None]:
        value, weight = loss(part, still=True)
        return float(value.detach()), weight

    with _aside(models):
        expected, again, *parts = map(tried, (few, few, *cut))
    whole = expected[0]
    if math.isnan(whole) or len({value for value, _ in parts}) == 1:
        return None
    if whole != again[0]:
        messages.warn("micro_batch: the loss draws random numbers, and was not checked")
        return True
    made = _together(parts)
    largest = max(abs(whole), abs(made), *(abs(value) for value, _ in parts), 1e-6)
    if not abs(made - whole) <= _tolerance(few, models) * largest:
        raise StepError(
            f"the losses of parts don't make that of the batch ({made:.4g}, and {whole:.4g} of "
            f"{few.length} samples at once): it is no mean over samples. A sum needs "
            "reduction='sum'; a mean over something else (a mask) needs weight=…, which says over "
            "how much"
        )
    return len({w / one.length for (_, w), one in zip(parts, cut, strict=True) if w}) > 1


def _copied(leaf: Any) -> Any:
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _together(parts: list[tuple[float, float | None]]) -> float:
    if any(weight is None for _, weight in parts):
        return sum(value for value, _ in parts)
    counted = [(value, weight) for value, weight in parts if weight]
    return sum(value * weight for value, weight in counted) / sum(weight for _, weight in counted)


def batch_norms(models: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Give the BatchNorm modules that train, with their names."""
    from torch import nn

    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, kinds) and module.training:
                yield name, module


@contextmanager
def _aside(models: list[torch.nn.Module]) -> Iterator[None]:
    """Run the block without statistics of batches; put torch's random numbers and buffers back."""
    import torch

    buffers = [(buffer, buffer.clone()) for model in models for buffer in model.buffers()]
    norms = [module for _, module in batch_norms(models)]
    with torch.random.fork_rng():
        try:
            for norm in norms:
                norm.training = False
            yield
        finally:
            for norm in norms:
                norm.training = True
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _tolerance(few: Batch, models: list[torch.nn.Module]) -> float:
    """Return the tolerance of the least exact numbers that take part."""
    import torch

    tensors = [*few.tensors, *(one for model in models for one in model.parameters())]
    halves = any(one.dtype in (torch.float16, torch.bfloat16) for one in tensors)
    if halves or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return CLOSE_IN_HALF
    in_tf32 = torch.get_float32_matmul_precision() != "highest"
    on_gpu = any(one.device.type != "cpu" for one in tensors)
    return CLOSE_IN_TF32 if in_tf32 or (on_gpu and torch.backends.cudnn.allow_tf32) else CLOSE
