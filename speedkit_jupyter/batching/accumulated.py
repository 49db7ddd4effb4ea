"""Gradients of parts that add up to those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.batching.mean_losses import watched
from speedkit_jupyter.batching.parts import Call
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch


def loss_in(result: Any) -> Any:
    """The scalar that a function gives: alone, first of a tuple, `loss` of a mapping or object."""
    import torch

    if isinstance(result, tuple) and result and not hasattr(result, "loss"):
        result = result[0]
    elif isinstance(result, dict):
        result = result.get("loss")
    elif not torch.is_tensor(result):
        result = getattr(result, "loss", None)
    return result if torch.is_tensor(result) and result.ndim == 0 else None


class Accumulated:
    """Takes the parts of a batch one after another, with the backward pass of each.

    What a part's mean divided by is known once it was called, and that of the whole at the end
    only. So each is weighed against the first one, and at the end all gradients are divided by what
    the weights come to; those of before the call are set aside until then.
    """

    def __init__(self, lost: Lost, scaler: torch.amp.GradScaler | None) -> None:
        self._lost, self._scaler = lost, scaler
        self._weights: list[float] = []
        self._each: set[float] = set()
        self._losses: list[Any] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        self._is_sum = False

    def add(self, part: Call) -> None:
        """One more."""
        loss, weight = self._lost(part)
        self._is_sum = weight is None
        weight = 1.0 if weight is None else weight
        self._each.add(weight / part.length)
        if not weight:  # nothing in it counts, and its mean is none
            return
        self._weights.append(weight)
        self._losses.append(loss.detach())
        if loss.requires_grad:
            self._set_aside(loss)
            self._backward(loss * (weight / self._weights[0]))

    @property
    def is_uneven(self) -> bool:
        """Whether a part weighs more than its samples: some targets do not count, say."""
        return not self._is_sum and len(self._each) > 1

    def result(self) -> Any:
        """The loss of the whole; gradients are those of it then."""
        import torch

        if not self._losses:
            return torch.tensor(float("nan"))  # as torch's own mean over no targets
        total = sum(self._weights)
        factor = 1.0 if self._is_sum else self._weights[0] / total
        for leaf, before in self._before.values():
            if leaf.grad is not None:
                leaf.grad.mul_(factor)
            _add_before(leaf, before)
        losses = torch.stack(self._losses)
        if self._is_sum:
            return losses.sum()
        return (losses * losses.new_tensor(self._weights)).sum() / total

    def undo(self) -> None:
        """Gradients are as before the call."""
        for leaf, before in self._before.values():
            leaf.grad = before

    def _backward(self, loss: Any) -> None:
        import torch

        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        is_on = torch.is_autocast_enabled(loss.device.type)
        outside = torch.autocast(loss.device.type, enabled=False) if is_on else nullcontext()
        with outside:
            scaled.backward()

    def _set_aside(self, loss: Any) -> None:
        """Gradients of before, of what this part's graph reaches."""
        for leaf in leaves_of(loss):
            if id(leaf) in self._before:
                continue
            if leaf._post_accumulate_grad_hooks:
                raise StepError(
                    "a parameter has a hook that runs once its gradient is there (an optimizer "
                    "that steps in the backward pass?): it would run for each part"
                )
            self._before[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None


def _add_before(leaf: Any, before: Any) -> None:
    """As accumulating would have: into the tensor that was there."""
    if before is None:
        return
    if leaf.grad is not None:
        before.add_(leaf.grad)
    leaf.grad = before


@dataclass(frozen=True)
class Lost:
    """The loss of a batch, and what its mean is over: as `weight` says, or torch's loss function,
    or samples. None for a sum.
    """

    function: Callable[..., Any]
    weight: Callable[..., Any] | None = None
    is_sum: bool = False

    def __call__(self, part: Call, still: bool = False) -> tuple[Any, float | None]:
        """Raises StepError where the function gives none."""
        with watched(still) as divisors:
            loss = loss_in(part.run(self.function))
        if loss is None:
            raise StepError("the function gave a loss before, and none for this part")
        if self.is_sum:
            return loss, None
        if self.weight is not None:
            return loss, float(self.weight(*part.arguments, **part.named))
        # Of several means (a loss for each of two heads) no one need be right: the check says.
        return loss, divisors[-1] if divisors else float(part.length)


def leaves_of(loss: Any) -> list[Any]:
    """The tensors whose `.grad` its backward pass writes."""
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
