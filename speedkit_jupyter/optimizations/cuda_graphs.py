"""CUDA graphs: the kernels of a call recorded once, and launched again all at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.calls import (
    CALLS,
    Call,
    has_forward_hooks,
    has_hooks_of_all,
    layer_of,
)
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch

# Recorded kinds of calls of a model, each with the memory of a step.
MOST = 8
CODE = """\
plain_forward = model.forward


def forward(*inputs):
    \"\"\"Recorded at the first call; the others have to have its shapes.\"\"\"
    model.forward = plain_forward
    torch.set_autocast_cache_enabled(False)  # as it has to be while it is recorded
    samples = tuple(one.detach().clone() for one in inputs)
    torch.cuda.make_graphed_callables(model, samples, allow_unused_input=True)
    return model(*inputs)


model.forward = forward"""
KEYWORDS = "Trainer passes batches by keyword, which this code does not take: take --as torch"


class CudaGraphs(Optimization):
    """By torch's `make_graphed_callables`: a call is recorded when it comes the second time with
    the same shapes.
    """

    name = "cuda_graphs"
    effect = Effect.EXACT  # the same kernels, in the same order
    # The one has a mode for it, the other runs Python code in the backward pass.
    excludes = frozenset({"compile", "activation_checkpointing"})
    summary = "calls of the model are recorded as CUDA graphs and replayed"
    helps = "steps of many small kernels on a GPU, with the same shapes again and again"
    risk = (
        "Python code in the forward pass runs only when it is recorded; the memory of one step "
        "stays taken for each shape"
    )
    undone = "the model is called as before; graphs and their memory are freed"
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only, where a GPU can record what the model does."""
        if request.value is False:
            return request.leave(False, asked=True)
        if why := _obstacle(hardware, facts):
            return request.decline(False, why)
        if request.value == "auto":
            return request.leave(False, "it is there on request")
        return request.obey(True, hint="Python code in the forward pass runs only when recorded")

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        return {"model.cuda_graphs": "0 recorded" if decision.value else False}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Put a layer around the model's calls; in a benchmark for its own thread alone."""
        memo = target.memo
        memo.graphed = memo.graphed or Graphed(target.model, target.notes)
        memo.graphed.only_in = target.only_in
        with CALLS.overriding([(target.model, memo.graphed)] if decision.value else []):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """By the same function, at the first call."""
        if form == "transformers":
            raise SpeedKitError(KEYWORDS)
        lines = tuple(CODE.splitlines())
        if form == "fabric":  # which passes a new forward on to the model inside
            return Snippet(decision.reason, model=lines)
        return Snippet(decision.reason, training=lines)

    def observe(self, target: Target) -> Mapping[str, Any]:
        layer = layer_of(target.model, Graphed)
        return {"model.cuda_graphs": False if layer is None else layer.counted}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return () if _obstacle(hardware, facts) else (True,)


def _obstacle(hardware: Hardware, facts: Facts) -> str:
    """Why no call of this model can be recorded; empty where some may be."""
    gpu = hardware.accelerator(facts.device)
    if gpu is None or not gpu.is_nvidia:
        return f"NVIDIA's GPUs record CUDA graphs; the model is on {facts.device}"
    if facts.compiled != "no":
        return 'the model is compiled already: torch.compile(mode="reduce-overhead") records it'
    if facts.compiles:
        return "this plan compiles the model: `compile: reduce-overhead` records what is compiled"
    if facts.passed_by == "activation_checkpointing" or facts.own_checkpointing == "on":
        return "activation checkpointing runs Python code in the backward pass"
    return "lazy layers have no shape yet: run one forward pass before" if facts.lazy else ""


class _Recording(threading.local):
    """Whether this thread records a call: what is patched for a measurement is no part of it."""

    now = False


_RECORDING = _Recording()


def is_recording() -> bool:
    """Return whether this thread records a call."""
    return _RECORDING.now


