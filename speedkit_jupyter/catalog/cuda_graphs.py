"""The switch `cuda_graphs`: record calls of the model with torch's `make_graphed_callables`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from operator import is_not
from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.calls import Call, around, has_hooks
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.confinement import is_recording, recording
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map

HINT = "Python code in the forward pass runs only when it is recorded"
CODE = """\
def forward(*inputs, plain=model.forward):
    model.forward = plain
    torch.set_autocast_cache_enabled(False)  # required while the model is recorded
    samples = tuple(one.detach().clone() for one in inputs)
    torch.cuda.make_graphed_callables(model, samples, allow_unused_input=True)
    return model(*inputs)


model.forward = forward  # recorded at the first call; call zero_grad() before each backward()"""
AGAIN = "a later call has overwritten this backward pass's inputs: leave cuda_graphs out"


class CudaGraphs(Optimization):
    """Record a call as a CUDA graph once its input shapes repeat; replay it for the same shapes."""

    name = "cuda_graphs"
    variable = None
    effect = Effect.EXACT  # the same kernels, in the same order
    excludes = frozenset({"compile", "activation_checkpointing"})
    summary = "calls of the model are recorded as CUDA graphs and replayed"
    helps = "steps of many small kernels on an NVIDIA GPU, with the same shapes again and again"
    risk = f"{HINT}; no second derivatives"
    page = "https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        gpu, why = hardware.accelerator(facts.device), ""
        if gpu is None or not gpu.is_nvidia:
            why = f"NVIDIA's GPUs record CUDA graphs; the model is on {facts.device}"
        elif facts.compiled != "no":
            why = 'the model is compiled already: torch.compile(mode="reduce-overhead") records it'
        elif facts.recomputed or facts.own_checkpointing == "on":
            why = "activation checkpointing runs Python code in the backward pass"
        elif facts.processes > 1:
            why = f"{facts.processes} processes exchange gradients, which no graph records"
        return request.on_request(why, "it is there on request", hint=HINT)

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        return replace(facts, graphed=decision.active)

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        is_on = bool(planned.value) if planned else around(target.model, Graphed)
        return {"model.cuda_graphs": is_on}

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        graphed = target.memo.graphed = target.memo.graphed or Graphed(target.model, target.notes)
        graphed.only_in = target.only_in
        return [graphed] if decision.value else []

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form != "torch":
            raise SpeedKitError("cuda_graphs needs your own training loop: use --as torch")
        return Snippet(decision.reason, training=tuple(CODE.splitlines()))


class Graphed(Call):
    """Replay calls from a CUDA graph. Results and gradients are copied: replays overwrite them."""

    def __init__(self, model: torch.nn.Module, notes: dict[str, str]) -> None:
        super().__init__(model, notes)
        self._seen: deque[Any] = deque(maxlen=8)  # kinds of recent calls, to find a repeated call
        self._graph: Any = None
        self._kind: Any = None
        self._is_off, self._replays = False, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result: record the first repeated call, replay calls that match it."""
        own = [*self.module.parameters(), *self.module.buffers()]
        kind = self._kind_of([*args, *kwargs.values()], [*kwargs], own)
        if kind is not None and self._graph is None and kind in self._seen:
            try:
                self._graph, self._kind = self._recorded(args, kwargs), kind
            except Exception as error:
                self.notes["cuda_graphs"] = f"can't be recorded: {type(error).__name__}: {error}"
                self._is_off = True
        if kind is None or kind != self._kind:
            self._seen.append(kind)
            return self.below(*args, **kwargs)
        inputs = [one.view_as(one) for one in (*args, *kwargs.values(), *own)]
        for one in inputs:
            if one.requires_grad:  # the gradient of an unused weight is None
                one.register_hook(lambda grad: None if grad is None else grad.clone())
        result = self._graph(*inputs)
        number = self._replays = self._replays + 1

        def check(_: Any) -> None:
            if number != self._replays:
                raise SpeedKitError(AGAIN)

        for node in {one.grad_fn for one in tree_leaves(result)} - {None}:
            node.register_prehook(check)
        return tree_map(lambda one: one.clone(), result)

    def _kind_of(self, given: list[Any], names: list[str], own: list[torch.Tensor]) -> Any:
        """Return the properties that a replay must match; None if the call must run as usual."""
        is_plain = self._is_off or is_recording() or not self.acts() or has_hooks(self.module)
        if is_plain or not own or not all(type(one) is torch.Tensor for one in given):
            return None
        device = own[0].device.type
        return (
            [(t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in given],
            [*names, torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            [(one.data_ptr(), one.requires_grad) for one in own],
            [part.training for part in self.module.modules()],
        )

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call, restore buffers and random states, and return the replaying function.

        The function also takes weights and buffers, so that the weights get gradients.
        """
        whole = torch.nn.Module()
        whole.model, whole.forward = self.module, self.below
        own = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        given = [one.clone() for one in (*args, *kwargs.values())]
        every = (*given, *own.values())
        samples = tuple(one.detach().requires_grad_(one.requires_grad) for one in every)

        def call(*tensors: torch.Tensor) -> Any:
            inputs, weights = tensors[: len(given)], tensors[len(given) :]
            state = dict(zip(own, weights, strict=True))
            named = dict(zip(kwargs, inputs[len(args) :], strict=True))
            result = torch.func.functional_call(whole, state, inputs[: len(args)], named)
            # `state` now has the tensors that the model held at the end of the call.
            if any(map(is_not, weights, state.values())):
                raise SpeedKitError("its forward pass replaces weights or buffers by other tensors")
            if len({t.requires_grad for t in tree_leaves(result) if t.is_floating_point()}) > 1:
                raise SpeedKitError("some of its results have gradients and others don't")
            return result

        device, buffers = samples[-1].device, [(one, one.clone()) for one in self.module.buffers()]
        kind, devices = device.type, [device] if device.type == "cuda" else []
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        try:
            with (
                recording(),
                torch.random.fork_rng(devices),
                torch.autocast(kind, dtype, enabled, cache_enabled=False),
            ):
                return torch.cuda.make_graphed_callables(call, samples, allow_unused_input=True)
        finally:
            for buffer, value in buffers:
                buffer.data.copy_(value)  # `.data`: autograd may have saved the buffer
