"""A batch that does not fit, in parts: the same loss, gradients and results as of the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching import equal_parts
from speedkit_jupyter.batching.losses import Accumulated, Lost
from speedkit_jupyter.batching.parts import Call, Key
from speedkit_jupyter.measure.subject.discovery import outermost, reached
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.torch_private import tree_leaves, tree_map
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
    checks with a few samples that the parts' losses make that of the whole: StepError where they
    don't. `whole` are positions or names of arguments that are not cut. `scaler` scales the loss
    before the backward pass. BatchNorm that trains would see each part's statistics: StepError,
    unless `batch_norm=True`. Dropout draws other masks for parts than for the whole. Raises
    StepError for a function that writes to its arguments (a key-value cache).
    """
    if not callable(function):
        raise StepError(f"function must be callable, not {type(function).__name__}")
    if arguments.whole("size", size) < 1:
        raise StepError(f"size must be 1 or more, not {size}")
    if reduction not in ("mean", "sum"):
        raise StepError(f"reduction must be 'mean' or 'sum', not {reduction!r:.40}")
    lost = Lost(function, weight, reduction == "sum")
    return MicroBatch(lost, size, whole, scaler, to, batch_norm)


class MicroBatch:
    """A function that is called with a few samples at a time; made by `micro_batch`."""

    def __init__(
        self,
        lost: Lost,
        size: int,
        whole: Collection[Key],
        scaler: torch.amp.GradScaler | None,
        to: str | torch.device | None,
        batch_norm: bool,
    ) -> None:
        self.size = size
        self._lost, self._function, self._whole = lost, lost.function, whole
        self._scaler, self._to, self._batch_norm = scaler, to, batch_norm
        self._is_checked = self._is_checked_uneven = False

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"micro_batch({name}, {self.size})"

    @lets_go
    @door
    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the loss of the whole batch, its backward pass done where gradients are enabled;
        or the results of all samples.
        """
        call = Call.of(given, named, self._whole)
        if not call.length:
            return self._moved(self._function(*given, **named))
        self._refuse_batch_norm(call)
        if not self._gives_loss(call):
            return joined([self._moved(part) for part in self._results(call)])
        total = Accumulated(self._lost, self._scaler)
        try:
            for part in call.parts(self.size):
                total.add(part)
            if total.is_uneven and not self._is_checked_uneven:
                self._is_checked_uneven = equal_parts.check(self._lost, call, self.size)
        except BaseException:
            total.undo()
            raise
        return total.result()

    @lets_go
    def stream(self, *given: Any, **named: Any) -> Iterator[Any]:
        """Give the results of one part after another, each where `to` says."""
        call = Call.of(given, named, self._whole)
        self._refuse_batch_norm(call)
        return map(self._of_part, call.parts(self.size))

    @lets_go
    @door
    def _of_part(self, part: Call) -> Any:
        return self._moved(part.run(self._function))

    def _gives_loss(self, call: Call) -> bool:
        """Return whether it gives a loss; checks the first time that parts make up the whole."""
        if not self._is_checked:
            self._is_loss = equal_parts.is_loss(self._function, call)
            is_proof = call.length > 1 and not call.is_alike
            if self._is_loss and is_proof:
                self._is_checked_uneven = equal_parts.check(self._lost, call, self.size)
            self._is_checked = is_proof
        return self._is_loss

    def _results(self, call: Call) -> Iterator[Any]:
        import torch

        for part in call.parts(self.size):
            result = part.run(self._function)
            if isinstance(result, Mapping):  # a library's own (transformers' ModelOutput, say)
                result = dict(result)
            leaves = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
            if any(leaf.grad_fn is not None for leaf in leaves):
                raise StepError(
                    "the results keep their graphs, and all of the batch's memory with them: call "
                    "it under torch.inference_mode(), or give a function that returns the loss"
                )
            if odd := [leaf for leaf in leaves if not leaf.ndim or len(leaf) != part.length]:
                raise StepError(
                    f"a part of {part.length} samples gave a tensor of shape {tuple(odd[0].shape)}:"
                    " its first dimension is not the batch's"
                )
            yield result

    def _moved(self, result: Any) -> Any:
        import torch

        if self._to is None:
            return result
        move, to = torch.Tensor.to, self._to
        return tree_map(lambda leaf: move(leaf, to) if torch.is_tensor(leaf) else leaf, result)

    def _refuse_batch_norm(self, call: Call) -> None:
        """Raise StepError where BatchNorm trains and there is more than one part."""
        if self._batch_norm or call.length <= self.size:
            return
        for model in outermost(reached([self._function])):
            names = {id(module): name for name, module in model.named_modules()}
            for norm in equal_parts.batch_norms(model):
                raise StepError(
                    f"{names[id(norm)] or 'the model'} ({type(norm).__name__}) would see the "
                    "statistics of each part and not of the batch: put it into eval mode, or allow "
                    "that by batch_norm=True"
                )


def joined(parts: list[Any]) -> Any:
    """Return the results of parts as those of the whole: tensors joined along their first
    dimension, lists of other things one after another. Raises StepError where they can't be.
    """
    import torch

    first = parts[0]
    if isinstance(first, torch.Tensor):
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise StepError(
                f"parts gave tensors of different shapes, {' and '.join(map(str, shapes))}: take "
                "them one by one with .stream(…)"
            )
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        whole = map(joined, map(list, zip(*parts, strict=True)))
        return type(first)(*whole) if hasattr(first, "_fields") else tuple(whole)
    if isinstance(first, list):
        if not any(map(torch.is_tensor, tree_leaves(first))):  # texts, one for each sample
            return [one for part in parts for one in part]
        return [joined(list(some)) for some in zip(*parts, strict=True)]
    if first is None:
        return None
    raise StepError(f"a part gave a {type(first).__name__}, which can't be joined")
