"""A batch that does not fit, in parts: the same loss, gradients and results as of the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.parts import (
    Accumulated,
    Batch,
    Key,
    PartLoss,
    batch_norms,
    check,
    is_loss,
)
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.torch_private import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from speedkit_jupyter.support.tracebacks import door, lets_go

if TYPE_CHECKING:
    import torch


@lets_go
def micro_batch(
    function: Callable[..., Any],
    size: int,
    *,
    whole: Collection[Key] = (),
    reduction: str = "mean",
    weight: Callable[..., Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    to: str | torch.device | None = None,
    batch_norm: bool = False,
) -> MicroBatch:
    """Return `function` for batches that don't fit: it is called with `size` samples at a time.

    Training: a function that gives the loss of a batch. Its backward pass is made part by part, so
    that gradients add up to those of the whole batch's loss, which is returned without a graph:

        loss_of = micro_batch(lambda x, y: F.cross_entropy(net(x), y), 16)
        optimizer.zero_grad()
        loss = loss_of(x, y)        # instead of loss = …; loss.backward()
        optimizer.step()

    Inference: a model, or whatever gives a value for each sample, called without gradients; the
    results are joined, in main memory with `to="cpu"`, or `stream`ed part by part.

    A loss that is a mean is weighed by the samples of each part, or by the targets that
    cross-entropy counts; one that is a mean over something else (a mask) by `weight`, a function of
    the same arguments that says over how much; with `reduction="sum"` it is a sum. The first call
    checks with a few samples that the parts' losses make that of the whole. `whole` are positions
    or names of arguments that are not cut. `scaler` scales the loss before the backward pass.
    Dropout draws other masks for parts than for the whole, and a module that changes its own state
    in each call (a buffer, a cache) does so once a part.

    Raises StepError where parts don't make up the whole, for BatchNorm that trains (it would see
    each part's statistics) unless `batch_norm=True`, and for a function that writes to its
    arguments (a key-value cache).
    """
    if not callable(function):
        raise StepError(f"function must be callable, not {type(function).__name__}")
    if arguments.whole("size", size) < 1:
        raise StepError(f"size must be 1 or more, not {size}")
    if reduction not in ("mean", "sum"):
        raise StepError(f"reduction must be 'mean' or 'sum', not {reduction!r:.40}")
    loss = PartLoss(function, weight, reduction == "sum")
    return MicroBatch(loss, size, whole, scaler, to, batch_norm)


@dataclass(repr=False)
class MicroBatch:
    """A function that is called with a few samples at a time; made by `micro_batch`."""

    loss: PartLoss
    size: int
    whole: Collection[Key]
    scaler: torch.amp.GradScaler | None
    to: str | torch.device | None
    batch_norm: bool
    _is_loss: bool | None = field(default=None, init=False)
    # Whether parts that weigh alike, and that don't, were seen to make up the whole.
    _checked: set[bool] = field(default_factory=set, init=False)

    def __repr__(self) -> str:
        function = self.loss.function
        return f"micro_batch({getattr(function, '__name__', type(function).__name__)}, {self.size})"

    @lets_go
    @door
    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the loss of the whole batch, its backward pass done where gradients are enabled;
        or the results of all samples.
        """
        batch = Batch.of(given, named, self.whole)
        if not batch.length:
            return self._moved(self.loss.function(*given, **named))
        self._refuse_batch_norm(batch)
        if self._is_loss is None:
            self._is_loss = is_loss(self.loss, batch)
        if not self._is_loss:
            return joined([self._moved(part) for part in self._results(batch)])
        if not self._checked:
            self._check(batch)
        total = Accumulated(self.loss, self.scaler)
        try:
            for part in batch.parts(self.size):
                total.add(part)
            if total.is_uneven and True not in self._checked:
                self._check(batch)
        except BaseException:
            total.undo()
            raise
        return total.result()

    @lets_go
    def stream(self, *given: Any, **named: Any) -> Iterator[Any]:
        """Give the results of one part after another, each where `to` says."""
        batch = Batch.of(given, named, self.whole)
        self._refuse_batch_norm(batch)
        return map(self._of_part, batch.parts(self.size))

    @lets_go
    @door
    def _of_part(self, part: Batch) -> Any:
        return self._moved(part.run(self.loss.function))

    def _check(self, batch: Batch) -> None:
        weighs_otherwise = check(self.loss, batch) if batch.length > 1 else None
        if weighs_otherwise is not None:
            self._checked.add(weighs_otherwise)

    def _results(self, batch: Batch) -> Iterator[Any]:
        import torch

        for part in batch.parts(self.size):
            result = part.run(self.loss.function)
            if isinstance(result, Mapping):  # a library's own (transformers' ModelOutput, say)
                result = dict(result)
            tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
            if any(tensor.grad_fn is not None for tensor in tensors):
                raise StepError(
                    "the results keep their graphs, and all of the batch's memory with them: call "
                    "it under torch.inference_mode(), or give a function that returns the loss"
                )
            if odd := [one for one in tensors if not one.ndim or len(one) != part.length]:
                raise StepError(
                    f"a part of {part.length} samples gave a tensor of shape {tuple(odd[0].shape)}:"
                    " its first dimension is not the batch's"
                )
            yield result

    def _moved(self, result: Any) -> Any:
        import torch

        if self.to is None:
            return result
        return tree_map(lambda one: one.to(self.to) if torch.is_tensor(one) else one, result)

    def _refuse_batch_norm(self, batch: Batch) -> None:
        """Raise StepError where BatchNorm trains and there is more than one part."""
        if self.batch_norm or batch.length <= self.size:
            return
        for name, norm in batch_norms(self.loss.models):
            raise StepError(
                f"{name or 'the model'} ({type(norm).__name__}) would see the statistics of each "
                "part and not of the batch: put it into eval mode, or allow that by batch_norm=True"
            )


def joined(parts: list[Any]) -> Any:
    """Return the results of parts as those of the whole, each tensor joined along its first
    dimension. Raises StepError where results are no tensors, or differ in shape.
    """
    import torch

    def together(*leaves: Any) -> Any:
        return None if leaves[0] is None else torch.cat(leaves)

    flat = [tree_flatten(part) for part in parts]
    try:
        joined = [together(*leaves) for leaves in zip(*(each for each, _ in flat), strict=True)]
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise StepError(
            f"the results of parts can't be joined ({why:.80}): take them one by one with "
            ".stream(…)"
        ) from None
    return tree_unflatten(joined, flat[0][1])
