"""A batch that does not fit, in parts: the same loss and gradients as of the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.parts import (
    Accumulated,
    Batch,
    Key,
    PartLoss,
    batch_norms,
    check,
)
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.tracebacks import hide_internal_frames, user_code_boundary

if TYPE_CHECKING:
    import torch


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
    """Return `function`, which gives the loss of a batch, for batches that don't fit: it is called
    with `size` samples at a time.

    Its backward pass is made part by part, so that gradients add up to those of the whole batch's
    loss, which is returned without a graph:

        loss_of = micro_batch(lambda x, y: F.cross_entropy(net(x), y), 16)
        optimizer.zero_grad()
        loss = loss_of(x, y)        # instead of loss = …; loss.backward()
        optimizer.step()

    A loss that is a mean is weighed by the samples of each part, or by the targets that
    cross-entropy counts; one that is a mean over something else (a mask) by `weight`, a function of
    the same arguments that says over how much; with `reduction="sum"` it is a sum. The first call
    checks with a few samples that the parts' losses make that of the whole. `whole` are positions
    or names of arguments that are not cut. `scaler` scales the loss before the backward pass.
    Dropout draws other masks for parts than for the whole, and a module that changes its own state
    in each call (a buffer, a cache) does so once a part.

    Raises StepError where parts don't make up the whole, for BatchNorm that trains (it would see
    each part's statistics) unless `batch_norm=True`, and for a function that writes to its
    arguments.
    """
    if not callable(function):
        raise StepError(f"function must be callable, not {type(function).__name__}")
    if arguments.whole("size", size) < 1:
        raise StepError(f"size must be 1 or more, not {size}")
    if reduction not in ("mean", "sum"):
        raise StepError(f"reduction must be 'mean' or 'sum', not {reduction!r:.40}")
    loss = PartLoss(function, weight, reduction == "sum")
    return MicroBatch(loss, size, whole, scaler, batch_norm)


@dataclass(repr=False)
class MicroBatch:
    """A loss that is computed with a few samples at a time; made by `micro_batch`."""

    loss: PartLoss
    size: int
    whole: Collection[Key]
    scaler: torch.amp.GradScaler | None
    batch_norm: bool
    # Whether parts that weigh alike, and that don't, were seen to make up the whole.
    _checked: set[bool] = field(default_factory=set, init=False)

    def __repr__(self) -> str:
        function = self.loss.function
        return f"micro_batch({getattr(function, '__name__', type(function).__name__)}, {self.size})"

    @hide_internal_frames
    @user_code_boundary
    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the loss of the batch, its backward pass done where gradients are enabled."""
        batch = Batch.of(given, named, self.whole)
        for name, norm in batch_norms(self.loss.models) if batch.length > self.size else ():
            if not self.batch_norm:
                raise StepError(
                    f"{name or 'the model'} ({type(norm).__name__}) would see the statistics of "
                    "each part and not of the batch: put it into eval mode, or allow that by "
                    "batch_norm=True"
                )
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

    def _check(self, batch: Batch) -> None:
        weighs_otherwise = check(self.loss, batch) if batch.length > 1 else None
        if weighs_otherwise is not None:
            self._checked.add(weighs_otherwise)
