"""CUDA graphs: the kernels of a call recorded once, and launched again all at once."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
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
from speedkit_jupyter.support.torch_private import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    import torch

# So many layers launch enough kernels for their launches to count, unless these are large: from
# 2,048 x 2,048 weights on a GPU computes for longer than it takes to launch the next kernel.
MANY_LAYERS, SMALL_LAYER = 8, 2048 * 2048
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
        layers = _layers_in(facts)
        if request.value == "auto":
            return request.leave(False, f"{layers} layers; it is there on request")
        hint = "Python code in the forward pass runs only when a call is recorded"
        return request.obey(True, f"{layers} layers", hint=hint)

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Nothing is recorded before the model is called."""
        return {"model.cuda_graphs": "0 recorded, 0 replayed" if decision.value else False}

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
        """How many calls were recorded and replayed; False where none can be."""
        layer = layer_of(target.model, Graphed)
        return {"model.cuda_graphs": False if layer is None else layer.counted}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """On, where there may be many small kernels."""
        layers = _layers_in(facts)
        small = layers >= MANY_LAYERS and facts.parameters <= layers * SMALL_LAYER
        return (True,) if small and not _obstacle(hardware, facts) else ()


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
    if len(facts.devices) > 1:
        return f"its weights are on {' and '.join(facts.devices)}: a graph is of one device"
    return "lazy layers have no shape yet: run one forward pass before" if facts.lazy else ""


def _layers_in(facts: Facts) -> int:
    """Those that multiply; what is between them mostly goes with them."""
    return facts.linears + facts.convolutions + 4 * facts.lstms


class _Recording(threading.local):
    """Whether this thread records a call: what is patched for a measurement is no part of it."""

    now = False


_RECORDING = _Recording()


def is_recording() -> bool:
    """Whether this thread records a call."""
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
        self._kinds: dict[Hashable, Any] = {}
        self._pending: Callable[[], Any] = lambda: None
        self._counts: Counter[str] = Counter()
        self._is_off = False

    @property
    def counted(self) -> str:
        """What became of the calls."""
        return f"{self._counts['recorded']} recorded, {self._counts['replayed']} replayed"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own result, which stays the user's."""
        leaves, structure = tree_flatten((args, kwargs))
        kind = self._kind(leaves, structure) if self._suits() else None
        if kind is None or (kind not in self._kinds and len(self._kinds) >= MOST):
            return self.below(*args, **kwargs)
        if kind not in self._kinds:
            self._kinds[kind] = None
            return self.below(*args, **kwargs)
        recorded = self._kinds[kind] or self._recorded(kind, leaves, structure)
        if recorded is None:
            return self.below(*args, **kwargs)
        self._counts["replayed"] += 1
        graphed, spec = recorded
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        turn = Turn()
        tensors = list(filter(_is_tensor, leaves))
        given = _replayed().apply(turn, graphed, len(tensors), *tensors, *parameters)
        self._pending = weakref.ref(turn)
        return tree_unflatten(given, spec[0])

    def _suits(self) -> bool:
        """Whether such a call may be a replay at present."""
        import torch

        pending = self._pending()
        busy = pending is not None and not pending.done
        if self._is_off or busy or is_recording() or not self.is_here():
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return False
        return not has_hooks_of_all() and not has_forward_hooks(self.module)

    def _kind(self, leaves: list[Any], structure: Any) -> Hashable | None:
        """What has to be alike for a replay; None where it can't be told."""
        import torch

        model = self.module
        own = [*model.parameters(), *model.buffers()]
        if not own or own[0].device.type == "meta":
            return None
        device = own[0].device.type
        given = [
            (t.shape, t.dtype, t.device, t.stride(), t.requires_grad) if _is_tensor(t) else t
            for t in leaves
        ]
        around = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )
        weights = [(tensor.data_ptr(), tensor.requires_grad) for tensor in own]
        modes = [module.training for module in model.modules()]
        kind = (*given, str(structure), *around, *weights, *modes)
        try:
            hash(kind)
        except TypeError:  # a list of numbers, an object: it may be another each time
            return None
        return kind

    def _recorded(self, kind: Hashable, leaves: list[Any], structure: Any) -> Any:
        """Record the call, and leave buffers and random numbers as they are; None if that fails."""
        import torch

        device = next(iter(self.module.parameters())).device
        spec: list[Any] = []
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        tensors = filter(_is_tensor, leaves)
        samples = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        random = torch.get_device_module(device.type).get_rng_state(device)

        constants = [None if _is_tensor(leaf) else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(leaves) if _is_tensor(leaf)]

        def call(*tensors: torch.Tensor) -> Any:
            given = dict(enumerate(constants)) | dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten(list(given.values()), structure)
            results, found = _flat(self.below(*args, **kwargs))
            spec[:] = [found]
            return results

        kinds = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        around = torch.autocast(device.type, kinds[1], kinds[0], cache_enabled=False)
        # What is recorded takes tensors alone, and has the model's parameters.
        whole: Any = torch.nn.Module()
        whole.model, whole.forward = self.module, call
        _RECORDING.now = True
        try:
            with around:
                graphed = torch.cuda.make_graphed_callables(
                    whole, tuple(samples), allow_unused_input=True
                )
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self._notes["cuda_graphs"] = f"can't be recorded: {type(error).__name__}: {first}"
            self._is_off = True
            self._kinds.clear()
            return None
        finally:
            _RECORDING.now = False
            whole.model = None  # a graph holds parameters, and no model
            torch.get_device_module(device.type).set_rng_state(random, device)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.data.copy_(before)  # a backward pass may have kept it
        self._counts["recorded"] += 1
        self._kinds[kind] = graphed, spec
        return self._kinds[kind]


class Turn:
    """Whether the backward pass of a replay has been made."""

    done = False


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _flat(result: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the tensors of a result, and their structure. Raises where it has anything else."""
    leaves, structure = tree_flatten(result)
    if not all(map(_is_tensor, leaves)):
        raise SpeedKitError("the model returns more than tensors")
    return tuple(leaves), structure


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