class Graphed(Call):
    """The calls of one model: the first of a kind is made as usual, the second one recorded.

    Results and gradients are copies, which no replay writes over. A call is made as usual, too,
    while the backward pass of the one before may still come. Once something can't be recorded
    nothing is any more; `notes` says why.
    """

    def __init__(self, model: torch.nn.Module, notes: dict[str, str]) -> None:
        super().__init__(model)
        self._notes = notes
        self._recordings: dict[Hashable, Any] = {}
        self._pending: Callable[[], Any] = lambda: None
        self._is_off = False

    @property
    def counted(self) -> str:
        """Return how many kinds of calls are recorded."""
        return f"{sum(map(bool, self._recordings.values()))} recorded"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own result, which stays the user's."""
        import torch

        from speedkit_jupyter.support.torch_private import tree_flatten, tree_unflatten

        leaves, structure = tree_flatten((args, kwargs))
        tensors = {n: t for n, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        kind = self._kind(leaves, structure) if self._suits() else None
        known = self._recordings
        if kind is None or (kind not in known and len(known) >= MOST):
            return self.below(*args, **kwargs)
        if kind in known:
            known[kind] = known[kind] or self._recorded(leaves, tensors, structure)
        if self._is_off or not known.setdefault(kind, None):
            return self.below(*args, **kwargs)
        graphed, results = known[kind]
        turn = Turn()
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        given = _replayed().apply(turn, graphed, len(tensors), *tensors.values(), *parameters)
        self._pending = weakref.ref(turn)
        return tree_unflatten(given, results[0])

    def _suits(self) -> bool:
        """Return whether a call may be a replay at present."""
        pending = self._pending()
        busy = pending is not None and not pending.done
        if self._is_off or busy or is_recording() or not self.acts():
            return False
        return not has_hooks_of_all() and not has_forward_hooks(self.module)

    def _kind(self, leaves: list[Any], structure: Any) -> Hashable | None:
        """Return what has to be alike for a replay; None where it can't be told."""
        import torch

        own = [*self.module.parameters(), *self.module.buffers()]
        if not own or own[0].is_meta:
            return None
        device = own[0].device.type
        kind = (
            *(
                (t.shape, t.dtype, t.device, t.stride(), t.requires_grad)
                if isinstance(t, torch.Tensor)
                else t
                for t in leaves
            ),
            str(structure),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            *((tensor.data_ptr(), tensor.requires_grad) for tensor in own),
            *(module.training for module in self.module.modules()),
        )
        try:
            hash(kind)
        except TypeError:  # a list of numbers, an object: it may be another each time
            return None
        return kind

    def _recorded(self, leaves: list[Any], tensors: dict[int, torch.Tensor], structure: Any) -> Any:
        """Record the call, and leave buffers and random numbers as they are; None if that fails."""
        import torch

        from speedkit_jupyter.support.torch_private import tree_flatten, tree_unflatten

        device = next(self.module.parameters()).device
        samples = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors.values()]
        constants = [None if n in tensors else leaf for n, leaf in enumerate(leaves)]
        structures: list[Any] = []

        def call(*given: torch.Tensor) -> Any:
            every = dict(enumerate(constants)) | dict(zip(tensors, given, strict=True))
            args, kwargs = tree_unflatten(list(every.values()), structure)
            results, found = tree_flatten(self.below(*args, **kwargs))
            structures[:] = [found]
            if not all(isinstance(result, torch.Tensor) for result in results):
                raise SpeedKitError("the model returns more than tensors")
            return tuple(results)

        # What is recorded takes tensors alone, and has the model's parameters.
        whole: Any = torch.nn.Module()
        whole.model, whole.forward = self.module, call
        try:
            with _recording(self.module, device):
                graphed = torch.cuda.make_graphed_callables(
                    whole, tuple(samples), allow_unused_input=True
                )
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self._notes["cuda_graphs"] = f"can't be recorded: {type(error).__name__}: {first}"
            self._is_off = True
            self._recordings.clear()
            return None
        finally:
            whole.model = None  # a graph holds parameters, and no model
        return graphed, structures


@contextmanager
def _recording(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers and random numbers back after the block, which calls the model several times."""
    import torch

    kind, home = device.type, torch.get_device_module(device.type)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random, enabled = home.get_rng_state(device), torch.is_autocast_enabled(kind)
    _RECORDING.now = True
    try:
        with torch.autocast(kind, torch.get_autocast_dtype(kind), enabled, cache_enabled=False):
            yield
    finally:
        _RECORDING.now = False
        home.set_rng_state(random, device)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # by .data: a backward pass may have kept it


class Turn:
    """Whether the backward pass of a replay has been made."""

    done = False


@cache
def _replayed() -> Any:
    """Return the autograd function of a replay, whose results and gradients are copies."""
    import torch

    class Replayed(torch.autograd.Function):
        """Its arguments: its turn, what replays, the number of inputs, these, and parameters."""

        @staticmethod
        def forward(ctx: Any, turn: Turn, graphed: Any, count: int, *sources: Any) -> Any:
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in sources[:count]]
            ctx.turn, ctx.sources = turn, [*inputs, *sources[count:]]
            with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                ctx.results = graphed(*inputs)
            copies = tuple(result.detach().clone() for result in ctx.results)
            whole = [c for c, r in zip(copies, ctx.results, strict=True) if not r.requires_grad]
            ctx.mark_non_differentiable(*whole)
            return copies

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            pairs = [(r, g) for r, g in zip(ctx.results, gradients, strict=True) if r.requires_grad]
            asked = [source for source in ctx.sources if source.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [r for r, _ in pairs], asked, [g for _, g in pairs], allow_unused=True
                )
            )
            ctx.turn.done = True
            given = [next(found) if source.requires_grad else None for source in ctx.sources]
            return None, None, None, *(None if g is None else g.clone() for g in given)

    return Replayed
