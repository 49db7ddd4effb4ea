"""Watches the steps of a course, and keeps what each stretch shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.comparing import modes
from speedkit_jupyter.measure.checks.comparing.buffers import held
from speedkit_jupyter.measure.checks.comparing.parameter_moves import moved, real
from speedkit_jupyter.measure.checks.observing.course import END, LEFT, Course
from speedkit_jupyter.measure.checks.observing.observation import Calls, Observation
from speedkit_jupyter.measure.checks.observing.watching import unwatched, watching
from speedkit_jupyter.measure.checks.values import leaves
from speedkit_jupyter.measure.checks.values.leaves import (
    FEW_ELEMENTS,
    MOST_ELEMENTS,
    Leaves,
    sampled,
)
from speedkit_jupyter.measure.checks.values.magnitudes import norm
from speedkit_jupyter.measure.checks.values.parameters import (
    added,
    copied,
    dense,
    difference,
    held_values,
    set_data,
    zero_gradients,
)
from speedkit_jupyter.measure.checks.values.plain_tensors import gradient_of

if TYPE_CHECKING:
    import torch

# So many stretches are kept, spread evenly over all, and no more bytes of parameters with them.
MOST_STRETCHES, LEAST_STRETCHES, MOST_BYTES = 16, 4, 2**30


class _Enough(BaseException):
    """Ends a step where all that is needed is known."""


@contextmanager
def observing(
    models: Sequence[torch.nn.Module],
    others: Sequence[torch.Tensor],
    scale: Callable[[], float],
    loss_is_scaled: bool = False,
    lead: Course | None = None,
    limit: int | None = None,
    unread: Collection[int] = (),
) -> Iterator[Observer]:
    """Watch steps. `scale` is the loss scale in force, 1 without a GradScaler.

    `others` are parameters beside those of the models; gradients of those whose ids are `unread` do
    not count. After `limit` stretches the block ends. Gradients that lie there are set to zero,
    which the caller puts back: what the step adds to them, or makes in their place, is then its
    own.
    """
    tensors = [*(p for model in models for p in model.parameters()), *others]
    parameters = list({id(p): p for p in tensors}.values())
    zero_gradients(parameters)
    observer = Observer(models, parameters, scale, loss_is_scaled, lead, limit, unread)
    with watching(models, observer), suppress(_Enough):
        yield observer
    observer.finish()


class Observer:
    """Keeps what the watched steps show."""

    def __init__(
        self,
        models: Sequence[Any],
        parameters: Sequence[Any],
        scale: Callable[[], float],
        loss_is_scaled: bool,
        lead: Course | None,
        limit: int | None,
        unread: Collection[int],
    ) -> None:
        self.course, self._lead, self._limit = Course(), lead, limit
        self._models, self._known, self._unread = models, list(parameters), unread
        self._scale, self._loss_is_scaled = scale, loss_is_scaled
        self._buffers = held(models)
        self._number = -1  # of the stretch
        self._taken = 0  # optimizer steps within the step
        self._depth = 0  # an optimizer may call the step of its parent class
        self._every = 1
        self._in_backward = False
        self._passes = 0
        self._before: list[Any] = []
        self._made: list[Any] = []
        self._begin([])

    # What `watching` tells.

    @unwatched
    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        if self._listens():
            self._calls.add(args, kwargs, result, self._most)

    @unwatched
    def before_backward(self, tensors: Any) -> None:
        self._in_backward = True
        if not self._listens():
            return
        divisor = self._scale() if self._loss_is_scaled else 1.0
        numbers = leaves.of([tensors], self._most).numbers
        self._seen.outputs.numbers += [tensor / divisor for tensor in numbers]
        self._before = [copied(self._gradient(p)) for p in self._parameters]

    @unwatched
    def after_backward(self) -> None:
        self._passes += 1
        self._in_backward = False
        if not self._listens():
            return
        for index, parameter in enumerate(self._parameters):
            self._made[index] = added(
                self._made[index], self._gradient(parameter), self._before[index]
            )
        self._before = []
        if self._in_closure:  # its first evaluation comes before anything has moved
            self._complete(1.0, set(map(id, self._parameters)))

    @unwatched
    def differentiated(self, gradients: Any) -> None:
        if self._listens():
            self._seen.outputs.numbers += leaves.of([gradients], self._most).numbers

    @unwatched
    def before_step(self, optimizer: Any, with_closure: bool) -> None:
        self._depth += 1
        if self._depth > 1 or self._in_backward:  # each parameter by itself, as it gets its own
            self._seen.in_backward |= self._in_backward
            return
        self._also(optimizer)
        # A closure after a backward pass makes none of the gradients: Lightning's does nothing.
        self._in_closure = with_closure and not self._passes
        if not self._in_closure:
            # A fused optimizer is handed the scale, for every other it is taken out before.
            still_in = getattr(optimizer, "grad_scale", None)
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._complete(1.0 if still_in is None else float(still_in), own)

    @unwatched
    def after_step(self) -> None:
        self._depth -= 1
        if self._depth or self._in_backward:
            return
        evaluated_once = self._in_closure and self._passes == 1
        if self._records and self._seen.complete and (evaluated_once or not self._in_closure):
            self._seen.updates = self._way()
        self._taken += 1
        extra = self._parameters[len(self._known) :]
        self._close()
        self._begin(extra)

    # What the caller tells.

    @unwatched
    def step_ended(
        self, result: Any, left: Callable[[], Sequence[Any]], named: Sequence[Any] = ()
    ) -> None:
        """With this result, and what it left elsewhere; `named` is compared in place of both."""
        if self._passes or self._seen.outputs:
            self._close()
            self._begin([])
        self._seen.role = END
        self._seen.outputs.add(list(named) if named else result)
        self._seen.buffers_before, self._seen.buffers = self._buffers, held(self._models)
        self._buffers = self._seen.buffers
        self._seen.modes = modes.of(self._models, self._unread)
        self._close()
        self._begin([])
        self._seen.role = LEFT
        self._seen.outputs = leaves.of([] if named else left(), FEW_ELEMENTS)
        self._close()
        if named:
            self._keep_only_results()
        self.course.ends.append(self._number + 1)
        self._taken = 0
        self._begin([])

    def _keep_only_results(self) -> None:
        for stretch in self.course.stretches.values():
            stretch.calls = []
            if stretch.role != END:
                stretch.outputs = Leaves()

    def finish(self) -> None:
        """The last stretch that was asked for may have ended early."""
        if self._limit is not None and self._seen.complete:
            self._close()
        if self._limit is not None and not self.course.ends and self.course.stretches:
            last = self.course.stretches[max(self.course.stretches)]
            last.buffers_before, last.buffers = self._buffers, held(self._models)
        self._start = self._made = self._before = []

    # Stretches.

    def _listens(self) -> bool:
        return self._records and not self._seen.complete

    def _begin(self, extra: Sequence[Any]) -> None:
        """From the lead's parameters, where there is one: `extra` are another optimizer's."""
        if self._limit is not None and self._number + 1 >= self._limit:
            raise _Enough
        self._number += 1
        number, lead = self._number, self._lead
        forced = [*self._known, *extra]
        if lead is None:
            if number:
                self.course.starts[number] = [
                    held_values(parameter).to("cpu", copy=True) for parameter in forced
                ]
        elif number in lead.starts:
            set_data(forced, lead.starts[number])
        self._records = lead is None or number in lead.stretches
        self._most = FEW_ELEMENTS if self._taken > 1 or len(self.course.ends) > 1 else MOST_ELEMENTS
        self._seen = Observation(outputs=Leaves(most=self._most))
        self._seen.place = (len(self.course.ends), self._taken)
        self._calls = Calls()
        self._parameters = list(self._known)
        self._start = [held_values(p).clone() for p in self._known] if self._records else []
        self._before, self._made = [], [None] * len(self._known)
        self._in_closure, self._passes = False, 0

    def _also(self, optimizer: Any) -> None:
        """Its parameters too, where they are none of those that are known: a copied model's."""
        ids = {id(parameter) for parameter in self._parameters}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        new = [parameter for parameter in parameters if id(parameter) not in ids]
        self._parameters += new
        if self._records:
            self._start += [held_values(parameter).clone() for parameter in new]
        self._made += [copied(self._gradient(parameter)) for parameter in new]

    def _close(self) -> None:
        if not self._records:
            return
        stretch = self._seen
        if not stretch.complete and self._passes:
            stretch.gradients = self._sums()
        pairs = list(zip(self._parameters, self._start, strict=True))
        way = [real(difference(p, old)) for p, old in pairs]
        stretch.moved = math.hypot(*(norm(part.double()) for part in way))
        if stretch.moved:
            led = bool(self._passes or stretch.complete)
            stretch.way = [sampled(part, FEW_ELEMENTS if led else self._most) for part in way]
            stretch.movers = [moved(part, old) for part, (_, old) in zip(way, pairs, strict=True)]
        if stretch.moved and self._passes and not stretch.updates and not stretch.complete:
            stretch.updates = [sampled(part, self._most) for part in way]  # by hand
        stretch.calls = self._calls.kept
        self.course.stretches[self._number] = stretch
        if self._lead is None:
            self._thin_out()

    def _thin_out(self) -> None:
        """Every second, every fourth, ... where there are many; the ends of steps stay."""
        kept, starts = self.course.stretches, self.course.starts
        size = sum(parameter.numel() * parameter.element_size() for parameter in self._known)
        most = max(LEAST_STRETCHES, min(MOST_STRETCHES, MOST_BYTES // max(size, 1)))
        inner = [number for number in kept if not kept[number].role]
        if len(inner) > most:
            self._every *= 2
        for number in inner:
            if number % self._every and number != self._number:
                del kept[number], starts[number]

    def _gradient(self, parameter: Any) -> Any:
        return None if id(parameter) in self._unread else gradient_of(parameter)

    def _way(self) -> list[Any]:
        pairs = zip(self._parameters, self._start, strict=True)
        return [sampled(difference(p, old), self._most) for p, old in pairs]

    def _sums(self) -> list[Any]:
        """What the backward passes added up to, whether it still lies there or was cleared."""
        scale = self._scale()
        return [
            None if gradient is None else sampled(gradient, self._most) / scale
            for gradient in self._made
        ]

    def _complete(self, still_in: float, own: set[int]) -> None:
        """The gradients are made: those that lie there for the optimizer's own parameters, with
        all that was done to them since, clipping say; else what passed by.
        """
        if not self._records or self._seen.complete:
            return
        lying = [dense(self._gradient(p)) if id(p) in own else None for p in self._parameters]
        self._seen.gradients = self._sums()
        if any(gradient is not None and bool(gradient.any()) for gradient in lying):
            for index, gradient in enumerate(lying):
                if id(self._parameters[index]) in own:
                    self._seen.gradients[index] = (
                        None if gradient is None else sampled(gradient, self._most) / still_in
                    )
        self._seen.complete = True
        if self._limit is not None and self._number + 1 >= self._limit:
            raise _Enough
