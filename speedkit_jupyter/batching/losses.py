"""The losses and gradients of parts, added up to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.parts import Call
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch

# Functions of torch.nn.functional whose mean is over the targets that count.
MEANS = ("cross_entropy", "nll_loss")
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
           "feature_alpha_dropout")  # fmt: skip


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
class Lost:
    """Gives the loss of a part, and what its mean is over: what `weight` says, else the targets
    that torch's loss function counts, else the samples. None for a sum.
    """

    function: Callable[..., Any]
    weight: Callable[..., Any] | None = None
    is_sum: bool = False

    def __call__(self, part: Call, still: bool = False) -> tuple[Any, float | None]:
        """Call the function, without dropout if it is `still`. Raises StepError without a loss."""
        with _divisors(still) as divisors:
            loss = loss_in(part.run(self.function))
        if loss is None:
            raise StepError("the function gave a loss before, and none for this part")
        if self.is_sum:
            return loss, None
        if self.weight is not None:
            return loss, float(self.weight(*part.arguments, **part.named))
        # Of several means (a loss for each of two heads) none need be right: the check says.
        return loss, divisors[-1] if divisors else float(part.length)


class Accumulated:
    """Takes the parts of a batch one after another, with the backward pass of each.

    What the whole batch's mean divides by is known at the end only. So each part is weighed against
    the first one, and at the end all gradients are divided by the sum of the weights. Gradients of
    before the call are set aside until then.
    """

    def __init__(self, lost: Lost, scaler: torch.amp.GradScaler | None) -> None:
        self._lost, self._scaler = lost, scaler
        self._weights: list[float] = []
        self._per_sample: set[float] = set()
        self._losses: list[Any] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        self._is_sum = lost.is_sum

    def add(self, part: Call) -> None:
        """Add a part."""
        loss, weight = self._lost(part)
        if weight is None:
            weight, self._is_sum = 1.0, True
        else:
            self._per_sample.add(weight / part.length)
        if not weight:  # no target in it counts, and its mean is NaN
            return
        self._weights.append(weight)
        self._losses.append(loss.detach())
        if loss.requires_grad:
            self._set_aside(loss)
            self._backward(loss * (weight / self._weights[0]))

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

    def _backward(self, loss: Any) -> None:
        import torch

        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        with torch.autocast(loss.device.type, enabled=False):
            scaled.backward()

    def _set_aside(self, loss: Any) -> None:
        """Set aside the gradients of what this part's graph reaches."""
        for leaf in _leaves_of(loss):
            if id(leaf) in self._before:
                continue
            if leaf._post_accumulate_grad_hooks:
                raise StepError(
                    "a parameter has a hook that runs once its gradient is there (an optimizer "
                    "that steps in the backward pass?): it would run for each part"
                )
            self._before[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None


def _leaves_of(loss: Any) -> list[Any]:
    """Return the tensors whose `.grad` its backward pass writes."""
    waiting, seen, found = [loss.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


@contextmanager
def _divisors(still: bool) -> Iterator[list[float | None]]:
    """Collect what each mean of a loss function in the block divides by; None for a sum.

    If it is `still`, dropout keeps everything.
    """
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    means = {getattr(functional, name) for name in MEANS}
    dropout = {getattr(functional, name) for name in DROPOUT}
    found: list[float | None] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if still and function in dropout:
                return args[0] if args else kwargs["input"]
            if still and function is functional.scaled_dot_product_attention:
                names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
                kwargs = {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
                args = ()
            result = function(*args, **kwargs)
            if function in means and torch.is_tensor(result) and not result.ndim:
                found.append(_divisor(args, kwargs))
            return result

    with Watch():
        yield found


def _divisor(args: Any, kwargs: Any) -> float | None:
    """Return it by the formula of torch.nn.CrossEntropyLoss; None for a sum."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
             "label_smoothing")  # fmt: skip
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") != "mean":
        return None
    if target.is_floating_point():  # probabilities of classes
        return float(target.numel() // target.shape[1 if target.ndim > 1 else 0])
    kept = target != given.get("ignore_index", -100)
    return float(kept.sum() if weight is None else weight[target[kept]].sum())
