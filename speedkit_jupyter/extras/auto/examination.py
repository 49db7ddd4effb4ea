"""Check the numbers of a plan: repeat a call of the model under the plan, on the user's own batch.

The step that trains provides the results of the call, and the gradients of these results. So the
check needs no loss function, and repeats only the call and its backward pass.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.right.reference import replayed
from speedkit_jupyter.right.tolerance import beyond_limit, of_gradients, sums, total
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.torchglue.modules import COMPILED_CALL, buffer_table
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map, version

# A step with this many calls or more is not examined: a loop over time steps may have thousands.
MOST_CALLS = 4
LOWERED = (torch.bfloat16, torch.float16)


@dataclass
class NotedCall:
    """A call of the step: its arguments, its results, and the gradients of the results."""

    module: torch.nn.Module
    arguments: tuple[Any, Any]
    versions: list[int]
    random: list[torch.Tensor]
    results: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def ended(self, results: Any) -> None:
        """Note the results, and hook their gradients."""
        self.results = [one for one in tensors(results) if one.is_floating_point()]
        for number, one in enumerate(self.results):
            if one.requires_grad and torch.is_grad_enabled():
                self.hooks.append(one.register_hook(partial(self._note, number)))

    def _note(self, number: int, gradient: torch.Tensor) -> None:
        known = self.gradients.get(number)
        self.gradients[number] = gradient.detach() if known is None else known + gradient

    @property
    def is_intact(self) -> bool:
        """Return whether the argument tensors are unchanged since the call."""
        return self.versions == _versions(self.arguments)


class CallExamination:
    """The record of one plain step of the user's, with which a plan is compared.

    `repeated_s` is the time of the repeated calls under the plan, in seconds.
    """

    def __init__(self, models: Sequence[torch.nn.Module], trains: bool = True) -> None:
        self._models = models
        self.calls: list[NotedCall] = []
        self.repeated_s = 0.0
        self._gradients: dict[int, torch.Tensor] = {}
        every = [one for model in models for one in model.parameters() if one.requires_grad]
        every = every if trains else []
        self._hooks = [one.register_hook(self._noting(id(one))) for one in every]

    def _noting(self, key: int) -> Any:
        def note(gradient: torch.Tensor) -> None:
            known = self._gradients.get(key)
            self._gradients[key] = gradient.detach() if known is None else known + gradient

        return note

    def begin_call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> NotedCall | None:
        """Return the record of a call that begins; None after MOST_CALLS calls."""
        if len(self.calls) == MOST_CALLS:
            return None
        versions = _versions((args, kwargs))
        call = NotedCall(module, (args, kwargs), versions, generators(module))
        self.calls.append(call)
        return call

    def end(self) -> None:
        """Remove the hooks on gradients, which would keep the results alive."""
        for hook in (*self._hooks, *(one for call in self.calls for one in call.hooks)):
            hook.remove()

    def compare(self, in_force: AbstractContextManager[Any], precision: str) -> str:
        """Return why the plan is wrong, in words; empty if its rounding explains all differences.

        Args:
            in_force: The context in which the plan acts.
            precision: The plan's lowest precision, as "bf16".

        Raises:
            ValueError: The step can't be repeated: its arguments changed, it had no call or too
                many, or no result got a gradient.
        """
        if not self.calls or len(self.calls) == MOST_CALLS:
            raise ValueError("a step of many calls")
        if not all(call.is_intact for call in self.calls):
            raise ValueError("the arguments of its call are written to")
        if self._hooks and not any(call.gradients for call in self.calls):
            raise ValueError("no gradient came back to a result")
        noted = [result for call in self.calls for result in call.results]
        with kept_state(self._models):
            with in_force:
                begun_s = clock.now()
                results, gradients = self._repeated()
                self.repeated_s = clock.now() - begun_s
            if name := keeps_lowered(self._models):
                return f"the model keeps {name}, a result that the plan lowers"
            why = self._differences(results, gradients, noted, self._gradients, precision)
            if why:  # a penalty on parameters, say, adds gradients that bypass the calls
                why = self._differences(results, gradients, *self._repeated(), precision)
            return why

    def _repeated(self) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """Repeat the calls; return their results, and the parameters' gradients by id."""
        trained = [
            one
            for model in self._models
            for one in model.parameters()
            if id(one) in self._gradients
        ]
        found: dict[int, torch.Tensor] = {}
        results = list[torch.Tensor]()
        for call in self.calls:
            set_generators(call.module, call.random)
            args, kwargs = tree_map(_apart, call.arguments)
            with torch.set_grad_enabled(bool(call.gradients)), replayed(set()):
                again = tensors(call.module(*args, **kwargs))
            floats = [one for one in again if one.is_floating_point()]
            results += floats
            if not call.gradients:
                continue
            ends = [floats[number] for number in call.gradients if number < len(floats)]
            given = [
                one.to(end.dtype) for one, end in zip(call.gradients.values(), ends, strict=False)
            ]
            for one, gradient in zip(
                trained,
                torch.autograd.grad(ends, trained, given, allow_unused=True),
                strict=True,
            ):
                if gradient is not None:
                    known = found.get(id(one))
                    found[id(one)] = gradient if known is None else known + gradient
        return [one.detach() for one in results], found

    def _differences(
        self,
        results: Sequence[torch.Tensor],
        gradients: Mapping[int, torch.Tensor],
        known: Sequence[torch.Tensor],
        known_gradients: Mapping[int, torch.Tensor],
        precision: str,
    ) -> str:
        if [one.shape for one in results] != [one.shape for one in known]:
            return "its results have other shapes"
        for one in sums([(a, b.detach()) for a, b in zip(results, known, strict=True)]):
            if words := _beyond(one.deviation(), one.size, "output", precision):
                return f"a result is {words}"
        named = {
            name: id(one)
            for model in self._models
            for name, one in model.named_parameters()
            if id(one) in known_gradients
        }
        pairs = [(gradients.get(key), known_gradients[key]) for key in named.values()]
        parts = dict(zip(named, sums(pairs), strict=True))
        whole = total([*parts.values()])
        if words := _beyond(whole.deviation(), whole.size, "gradients", precision):
            return f"the gradients are {words}"
        for (name, part), found in zip(parts.items(), of_gradients(parts), strict=True):
            if words := _beyond(found, part.size, "gradient", precision):
                return f"the gradient of {name} is {words}"
        return ""


