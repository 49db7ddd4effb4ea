"""Calls of the model recorded as CUDA graphs, by torch's `make_graphed_callables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.calls import Call, around, has_hooks
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.confinement import RECORDING, is_recording
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map

# Kinds of calls that are remembered until one of them is repeated.
SEEN = 8
HINT = "Python code in the forward pass runs only when it is recorded"
CODE = """\
def forward(*inputs, plain=model.forward):
    model.forward = plain
    torch.set_autocast_cache_enabled(False)  # as it has to be while it is recorded
    samples = tuple(one.detach().clone() for one in inputs)
    torch.cuda.make_graphed_callables(model, samples, allow_unused_input=True)
    return model(*inputs)


model.forward = forward  # recorded at the first call; call zero_grad() before each backward()"""
AGAIN = "a later call has overwritten this backward pass's inputs: leave cuda_graphs out"
MOVED = "its forward pass puts other tensors in the place of weights or buffers"
MIXED = "some of its results have gradients and others don't"


class CudaGraphs(Optimization):
    """By request: the second of two equal calls is recorded, later ones are replayed."""

    name = "cuda_graphs"
    variable = None
    effect = Effect.EXACT  # the same kernels, in the same order
    excludes = frozenset({"compile", "activation_checkpointing"})
    summary = "calls of the model are recorded as CUDA graphs and replayed"
    helps = "steps of many small kernels on an NVIDIA GPU, with the same shapes again and again"
    risk = f"{HINT}; no second derivatives"
    undone = "the model is called as before; graphs and their memory are freed"
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

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        is_on = bool(planned.value) if planned else around(target.model, Graphed)
        return {"model.cuda_graphs": is_on}

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        graphed = target.memo.graphed = target.memo.graphed or Graphed(target.model, target.notes)
        graphed.only_in = target.only_in
        return [graphed] if decision.value else []

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return torch's function at the first call. Raises SpeedKitError for frameworks."""
        if form != "torch":
            raise SpeedKitError("cuda_graphs is written for a loop of your own: take --as torch")
        return Snippet(decision.reason, training=tuple(CODE.splitlines()))


class Graphed(Call):
    """Calls with tensors only. Results and gradients are copies, which no replay overwrites."""

    def __init__(self, model: torch.nn.Module, notes: dict[str, str]) -> None:
        super().__init__(model, notes)
        self._is_off, self._replays = False, 0
        self._kind: Any = None
        self._seen: list[Any] = []
        self._graphed: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result, by a replay if the call equals the recorded one."""
        given = [*args, *kwargs.values()]
        own = [*self.module.parameters(), *self.module.buffers()]
        kind = self._kind_of(given, [*kwargs], own)
        if kind is None or kind != self._kind:
            if kind is None or self._graphed or kind not in self._seen:
                self._seen = [kind, *self._seen[: SEEN - 1]]
                return self.below(*args, **kwargs)
            self._kind = kind
        try:
            self._graphed = self._graphed or self._recorded(given, [*kwargs])
        except Exception as error:
            self.notes["cuda_graphs"] = f"can't be recorded: {type(error).__name__}: {error}"
            self._is_off = True
            return self.below(*args, **kwargs)
        inputs = [one.view_as(one) for one in (*given, *own)]
        for one in inputs:
            if one.requires_grad:
                one.register_hook(lambda gradient: gradient.clone())
        result = self._graphed(*inputs)
        self._replays += 1
        check = partial(self._begin_backward, self._replays)
        for node in {one.grad_fn for one in tree_leaves(result)} - {None}:
            node.register_prehook(check)
        return tree_map(lambda one: one.clone(), result)

    def _begin_backward(self, replay: int, _: Any) -> None:
        if replay != self._replays:
            raise SpeedKitError(AGAIN)

    def _kind_of(self, given: Sequence[Any], names: Sequence[str], own: Sequence[Any]) -> Any:
        """Return the properties that a replay requires; None for a call that can't be recorded."""
        is_plain = self._is_off or is_recording() or not self.acts() or has_hooks(self.module)
        if is_plain or not own or not all(type(one) is torch.Tensor for one in given):
            return None
        kind = own[0].device.type
        return (
            [(t.shape, t.dtype, t.device, t.stride(), t.requires_grad) for t in given],
            [*names, torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            [(one.data_ptr(), one.requires_grad) for one in own],
            [part.training for part in self.module.modules()],
        )

    def _recorded(self, given: Sequence[torch.Tensor], names: Sequence[str]) -> Any:
        """Return a function that replays the call; recording leaves buffers and generators as
        found. Weights are inputs too, by tensors in their memory, so their gradients are results.
        """
        model, whole = self.module, torch.nn.Module()
        named = (*model.named_parameters(), *model.named_buffers())
        own = {f"model.{name}": one for name, one in named}
        places = [one.data_ptr() for one in own.values()]
        samples = [*(one.detach().clone() for one in given), *(t.detach() for t in own.values())]
        for sample, source in zip(samples, (*given, *own.values()), strict=True):
            sample.requires_grad_(source.requires_grad)

        def forward(*inputs: torch.Tensor) -> Any:
            last = len(inputs) - len(names)
            result = self.below(*inputs[:last], **dict(zip(names, inputs[last:], strict=True)))
            if places != [one.data_ptr() for one in (*model.parameters(), *model.buffers())]:
                raise SpeedKitError(MOVED)
            if len({t.requires_grad for t in tree_leaves(result) if t.is_floating_point()}) > 1:
                raise SpeedKitError(MIXED)
            return result

        def call(*tensors: torch.Tensor) -> Any:
            inputs, tensors = tensors[: len(given)], tensors[len(given) :]
            return torch.func.functional_call(whole, dict(zip(own, tensors, strict=True)), inputs)

        whole.model, whole.forward = model, forward
        device, buffers = samples[-1].device, [(one, one.clone()) for one in model.buffers()]
        kind, RECORDING.active = device.type, True
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        try:
            with (
                torch.random.fork_rng([device] if kind == "cuda" else []),
                torch.autocast(kind, dtype, enabled, cache_enabled=False),
            ):
                record = torch.cuda.make_graphed_callables
                return record(call, tuple(samples), allow_unused_input=True)
        finally:
            RECORDING.active = False
            for buffer, before in buffers:
                buffer.data.copy_(before)  # by .data: a backward pass may have kept it
