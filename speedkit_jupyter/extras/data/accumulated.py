"""Gradients of the parts of a batch, added up to the gradients of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from speedkit_jupyter.catalog.distributed import exchanges, no_sync
from speedkit_jupyter.catalog.properties.sharding import own_parameters
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.private import has_gradient_hooks


@dataclass
class Accumulated:
    """Adds up the parts of a batch, with the backward pass of each.

    The divisor of the whole batch's mean is known at the end only. So each part is weighed against
    the first part, and at the end all gradients are divided by the sum of the weights. Gradients
    from before the call are set aside until then.

    If some of the `models` average gradients over ranks, a part is weighed against `size`, which is
    the same on all ranks, and the weights of all ranks are summed.
    """

    scaler: torch.amp.GradScaler | None
    models: Sequence[torch.nn.Module]
    size: int
    weights_of_a_sample: set[float] = field(default_factory=set)
    _is_sum: bool = False
    _exchanges: bool = False
    _weights: list[float] = field(default_factory=list)
    _losses: list[Any] = field(default_factory=list)
    _before: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.models = [model for model in self.models if exchanges(model)]
        for leaf in own_parameters(self.models):
            # DDP's gradient is memory of its own, which the next pass writes to.
            self._before[id(leaf)] = (leaf, None if leaf.grad is None else leaf.grad.clone())
            leaf.grad = None

    @contextmanager
    def kept_on_rank(self, is_kept: bool) -> Iterator[None]:
        """Exchange no gradients in the block, if `is_kept`."""
        self._exchanges = bool(self.models) and not is_kept
        with ExitStack() as stack:
            for model in self.models if is_kept else ():
                stack.enter_context(no_sync(model))
            yield

    @property
    def _unit(self) -> float:
        return self.size if self.models else self._weights[0]

    def add(self, loss: Any, weight: float | None, samples: int) -> None:
        """Add a part; `weight` is the divisor of its mean, None for a sum."""
        if weight is None:
            weight, self._is_sum = 1.0, True
        else:
            self.weights_of_a_sample.add(weight / samples)
        if not weight:  # no target in it counts, and its mean is NaN
            if not self._exchanges:
                return
            loss = loss.nan_to_num()  # the other ranks wait for this backward pass
        self._weights.append(weight)
        self._losses.append(loss.detach())
        if loss.requires_grad:
            self._set_aside(loss)
            scaled = loss if self._is_sum else loss * (weight / self._unit)
            scaled = scaled if self.scaler is None else self.scaler.scale(scaled)
            with torch.autocast(loss.device.type, enabled=False):
                scaled.backward()

    def result(self) -> Any:
        """Return the loss of the whole batch, and leave its gradients in the parameters."""
        if not self._losses:
            return torch.tensor(float("nan"))  # like torch's own mean over no targets
        total = 1.0 if self._is_sum else sum(self._weights)
        share = 1.0 if self._is_sum else self._unit / (self._on_average(total) or 1.0)
        for leaf, before in self._before.values():
            if leaf.grad is not None:
                leaf.grad.mul_(share)
            if before is not None:  # accumulated into the tensor that was there
                if leaf.grad is not None:
                    before.add_(leaf.grad)
                leaf.grad = before
        losses = torch.stack(self._losses)
        return (losses * losses.new_tensor(self._weights)).sum() / total

    def _on_average(self, total: float) -> float:
        """Return the mean of a number over the ranks that average their gradients."""
        import torch.distributed as dist

        if not self.models:
            return total
        number = torch.tensor(total, device=self._losses[0].device)
        dist.all_reduce(number)
        return number.item() / dist.get_world_size()

    def undo(self) -> None:
        """Put back the gradients from before the call."""
        for leaf, before in self._before.values():
            leaf.grad = before

    def _set_aside(self, loss: Any) -> None:
        """Set aside the gradients of all tensors that this part's backward pass writes to."""
        waiting, seen = [loss.grad_fn], {None}
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is None:
                continue
            if has_gradient_hooks(leaf):
                raise StepError(
                    "a parameter has a hook that runs once its gradient is there (an optimizer "
                    "that steps in the backward pass?): it would run for each part"
                )
            if id(leaf) not in self._before:
                self._before[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None