@contextmanager
def kept_state(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put back buffers, attributes of modules, and generators after the block."""
    parts = [part for model in models for part in model.modules()]
    attributes = [dict(vars(part)) for part in parts]
    tables = [dict(buffer_table(part)) for part in parts]
    held = [(one, one.detach().clone()) for model in models for one in model.buffers()]
    now, pythons = generators(models[0]), random.getstate()
    try:
        yield
    finally:
        for part, found, table in zip(parts, attributes, tables, strict=True):
            for name in (vars(part).keys() | found.keys()) - {COMPILED_CALL}:
                if name not in found:
                    del vars(part)[name]
                elif vars(part).get(name) is not found[name]:
                    vars(part)[name] = found[name]
            buffer_table(part).update(table)
        with torch.no_grad():
            for buffer, value in held:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        set_generators(models[0], now)
        random.setstate(pythons)


def keeps_lowered(models: Sequence[torch.nn.Module]) -> str:
    """Return the attribute of a module that holds a tensor of bf16 or fp16; empty without one."""
    for model in models:
        for name, part in model.named_modules():
            for key, value in vars(part).items():
                if isinstance(value, torch.Tensor) and value.dtype in LOWERED:
                    return f"{name}.{key}".lstrip(".")
    return ""


def _beyond(found: Any, size: int, kind: str, precision: str) -> str:
    excess, words = beyond_limit(found, size, None, kind, precision)
    return words if excess > 1 else ""


def _apart(value: Any) -> Any:
    """Return a tensor without its graph, which the user's backward pass has already freed."""
    is_tensor = isinstance(value, torch.Tensor) and value.requires_grad
    return value.detach().requires_grad_() if is_tensor else value


def _versions(values: Any) -> list[int]:
    """Return the version of each tensor, which each write increases; 0 for inference tensors."""
    return [0 if one.is_inference() else version(one) for one in tensors(values)]


def tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results."""
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def generators(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the states of the random generators of the CPU and of the module's device."""
    device = next(module.parameters()).device
    others = [] if device.type in ("cpu", "meta") else [torch.get_device_module(device)]
    return [one.get_rng_state() for one in (torch, *others)]


def set_generators(module: torch.nn.Module, states: Sequence[torch.Tensor]) -> None:
    """Set the random generators of `generators` to these states."""
    device = next(module.parameters()).device
    others = [] if device.type in ("cpu", "meta") else [torch.get_device_module(device)]
    for one, state in zip((torch, *others), states, strict=True):
        one.set_rng_state(state)
