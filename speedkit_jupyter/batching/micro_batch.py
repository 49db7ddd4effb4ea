"""A batch that does not fit, in parts: the same loss, gradients and results as of the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching import equal_parts
from speedkit_jupyter.batching.accumulated import Accumulated, Lost
from speedkit_jupyter.batching.joined import Joined
from speedkit_jupyter.batching.parts import Call, Key
from speedkit_jupyter.measure.subject.discovery import outermost, reached
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
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
    """`function` for batches that don't fit: called with `size` samples at a time.

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
    the same arguments that says over how much; with `reduction="sum"` it is a sum. On the first
    call it is checked with a few samples that the parts' losses make that of the whole: StepError
    where they don't. `whole` are positions or names of arguments that are not cut. `scaler` scales
    the loss before the backward pass.
    BatchNorm that trains would see each part's statistics: declined, but with `batch_norm=True`.
    Dropout draws other masks for parts than for the whole. A function that writes to its arguments
    (a key-value cache) is refused with StepError.
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
        """The loss of the whole batch, its backward pass done where gradients are; or the results
        of all samples.
        """
        call = Call.of(given, named, self._whole)
        if not call.length:
            return self._moved(self._function(*given, **named))
        self._refuse_batch_norm(call)
        if not self._gives_loss(call):
            return self._joined(call)
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
        """The results of one part after another, each where `to` says."""
        call = Call.of(given, named, self._whole)
        self._refuse_batch_norm(call)
        return map(self._of_part, call.parts(self.size))

    @lets_go
    @door
    def _of_part(self, part: Call) -> Any:
        return self._moved(part.run(self._function))

    def _gives_loss(self, call: Call) -> bool:
        """Whether it gives a loss; the first time whether parts make up the whole."""
        if not self._is_checked:
            self._is_loss = equal_parts.is_loss(self._function, call)
            is_proof = call.length > 1 and not call.is_alike
            if self._is_loss and is_proof:
                self._is_checked_uneven = equal_parts.check(self._lost, call, self.size)
            self._is_checked = is_proof
        return self._is_loss

    def _joined(self, call: Call) -> Any:
        joined = Joined(call.length, self._to)
        for part in call.parts(self.size):
            result = part.run(self._function)
            if equal_parts.has_graph(result):
                raise StepError(
                    "the results keep their graphs, and all of the batch's memory with them: call "
                    "it under torch.inference_mode(), or give a function that returns the loss"
                )
            joined.add(_plain(result), part.length)
        return joined.result()

    def _moved(self, result: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_map

        if self._to is None:
            return result
        move, to = torch.Tensor.to, self._to
        return tree_map(lambda leaf: move(leaf, to) if torch.is_tensor(leaf) else leaf, result)

    def _refuse_batch_norm(self, call: Call) -> None:
        """Where it trains and there is more than one part."""
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


def _plain(result: Any) -> Any:
    """Results of a library's own (transformers' ModelOutput, say) as dictionaries."""
    return dict(result) if isinstance(result, Mapping) and type(result) is not dict else result
