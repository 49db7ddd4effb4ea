"""Optimizer steps through a GradScaler, in code that knows of none: also several in one step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks, patched
from speedkit_jupyter.measure.subject.discovery import holds
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.thread_origin import is_here, is_pythons

if TYPE_CHECKING:
    import torch

MISSING = object()


class ScaledSteps:
    """Routes `optimizer.step()` to `scaler.step(optimizer)`, which calls it in turn.

    Those of `optimizers`, and of all that this thread makes meanwhile for one of the models.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        optimizers: Sequence[torch.optim.Optimizer],
        models: Sequence[torch.nn.Module],
    ) -> None:
        self._scaler: Any = scaler
        self._known, self._models = list(optimizers), models
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # since the last update
        self._inside: set[int] = set()
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []
        self._live = False
        self._here = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For a block of steps."""
        import torch

        self._live, self._here = True, threading.get_ident()
        try:
            with ExitStack() as stack:
                for optimizer in self._known:
                    stack.enter_context(self._routed(optimizer))
                stack.enter_context(patched(torch.optim.Optimizer, "__init__", self._welcoming))
                stack.enter_context(optimizer_hooks(self._refuse_unscaled))
                stack.enter_context(self._unscaled_before_clipping())
                yield
        finally:
            self._live = False

    def before_backward(self) -> None:
        """In an epoch, say, the scaler is updated once everything that steps has stepped."""
        if not self._stepped:
            return
        done = {key for optimizer in self._stepped.values() for key in _parameters(optimizer)}
        if all(_parameters(optimizer) & done for optimizer in self._every()):
            self.update()

    def finish(self) -> None:
        """A step has ended."""
        self.update()
        self._made.clear()

    def update(self) -> None:
        """If any optimizer stepped since it was last updated."""
        if self._stepped:
            self._stepped.clear()
            self._scaler.update()

    def _step(
        self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], closure: Any
    ) -> Any:
        key = id(optimizer)
        if key in self._inside or not self._live or self._is_elsewhere():
            return step() if closure is None else step(closure)
        if closure is not None:
            raise StepError("fp16: an optimizer with a closure can't be scaled")
        if key in self._stepped:  # the scaler takes one step of each between two updates
            self._scaler._per_optimizer_states.pop(key, None)
        self._stepped[key] = optimizer
        self._inside.add(key)
        try:
            return self._scaler.step(optimizer)
        finally:
            self._inside.discard(key)

    def _is_elsewhere(self) -> bool:
        """In another thread of the user's, whose losses were never scaled."""
        return not is_here(self._here) and is_pythons()

    def _route(self, optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step

        @wraps(step)  # learning rate schedulers look for their mark on it
        def routed(this: torch.optim.Optimizer, closure: Any = None) -> Any:
            return self._step(this, step, closure)

        # A method, as schedulers that are made meanwhile expect.
        optimizer.step = MethodType(routed, optimizer)  # type: ignore[method-assign]

    @contextmanager
    def _routed(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        original = optimizer.__dict__.get("step", MISSING)
        self._route(optimizer)
        try:
            yield
        finally:
            if original is MISSING:
                del optimizer.__dict__["step"]
            else:
                optimizer.__dict__["step"] = original

    def _welcoming(self, begin: Any) -> Callable[..., None]:
        def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            if holds(optimizer, self._models):
                self._route(optimizer)
                self._made.append(weakref.ref(optimizer))

        return made

    def _refuse_unscaled(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """One that an earlier block made and kept: its gradients would stay scaled."""
        if id(optimizer) not in self._inside and holds(optimizer, self._models):
            raise StepError(
                f"fp16: the step made {type(optimizer).__name__} when it first ran, and kept it: "
                "make it before the step, so that its gradients can be unscaled"
            )

    @contextmanager
    def _unscaled_before_clipping(self) -> Iterator[None]:
        """Both clipping functions group the gradients first, whichever way they were imported."""
        from torch.nn.utils import clip_grad

        def unscaling(group: Any) -> Callable[..., Any]:
            def call(gradients: Any, *args: Any, **kwargs: Any) -> Any:
                self._unscale()
                return group(gradients, *args, **kwargs)

            return call

        with patched(clip_grad, "_group_tensors_by_device_and_dtype", unscaling):
            yield

    def _unscale(self) -> None:
        """Each gradient once: an optimizer that was made anew has those of the one before."""
        from torch.amp.grad_scaler import OptState

        states = self._scaler._per_optimizer_states
        done: set[int] = set()
        for optimizer in reversed(self._every()):
            if not _parameters(optimizer) & done:
                if states[id(optimizer)]["stage"] is OptState.READY:
                    self._scaler.unscale_(optimizer)
                done |= _parameters(optimizer)

    def _every(self) -> list[torch.optim.Optimizer]:
        """The known ones, then those that this step made."""
        made = (reference() for reference in self._made)
        return [*self._known, *(optimizer for optimizer in made if optimizer is not None)]


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
