"""Find the user's training and prediction loops by hooks on all modules."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module as torchs

from speedkit_jupyter.catalog.model_changes.calls import around
from speedkit_jupyter.catalog.precision import Lowered
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.torchglue.private import current_node, is_transforming
from speedkit_jupyter.torchglue.storage import tensors_in

# Maximum number of optimizer steps in one loop step, such as two in a GAN. The order must repeat.
MOST_IN_A_PERIOD = 8
# Minimum number of optimizer steps, or of calls without gradients, before a race begins.
FIRST_STEPS = 3
# After this many calls of models whose loop is known, the search for other loops in a cell ends:
# hooks on all modules cost some 20 microseconds for each call of a module.
KNOWN_CALLS = 8


class Discovery:
    """Record a new loop's first steps: its models, and its optimizers in the order of their steps.

    From `begin` to `end`, hooks watch the calls of all modules in this thread. `models` has the
    outermost modules with trainable parameters that were called with gradients enabled.
    `has_autocast` is true if the loop itself uses autocast; `seconds` is the time of its steps.
    `predicts` is called with a module in eval mode at its FIRST_STEPS-th call without gradients,
    unless a model trains. After KNOWN_CALLS calls of modules for which `known` is true, the hooks
    are removed, unless a new loop has begun.
    """

    def __init__(
        self, predicts: Callable[[torch.nn.Module], None], known: Callable[[torch.nn.Module], bool]
    ) -> None:
        self._predicts, self._known = predicts, known
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self.models, self._predicting = dict[int, torch.nn.Module](), Counter[int]()
        self.times = Counter[int]()  # calls by the module's id, in `models`; 0: any module
        self.optimizers: list[torch.optim.Optimizer] = []
        self.has_autocast = self._is_functional = False
        self._depth = self._known_calls = self._backward_passes = self._passes_before = 0
        self.seconds = self._begun_s = 0.0

    def begin(self) -> None:
        """Register global hooks for calls of modules, unless already registered."""
        if self._handles:
            return
        here = threading.get_ident()

        def before(module: torch.nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling() and threading.get_ident() == here:
                self._depth += 1
                if self._depth == 1:
                    self._called(module, needs_gradients(module, args))

        def after(module: torch.nn.Module, args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling() and threading.get_ident() == here:
                self._depth = max(self._depth - 1, 0)

        self._handles = [
            torchs.register_module_forward_pre_hook(before),
            torchs.register_module_forward_hook(after, always_call=True),
        ]

    def end(self) -> None:
        """Remove the hooks, and reset all attributes."""
        while self._handles:
            self._handles.pop().remove()
        self._forget()

    def _called(self, module: torch.nn.Module, needs_gradients: bool) -> None:
        parameter = next(iter(module.parameters()), None)
        if parameter is None or current_node() is not None:  # checkpointing repeats a call
            return
        self.times[0] += 1
        if is_transforming():
            self._is_functional = True
            return
        if torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters()):
            self.models[id(module)] = module
            self.times[id(module)] += 1
            if self._backward_passes == self._passes_before:  # the step may begin at this call
                self._begun_s = clock.now()
            kind = parameter.device.type
            is_available = torch.amp.is_autocast_available(kind)
            if is_available and not around(module, Lowered):  # a plan's autocast doesn't count
                self.has_autocast |= torch.is_autocast_enabled(kind)
        elif not module.training and not self.models and not needs_gradients:
            self._predicting[id(module)] += 1
            if self._predicting[id(module)] == FIRST_STEPS:
                self._predicts(module)
        self._known_calls += self._known(module)
        is_quiet = self._known_calls >= KNOWN_CALLS and not self.optimizers
        if is_quiet and not self._repeats_unknown():
            self.end()

    def _repeats_unknown(self) -> bool:
        return any(self.times[key] > 1 and not self._known(m) for key, m in self.models.items())

    def differentiated(self) -> None:
        self._backward_passes += bool(self._handles)  # without hooks, the search has ended

    def obstacle(self) -> str:
        """Return why a loop without optimizer steps can't race; "" if there is no such loop."""
        if self.optimizers:
            return ""
        if self._is_functional:
            return "torch.func computes its gradients"
        is_raw = not self.times[0] and self._backward_passes >= 10 * FIRST_STEPS  # no module
        is_loop = is_raw or (self._backward_passes >= FIRST_STEPS and self._repeats_unknown())
        return "no optimizer of torch makes its steps" if is_loop else ""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.append(optimizer)
        self.seconds += clock.now() - (self._begun_s or clock.now())
        self._depth, self._begun_s, self._passes_before = 0, 0.0, self._backward_passes

    @property
    def period(self) -> int | None:
        """Return the number of optimizer steps in a loop step; None until known, 0 if irregular."""
        ids = [id(one) for one in self.optimizers]
        if len(ids) < FIRST_STEPS:
            return None
        for period in range(1, MOST_IN_A_PERIOD + 1):
            seen = ids[-max(2 * period, FIRST_STEPS) :]
            if len(seen) < 2 * period:
                return None
            if all(a == b for a, b in zip(seen, seen[period:], strict=False)):
                return period
        return 0


def needs_gradients(module: torch.nn.Module, *inputs: Any) -> bool:
    """Return whether autograd records a call of the module with these inputs."""
    every = chain(tensors_in(inputs), module.parameters())
    return torch.is_grad_enabled() and any(one.requires_grad for one in every)
