"""Record a whole step as one CUDA graph, compare the graph with plain steps, and replay it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from speedkit_jupyter.machines import devices
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.step.reachable import optimizers_among, outermost, reached
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import ArgumentError, in_a_line
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map

# Number of compared steps, each on different inputs: a frozen counter shows in the second step.
COMPARED = 3
# Limit for the relative distance between changes by the graph and by plain steps. Other kernels
# round differently (1e-6 in float32); a frozen learning rate or counter has a larger effect. If two
# plain runs differ (due to atomic sums), the limit rises to NOISE_TIMES their distance, but not
# above MOST_ERROR: a larger distance comes from state that can't be restored.
ALLOWED_ERROR, NOISE_TIMES, MOST_ERROR = 1e-3, 10, 0.03
KIND = "cuda"  # the type of devices that record graphs
FROZEN = "the graph repeats the numbers that Python computed when it was recorded"
Values = dict[str, list["torch.Tensor"]]


@hide_internal_frames
def make_graphed_step(step: Callable[..., Any], *inputs: torch.Tensor) -> GraphedStep:
    """Return `step` as one CUDA graph for inputs of the given shapes, dtypes and device.

    Three replays on different inputs are first compared with plain steps: weights, buffers,
    optimizer state, gradients and results. Changes are undone, but `.grad` is the graph's tensor.

    Args:
        step: a function of a whole step: forward pass, loss, backward pass, `optimizer.step()` and
            `optimizer.zero_grad()`; or of a rollout, `for _ in range(k): x = model(x)`. It takes
            the inputs by position and returns tensors, a structure of tensors, or None. Its
            optimizer has `capturable=True` and has run a step before. A changing learning rate
            must be a tensor. The step reads no value back (`.item()`, `print`, a `GradScaler`), and
            its shapes and control flow do not depend on values.
        *inputs: tensors on the GPU, with the shapes and dtypes of later calls.

    Returns:
        A GraphedStep, which returns detached copies of the results. If no graph is possible, a
        warning is shown, `why` has the reason, and each call runs the plain step. Calls with other
        shapes, dtypes, devices or gradient mode run it, too. After a warning, so do all calls
        once weights move, training modes or hyperparameters change, or optimizer state is replaced.

    Raises:
        ArgumentError: `step` is not callable, or an input is not a tensor.

    Example::

        graphed = make_graphed_step(step, x, y)
        for x, y in loader:
            loss = graphed(x, y)
    """
    if not callable(step):
        raise ArgumentError(f"the step must be a function, not {type(step).__name__}")
    for one in inputs:
        if not isinstance(one, torch.Tensor):
            raise ArgumentError(f"inputs must be tensors, not {type(one).__name__}")
    graphed = GraphedStep(step, inputs)
    graphed.record()
    if graphed.why:
        messages.warn(f"no CUDA graph, the step runs unchanged: {graphed.why}")
    return graphed


class GraphedStep:
    """A step that is replayed as a CUDA graph; if `why` has a reason, the plain step runs."""

    def __init__(self, step: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        self.replays = self.plain_calls = 0
        self.why, self._step, self._inputs = "", step, inputs
        objects = reached([step])
        self._models, self._optimizers = outermost(objects), optimizers_among(objects)
        self._graph: Any = None
        self._result: Any = None
        self._static: list[torch.Tensor] = []
        self._kind = _kind(inputs)
        self._host: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """Replay the graph, or run the step if inputs or state do not match; return the results."""
        is_like = not self.why and _kind(inputs) == self._kind
        if is_like and self._host != self._numbers():
            self.why = f"weights, modes or an optimizer's numbers have changed, and {FROZEN}"
            messages.warn(f"the step runs without its graph from now on: {self.why}; record again")
        if not is_like or self.why:
            self.plain_calls += 1
            return self._step(*inputs)
        self.replays += 1
        return self._replayed(inputs)

    def record(self) -> None:
        """Record and compare a graph, or set `why`; undo changes, except to gradients."""
        self.why = self._obstacle()
        if self.why:
            return
        before = Snapshot(Walk([self._step]))
        try:
            self.why = self._recorded(before)
        except Exception as error:
            self.why = f"the step can't be recorded: {in_a_line(error)}"
        finally:
            gradients = self._gradients()
            before.restore()
        if self.why:
            self._graph = self._result = None
        else:
            self._bind(gradients)
            self._host = self._numbers()

    def _obstacle(self) -> str:
        types = {one.device.type for one in (*self._inputs, *self._weights())}
        if types != {KIND}:
            where = ", ".join(sorted(types)) or "no device"
            return f"CUDA graphs need inputs and weights on a GPU; these are on {where}"
        for one in self._optimizers:
            has_momentum = any(group.get("momentum") for group in one.param_groups)
            if not one.state and (has_momentum or type(one) is not torch.optim.SGD):
                kind = type(one).__name__
                return f"{kind} makes its state at its first step: call the plain step once before"
        return ""

    def _recorded(self, before: Snapshot) -> str:
        """Record a graph and compare it with plain steps; return the reason to reject it, or ''."""
        for name, why in before.failed.items():
            return f"{name} {why}"
        plain = self._changes(self._step, before)
        control = _apart(self._changes(self._step, before), plain)
        before.restore()
        self._static = [one.detach().clone() for one in self._inputs]
        devices.warm_up_graph(lambda: self._step(*self._static))
        before.restore()
        self._bind(())  # no gradients, so that the graph allocates them in its pool
        self._graph, result = devices.recorded_graph(lambda: self._step(*self._static))
        if not all(isinstance(one, torch.Tensor | None) for one in tree_leaves(result)):
            return "it returns objects other than tensors, which replays can't update"
        # Results are detached: their autograd graph would bind plain steps to the recording stream.
        self._result = tree_map(lambda one: one if one is None else one.detach(), result)
        del result
        found = self._changes(lambda *given: self._replayed(given), before, self._gradients())
        for name, apart in _apart(found, plain).items():
            if not apart <= min(max(ALLOWED_ERROR, NOISE_TIMES * control[name]), MOST_ERROR):
                return f"after {COMPARED} steps its {name} are {apart:.1%} off: {FROZEN}"
        return ""

    def _replayed(self, inputs: Sequence[torch.Tensor]) -> Any:
        with torch.no_grad():
            for static, given in zip(self._static, inputs, strict=True):
                static.copy_(given)
        self._graph.replay()
        return tree_map(lambda one: one if one is None else one.clone(), self._result)

    def _changes(
        self, call: Callable[..., Any], before: Snapshot, gradients: Iterable[Any] | None = None
    ) -> Values:
        """Run COMPARED steps from `before`; return state changes, gradients, last results."""
        before.restore()
        if gradients is not None:
            self._bind(gradients)
        start, result = self._state(), None
        for number in range(COMPARED):
            result = call(*(_varied(one, number) for one in self._inputs))
        changed = {
            name: [one - old for one, old in zip(ones, start[name], strict=True)]
            for name, ones in self._state().items()
        }
        return changed | _copied({"gradients": self._gradients(), "results": tree_leaves(result)})

    def _state(self) -> Values:
        buffers = [one for model in self._models for one in model.buffers()]
        weights, states = self._weights(), self._states()
        return _copied({"weights": weights, "buffers": buffers, "optimizer states": states})

    def _states(self) -> list[Any]:
        states = [state for one in self._optimizers for state in one.state.values()]
        return [value for state in states for value in state.values()]

    def _weights(self) -> list[torch.nn.Parameter]:
        return [one for model in self._models for one in model.parameters()]

    def _gradients(self) -> list[torch.Tensor | None]:
        return [one.grad for one in self._weights()]

    def _bind(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for one, gradient in zip_longest(self._weights(), gradients):
            one.grad = gradient

    def _numbers(self) -> Any:
        """Return the options, state ids, weight addresses and training modes that a graph fixes."""
        groups = [group for one in self._optimizers for group in one.param_groups]
        plain = (int, float, str, tuple, type(None))
        options = [one for group in groups for one in group.values() if isinstance(one, plain)]
        modes = [part.training for model in self._models for part in model.modules()]
        weights, states = (one.data_ptr() for one in self._weights()), map(id, self._states())
        return options, [*states], [*weights], modes


def _kind(inputs: Sequence[Any]) -> Any:
    alike = [(getattr(x, "shape", type(x)), getattr(x, "dtype", None), getattr(x, "device", None))
             for x in inputs]  # fmt: skip
    return alike, torch.is_grad_enabled()


def _copied(groups: Mapping[str, Sequence[Any]]) -> Values:
    """Return copies of each group's tensors, with Booleans as bytes, which can be subtracted."""
    return {
        name: [one.detach().byte() if one.dtype is torch.bool else one.detach().clone()
               for one in ones if isinstance(one, torch.Tensor)]
        for name, ones in groups.items()
    }  # fmt: skip


def _varied(one: torch.Tensor, number: int) -> torch.Tensor:
    if one.is_floating_point() or one.is_complex():
        return (one * (1 + number / 8)).detach()
    return one.roll(number, 0) if one.dim() else one.clone()


def _apart(found: Values, plain: Values) -> dict[str, float]:
    """Return each group's distance relative to its norm in `plain`; inf if not comparable."""
    apart = {}
    for name, ones in plain.items():
        pairs = zip(ones, found[name], strict=False)
        size = sum(float(one.double().square().sum()) for one in ones)
        off = sum(float((one.double() - other).square().sum()) for one, other in pairs)
        is_other = len(ones) != len(found[name]) or (off > 0 and not size)
        apart[name] = math.inf if is_other else math.sqrt(off / (size or 1.0))
    return apart
