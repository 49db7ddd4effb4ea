"""CUDA graphs: the kernels of a call recorded once, and launched again all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field

from speedkit_jupyter.machines import capture
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.graphs.graphed_calls import Counts, GraphedCalls
from speedkit_jupyter.optimizations.properties.calls import CALLS, layer_of
from speedkit_jupyter.support.exceptions import SpeedKitError

# So many layers launch enough kernels for their launches to count, unless these are large: from
# 2,048 x 2,048 weights on a GPU computes for longer than it takes to launch the next kernel.
MANY_LAYERS, SMALL_LAYER = 8, 2048 * 2048
# By torch's own function, which records what it is given first; the rest is what that leaves open.
CODE = """\
plain_forward, graphed = model.forward, {}


def forward(*inputs, **more):
    \"\"\"Recorded for the first shapes that it trains on; with others as before.\"\"\"
    kind = tuple((one.shape, one.dtype, one.requires_grad) for one in inputs)
    if more or not torch.is_grad_enabled() or (graphed and kind not in graphed):
        return plain_forward(*inputs, **more)
    if not graphed:
        buffers = [buffer.clone() for buffer in model.buffers()]
        drawn, model.forward = torch.cuda.get_rng_state(), plain_forward
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # as it has to be while it is recorded
        samples = tuple(one.detach().clone() for one in inputs)
        for sample, one in zip(samples, inputs):
            sample.requires_grad_(one.requires_grad)
        torch.cuda.make_graphed_callables(model, samples, allow_unused_input=True)
        torch.set_autocast_cache_enabled(cached)
        graphed[kind], model.forward = model.forward, forward
        # Warming up has changed these.
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)
        torch.cuda.set_rng_state(drawn)
    return graphed[kind](*inputs)


model.forward = forward"""
LIMITS = (
    "gradients are overwritten by the next backward pass, so clear them after each step; one call "
    "of the model a step; inputs are passed by position"
)
KEYWORDS = (
    "{} passes batches by keyword, which torch.cuda.make_graphed_callables does not take: "
    "take --as torch"
)


class CudaGraphs(Optimization):
    """Each kernel costs some microseconds of the CPU to launch: where kernels are small the GPU
    waits for that. A graph of hundreds is launched by one call.

    A call is recorded when it comes the second time with the same shapes, and only if the first one
    has shown that it can be.
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
        if why := _obstacle(facts):
            return request.decline(False, why)
        if request.value == "auto":
            return request.leave(False, f"{_kernels(facts)}; it is there on request")
        hint = "a call is recorded when it comes again with the same shapes"
        return request.obey(True, _kernels(facts), hint=hint)

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Nothing is recorded before the model is called."""
        return {"model.cuda_graphs": str(Counts()) if decision.value else False}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """A layer around the model's calls; in a benchmark for its own thread's alone.

        What is recorded is kept for the context's life, and freed with it.
        """
        with CALLS.wished(_layer(decision, target)):
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """By torch's `make_graphed_callables`, at the first call.

        Accelerate puts its own forward on the model when it prepares it, Fabric passes a new one on
        to the model inside.
        """
        if form == "transformers":
            raise SpeedKitError(KEYWORDS.format("Trainer"))
        lines, comment = tuple(CODE.splitlines()), f"{decision.reason}; {LIMITS}"
        return (
            Snippet(comment, model=lines) if form == "fabric" else Snippet(comment, training=lines)
        )

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many calls were captured, replayed, and made as ever; False where none can be."""
        layer = layer_of(target.model, GraphedCalls)
        return {"model.cuda_graphs": False if layer is None else str(layer.counts)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """On, where there may be many small kernels."""
        return () if _obstacle(facts) or not _has_many_small(facts) else (True,)


def _obstacle(facts: Facts) -> str:
    """Why no call of this model can be recorded; empty where some may be."""
    if facts.device_type not in capture.KINDS:
        return f"GPUs of NVIDIA's and AMD's record CUDA graphs; the model is on {facts.device}"
    if facts.compiled == "script":
        return "a TorchScript module has an executor of its own"
    if facts.compiled != "no":
        return 'the model is compiled already: torch.compile(mode="reduce-overhead") records it'
    if facts.compiles:
        return (
            "this plan compiles the model, and compile:reduce-overhead records what is compiled; "
            "`compile: false` leaves its calls to this"
        )
    if facts.passed_by == "activation_checkpointing" or facts.own_checkpointing == "on":
        return "activation checkpointing runs Python code in the backward pass"
    if len(facts.devices) > 1:
        return f"its weights are on {' and '.join(facts.devices)}: a graph is of one device"
    return "lazy layers have no shape yet: run one forward pass before" if facts.lazy else ""


def _layers_in(facts: Facts) -> int:
    """Those that multiply; what is between them mostly goes with them."""
    return facts.linears + facts.convolutions + 4 * facts.lstms


def _has_many_small(facts: Facts) -> bool:
    layers = _layers_in(facts)
    return layers >= MANY_LAYERS and facts.parameters <= layers * SMALL_LAYER


def _kernels(facts: Facts) -> str:
    layers = _layers_in(facts)
    if _has_many_small(facts):
        mean = facts.parameters // layers
        return f"{layers} layers of {mean:,} weights in the mean: many small kernels"
    few = f"{layers} layers" if layers < MANY_LAYERS else "large layers"
    return f"{few}: launching kernels may not be what takes time"


def _layer(decision: Decision, target: Target) -> Iterator[Any]:
    if not decision.value:
        return
    calls = target.memo.graphed
    if calls is None:
        calls = target.memo.graphed = GraphedCalls(target)
    calls.only_in = target.only_in
    yield target.model, calls
