"""A replayed call as autograd sees it: one step forwards, one step back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.graphs.aliases import as_it_was, by_id, instead
from speedkit_jupyter.optimizations.graphs.call_kinds import filled
from speedkit_jupyter.optimizations.graphs.call_results import memory
from speedkit_jupyter.optimizations.graphs.captured import Captured, autocast
from speedkit_jupyter.optimizations.graphs.tensor_twins import copies
from speedkit_jupyter.optimizations.properties.calls import Call
from speedkit_jupyter.optimizations.recomputing.outside_state import kernels, set_kernels

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.machines.capture import Cuda

TWICE = "gradients of gradients were asked for"
# State at module level, on purpose: in these threads a call is being recorded, so that calls inside
# of it, of whatever model, are made as ever. (What is local to a thread takes ten times as long to
# read, and it is read at every call of what a measurement patches.)
_RECORDING: set[int] = set()


def is_recorded() -> bool:
    """Whether what this thread does is part of a call that is being recorded."""
    return threading.get_ident() in _RECORDING


@contextmanager
def recording() -> Iterator[None]:
    """Calls of models in this thread are made as ever for the block."""
    here, is_outermost = threading.get_ident(), not is_recorded()
    _RECORDING.add(here)
    try:
        yield
    finally:
        if is_outermost:
            _RECORDING.discard(here)


class Turn:
    """One replayed forward pass, for as long as a backward pass may come for it.

    `given` are the arguments of the call, `sources` the tensors among them and the parameters.
    """

    def __init__(
        self,
        call: Call,
        device: Cuda,
        captured: Captured,
        given: tuple[Any, Any],
        sources: Sequence[torch.Tensor],
    ) -> None:
        self.done = False
        self.captured = captured
        self._call, self._model, self._device = call, call.module, device
        self._given, self._sources = given, sources
        self._drawn = device.random_state() if captured.seen.draws else None
        writes = captured.seen.writes
        written = [b for b in self._model.buffers() if memory(b) in writes] if writes else []
        pairs = zip(written, copies(written), strict=True)
        self._buffers = [(buffer, before) for buffer, before in pairs if before is not None]
        self._kernels = kernels()
        self._autocast = autocast(device.device.type)

    def run(self) -> Any:
        """What the call returns."""
        captured = self.captured
        number = len(self._sources) - captured.parameters
        return captured.put_together(_function().apply(self, number, *self._sources))

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        """For each of the sources.

        Not under the lock of the calls: who records has it, and may wait for the very thread of
        autograd that this runs in. Nothing else touches this memory while the turn is pending.
        """
        import torch

        if torch.is_grad_enabled():
            self.captured.why = TWICE
            return self._again(gradients, create_graph=True)
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        made: Sequence[Any] | None = self.captured.backward(gradients)
        if made is None:
            made = self._again(gradients, create_graph=False)
        if not is_kept:  # nobody can come a second time: torch has freed its own part
            self.done = True
            del self.captured, self._call, self._model, self._given, self._sources, self._buffers
        return made

    def _again(self, gradients: Sequence[torch.Tensor | None], create_graph: bool) -> list[Any]:
        """By autograd, through a forward pass that is made once more as it was."""
        import torch

        around = kernels()
        try:
            with recording(), as_it_was(self._model, self._device), torch.enable_grad():
                # Not the very tensors, whose hooks run when autograd gets what this returns.
                views = [
                    source.view_as(source) if source.requires_grad else source
                    for source in self._sources
                ]
                set_kernels(self._kernels)
                if self._drawn is not None:
                    self._device.set_random_state(self._drawn)
                for buffer, before in self._buffers:
                    buffer.data.copy_(before)
                outputs = self._outputs(views)
                pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
                ones, others = zip(*pairs, strict=True)
                made = torch.autograd.grad(
                    ones,
                    [view for view in views if view.requires_grad],
                    others,
                    create_graph=create_graph,
                    allow_unused=True,
                )
        finally:
            set_kernels(around)
        each = iter(made)
        return [next(each) if source.requires_grad else None for source in self._sources]

    def _outputs(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        import torch

        buffers = {id(buffer): buffer for buffer in self._model.buffers()}
        views_of = by_id(self._sources, views)
        args, kwargs = filled(self._given, views_of)
        with instead(self._model, buffers | views_of), torch.autocast(**self._autocast):
            return self.captured.each_once(self._call.below(*args, **kwargs))


@cache
def _function() -> Any:
    import torch

    class Replayed(torch.autograd.Function):
        """A forward pass and a backward pass in one step each."""

        @staticmethod
        def forward(ctx: Any, turn: Turn, inputs: int, *sources: torch.Tensor) -> Any:
            ctx.set_materialize_grads(False)
            outputs = turn.captured.forward(sources[:inputs])
            fixed = [o for o, t in zip(outputs, turn.captured.trains, strict=True) if not t]
            ctx.mark_non_differentiable(*fixed)
            ctx.save_for_backward(torch.empty(0))  # torch says so where it was freed before
            ctx.turn = turn
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            assert len(ctx.saved_tensors) == 1
            return (None, None, *ctx.turn.backward(gradients))

    return Replayed
