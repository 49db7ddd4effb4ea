"""One step, and what it computed up to its first optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure import leaves
from speedkit_jupyter.measure.buffers import held
from speedkit_jupyter.measure.leaves import Leaves, sampled
from speedkit_jupyter.measure.magnitudes import norm
from speedkit_jupyter.measure.watching import watching

if TYPE_CHECKING:
    import torch

# Of a step that calls its model more often (to generate, say) the first calls are compared, and
# as many of the last.
FIRST_CALLS, MOST_CALLS = 8, 16


@dataclass
class Call:
    """A call of one of the models from outside: the whole numbers it was given, what came out."""

    given: list[torch.Tensor]
    results: Leaves


@dataclass
class Observation:
    """What one step computed, on the CPU in float64.

    `outputs` are the tensors on which backward ran, those that `torch.autograd.grad` gave, or
    what the step returned; `calls` those of the models. `gradients` are those that the step made,
    one for each parameter. `updates` are what the first optimizer step added to the parameters,
    `moved` is how far they are from where they were when the whole step is done; `buffers` are
    those of the models then, `buffers_before` those before.
    """

    outputs: Leaves = field(default_factory=Leaves)
    calls: list[Call] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    updates: list[torch.Tensor] = field(default_factory=list)
    moved: float = 0.0
    buffers_before: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    complete: bool = False

    def has_gradients(self) -> bool:
        """Whether any parameter got one."""
        return any(one is not None for one in self.gradients)


class _Enough(BaseException):
    """Ends a step at its first optimizer step, where all that is needed is known."""


@contextmanager
def observing(
    models: Sequence[torch.nn.Module],
    scale: Callable[[], float],
    loss_is_scaled: bool = False,
    stop_at_step: bool = False,
) -> Iterator[Observation]:
    """Watch one step. `scale` is the loss scale in force, 1 without a GradScaler.

    Gradients that lie there are set to zero, which the caller puts back: what the step adds to
    them, or makes in their place, is then its own.
    """
    parameters = list({id(p): p for model in models for p in model.parameters()}.values())
    _clear(parameters)
    observer = _Observer(parameters, scale, loss_is_scaled, stop_at_step)
    seen = observer.seen
    seen.buffers_before = held(models)
    with watching(models, observer), suppress(_Enough):
        yield seen
    seen.buffers = held(models)
    if not seen.complete:
        seen.gradients = observer.made()
    seen.moved = math.hypot(*(norm((p.detach() - old).double()) for p, old in observer.starts()))


class _Observer:
    """Keeps what the watched step shows."""

    def __init__(
        self,
        parameters: Sequence[Any],
        scale: Callable[[], float],
        loss_is_scaled: bool,
        stop_at_step: bool,
    ) -> None:
        self.seen = Observation()
        self._parameters, self._scale = parameters, scale
        self._loss_is_scaled, self._stop = loss_is_scaled, stop_at_step
        self._start = [p.detach().clone() for p in parameters]
        self._before: list[Any] = []
        self._made: list[Any] = [None] * len(parameters)
        self._in_closure = False
        self._steps = 0  # that are going on: an optimizer may call that of its parent class
        self._passes = 0

    def starts(self) -> Iterator[tuple[Any, Any]]:
        """Each parameter with its values before the step."""
        return zip(self._parameters, self._start, strict=True)

    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        if self.seen.complete:
            return
        if len(self.seen.calls) >= MOST_CALLS:
            del self.seen.calls[FIRST_CALLS]
        self.seen.calls.append(Call(leaves.of([args, kwargs]).exact, leaves.of([result])))

    def before_backward(self, tensors: Any) -> None:
        if self.seen.complete:
            return
        found = leaves.of([tensors])
        divisor = self._scale() if self._loss_is_scaled else 1.0
        self.seen.outputs.numbers += [one / divisor for one in found.numbers]
        self._before = [_copied(p.grad) for p in self._parameters]

    def after_backward(self) -> None:
        if self.seen.complete:
            return
        self._passes += 1
        for index, one in enumerate(self._parameters):
            self._made[index] = _added(self._made[index], one.grad, self._before[index])
        self._before = []
        if self._in_closure:  # its first evaluation comes before anything has moved
            self._complete(1.0)

    def differentiated(self, gradients: Any) -> None:
        if not self.seen.complete:
            self.seen.outputs.numbers += leaves.of([gradients]).numbers

    def before_step(self, optimizer: Any, with_closure: bool) -> None:
        self._steps += 1
        # A closure after a backward pass makes none of the gradients: Lightning's does nothing.
        with_closure = self._in_closure = with_closure and not self._passes
        # Without a backward pass so far it uses up what an earlier step left.
        if not with_closure and self._passes:
            # A fused optimizer is handed the scale, for every other it is taken out before.
            still_in = getattr(optimizer, "grad_scale", None)
            self._complete(1.0 if still_in is None else float(still_in))

    def after_step(self) -> None:
        self._steps -= 1
        if (
            not self._steps
            and self.seen.complete
            and not self.seen.updates
            and not self._in_closure
        ):
            self.seen.updates = [sampled(p.detach() - old) for p, old in self.starts()]

    def made(self) -> list[torch.Tensor | None]:
        """What the backward passes added up to, whether it still lies there or was cleared."""
        scale = self._scale()
        return [None if one is None else sampled(one) / scale for one in self._made]

    def _complete(self, still_in: float) -> None:
        if not self.seen.complete:
            lying = [_dense(p.grad) for p in self._parameters]
            if any(one is not None and bool(one.any()) for one in lying):
                # With all that was done to them since, clipping say.
                self.seen.gradients = [
                    None if one is None else sampled(one) / still_in for one in lying
                ]
            else:
                self.seen.gradients = self.made()
            self.seen.complete = True
        if self._stop:
            raise _Enough


def _clear(parameters: Sequence[Any]) -> None:
    import torch

    with torch.no_grad():
        for one in parameters:
            if one.grad is not None:
                one.grad.zero_()


def _dense(gradient: Any) -> Any:
    import torch

    if gradient is None or gradient.layout is torch.strided:
        return gradient
    return gradient.detach().to_dense()


def _copied(gradient: Any) -> Any:
    return None if gradient is None else _dense(gradient).detach().clone()


def _added(so_far: Any, now: Any, before: Any) -> Any:
    """What a backward pass added to a gradient, on top of what those before it did."""
    if now is None:
        return so_far
    new = _dense(now).detach()
    new = new.clone() if before is None else new - before
    return new if so_far is None else so_far + new
