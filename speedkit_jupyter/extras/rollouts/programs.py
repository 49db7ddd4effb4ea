"""Rules for the next state, ways to compute steps, and programs, which combine them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from speedkit_jupyter.catalog.model_changes.compiled import compile_alone
from speedkit_jupyter.machines import devices
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean, in_a_line
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.modules import buffer_table

# A function that computes the next state from the operator's result `f(x)` and the state `x`.
StateRule = Callable[[Any, Any], Any]
# Policies with a parameter: functions from the parameter to a StateRule.
WITH_NUMBER: dict[str, Callable[[float], StateRule]] = {
    "convex": lambda alpha: lambda found, x: x + alpha * (found - x),
    "residual": lambda dt: lambda found, x: x + dt * found,
}
POLICIES = ("autoregressive", *WITH_NUMBER)
FORMS = '"autoregressive", ("convex", 0.5), ("residual", 0.01) or a function of f(x) and x'
# The words for ways, in their order in a way's name; the first two need a copy of the operator.
WORDS = ("bf16", "channels_last", "compile", "cuda_graph")
COPIED = WORDS[:2]


@dataclass(frozen=True)
class Way:
    """A way to compute steps: a tuple of WORDS, and the number of samples per call (None: all)."""

    words: tuple[str, ...] = ()
    micro_batch: int | None = None

    def plus(self, more: str) -> Way:
        return replace(self, words=tuple(one for one in WORDS if one in (*self.words, more)))

    @property
    def name(self) -> str:
        part = f", {count(self.micro_batch, 'sample')} at a time" if self.micro_batch else ""
        return ("+".join(self.words) or "plain") + part


def way_of(words: Any, micro_batch: Any) -> Way:
    """Return the Way for a string ("bf16+compile") or a Way. Raises ArgumentError if invalid."""
    if micro_batch is not None:
        arguments.count("micro_batch", micro_batch)
    if isinstance(words, Way):
        return words if micro_batch is None else replace(words, micro_batch=micro_batch)
    if not isinstance(words, str):
        raise ArgumentError(f"way must be words as 'bf16+compile', not {arguments.shown(words)}")
    way = Way((), micro_batch)
    for word in filter(None, words.replace(" ", "").split("+")):
        if word != "plain" and word not in WORDS:
            known = f"plain, {', '.join(WORDS)}"
            raise ArgumentError(f"way: {word!r} is none of {known}.{did_you_mean(word, WORDS)}")
        way = way.plus(word)
    return way


def policy_of(policy: Any) -> StateRule:
    """Return a policy as a function of `f(x)` and `x`. Raises ArgumentError if unknown."""
    if callable(policy):
        return policy  # type: ignore[no-any-return]
    if policy == "autoregressive":
        return lambda found, x: found
    word, *numbers = policy if isinstance(policy, list | tuple) and policy else (policy,)
    if word in WITH_NUMBER and len(numbers) == 1:
        (number,) = numbers
        if isinstance(number, int | float) and math.isfinite(number):
            return WITH_NUMBER[word](number)
    near = did_you_mean(word, POLICIES) if isinstance(word, str) and word not in POLICIES else ""
    raise ArgumentError(f"policy must be {FORMS}, not {arguments.shown(policy)}.{near}")


@contextmanager
def buffers_kept(operator: Any) -> Iterator[None]:
    """Restore buffers, random state and settings after the block: its steps are only trials."""
    modules = operator.modules() if isinstance(operator, torch.nn.Module) else ()
    before = Snapshot(Walk(list(map(buffer_table, modules))))
    try:
        yield
    finally:
        before.restore()


class Program:
    """Run a rollout's steps in a `Way`. Raises ArgumentError if a required copy can't be made."""

    def __init__(self, operator: Callable[..., Any], policy: StateRule, way: Way) -> None:
        self.way = way
        self._dtype = torch.bfloat16 if "bf16" in way.words else None
        known = operator.parameters() if isinstance(operator, torch.nn.Module) else ()
        self.device = next((one.device for one in known), None)
        self._step = self._made(self._prepared(operator), policy)
        self._graphs: dict[Any, tuple[Any, torch.Tensor]] = {}

    def _prepared(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        needed = [word for word in self.way.words if word in COPIED]
        if not needed:
            return operator
        if not isinstance(operator, torch.nn.Module):
            raise ArgumentError(f"{needed[0]} needs a torch.nn.Module; this operator is a function")
        try:
            made = copy.deepcopy(operator)
        except Exception as error:  # an object's own copying may raise anything
            why = f"which can't be made ({in_a_line(error)})"
            raise ArgumentError(f"{needed[0]} needs a copy of the operator, {why}") from None
        if self._dtype is not None:
            made = made.bfloat16()  # not to(dtype), which drops weights' imaginary parts
        if "channels_last" in needed:
            made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return made

    def _made(self, operator: Any, policy: StateRule) -> Callable[[torch.Tensor], torch.Tensor]:
        dtype = self._dtype

        @user_code_boundary
        def step(x: torch.Tensor) -> torch.Tensor:
            found = operator(x if dtype is None else x.to(dtype))
            arguments.of_kind("the operator's result", found, torch.Tensor, optional=False)
            state = policy(found.to(x.dtype), x)
            arguments.of_kind("the policy's result", state, torch.Tensor, optional=False)
            if state.shape != x.shape:
                raise ArgumentError(
                    f"a step changes the shape from {tuple(x.shape)} to {tuple(state.shape)}: give "
                    "a policy, a function of f(x) and x, that keeps the shape"
                )
            return state  # type: ignore[no-any-return]

        return compile_alone(step, dynamic=False) if "compile" in self.way.words else step

    def advance(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        """Return the state `steps` later, with the dtype and device of `x`; `x` is not modified."""
        size = self.way.micro_batch or len(x)
        # Not in inference mode, because the operator may keep tensors that training uses later.
        with torch.no_grad():
            parts = x.split(size) if x.ndim > 1 else [x]
            made = [self._advanced(part, steps).to(x.device, x.dtype) for part in parts]
            return made[0] if len(made) == 1 else torch.cat(made)

    def _advanced(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        # Only the newest state is kept, so that torch's allocator reuses memory of older states.
        # The state starts as a copy, because an operator may write to its input.
        state = x.to(self.device or x.device, non_blocking=True, copy=True)
        if "cuda_graph" not in self.way.words or not state.is_cuda:
            for _ in range(steps):
                state = self._step(state)
            return state
        with torch.cuda.device(state.device):
            graph, buffer = self._graph(state)
        buffer.copy_(state)
        for _ in range(steps):
            graph.replay()
        return buffer.clone()

    def _graph(self, state: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        key = (state.shape, state.dtype, state.device)
        if key not in self._graphs:
            buffer = state.clone()
            devices.warm_up_graph(lambda: self._step(buffer), state.device)
            graph, _ = devices.recorded_graph(lambda: buffer.copy_(self._step(buffer)))
            self._graphs[key] = graph, buffer
        return self._graphs[key]
