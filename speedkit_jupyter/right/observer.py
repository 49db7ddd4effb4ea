"""Watch steps: the first run records a trace of values, and later runs are compared with it.

A compared run yields a few numbers per tensor. Before the first steps of each optimizer, gradients
are compared and then replaced by the trace's. Parameters thus move equally in every precision, up
to rounding, even in Adam's first steps, which depend only on the signs of gradients.

| run | arithmetic | trace | gradients | ends |
| --- | --- | --- | --- | --- |
| REFERENCE_RUN | the baseline in float64 | begins it | kept | before an optimizer's first step |
| BASELINE_RUN | the baseline's own | completes it | the reference's | after its calls |
| COMPARED_RUN | a variant's, the baseline's again | – | replaced | after its calls |
| CONTROL_RUN | rounded to a variant's precision | – | replaced | when comparisons end |
| LED_CONTROL_RUN | rounded as well | – | none: parameters are set | when comparisons end |
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from speedkit_jupyter.right import deviations
from speedkit_jupyter.right.reference import parameters_of
from speedkit_jupyter.right.trace import (
    MOVES,
    Key,
    Look,
    ObservedDifference,
    ObservedRun,
    Values,
    compared,
    is_exact,
)
from speedkit_jupyter.right.values import leaves
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.watching import Watcher, unwatched
from speedkit_jupyter.torchglue.storage import is_in_memory, plain

# Gradients are compared and replaced in this many steps of each optimizer: the first starts from
# the user's state, the second from the first step's. The trace has as many copies of parameters.
FOLLOWED = 2
CACHE = "past_key_values"
# Arguments that hold no tokens.
MASKS = re.compile(f"mask|{CACHE}|cache|position")


@dataclass(frozen=True)
class RunKind:
    """The effect of an observed run on the trace, and its end."""

    extends: bool = False  # True if the run adds to the trace
    ends_early: bool = False  # ends once no more values are compared,
    stops_at_step: bool = False  # or before the first step of an optimizer
    led: bool = False  # optimizers get no gradients, and parameters are set to the trace's


REFERENCE_RUN = RunKind(extends=True, ends_early=True, stops_at_step=True)
BASELINE_RUN = RunKind(extends=True)
COMPARED_RUN = RunKind()
CONTROL_RUN = RunKind(ends_early=True)
LED_CONTROL_RUN = RunKind(ends_early=True, led=True)


class Enough(BaseException):
    """Ends a step early; a BaseException, so that the user's code doesn't catch it."""


@dataclass
class StepPosition:
    """The current place in the step."""

    calls: int = 0  # number of model calls since the last optimizer step
    depth: int = 0  # depth of nested optimizer steps
    within: int = 0  # number of optimizer steps inside the current backward pass
    tag: str = ""  # the optimizer that steps inside a backward pass, by its first parameter
    in_backward: bool = False
    in_closure: bool = False


@dataclass
class ComparisonState:
    """The comparisons that are still possible."""

    led: bool  # as in RunKind, until parameters have changed
    is_fresh: bool = False  # True if gradients were not compared yet
    is_free: bool = False  # True if an optimizer made more steps than are followed
    drifts: bool = False  # True if parameters were changed by gradients that were not replaced
    steps_taken: Counter[int] = field(default_factory=Counter)  # by optimizer
    stepped: set[str] = field(default_factory=set)  # parameters changed by optimizers in this call


@dataclass
class Observer(Watcher):
    """Compare a step with a trace. Gradients are cleared first; the caller restores them."""

    step: Step
    kind: RunKind
    trace: dict[Key, Look]
    scale: Callable[[], float]  # returns the current loss scale
    loss_is_scaled: bool = False  # True if the step scales the loss itself
    run: ObservedRun = field(default_factory=ObservedRun)

    def __post_init__(self) -> None:
        self._at, self._state = StepPosition(), ComparisonState(self.kind.led)
        self._names: dict[int, str] = {}
        self._parameters: Values = {}
        for name, parameter in self._all("parameters").items():
            self._name(parameter, name)
        for parameter in parameters_of([*self.step.optimizers, *self.step.bystanders]):
            self._name(parameter)
        self._numbers: Counter[tuple[int, int, str, str]] = Counter()
        held = (self._parameters | self._all("buffers")) if self.kind.extends else {}
        # If the trace is extended: parameters before an optimizer step, and other initial state.
        self._seen = {n: _copy(v) for n, one in held.items() if (v := plain(one)) is not None}
        for gradient in map(self._gradient, self._parameters.values()):
            if gradient is not None and is_in_memory(gradient):
                gradient.detach().zero_()

    def _all(self, kind: str) -> Values:
        models = self.step.models
        names = self.step.model_names if len(models) > 1 else [""]
        return {
            f"{prefix}.{name}" if prefix else name: value
            for prefix, model in zip(names, models, strict=True)
            for name, value in getattr(model, f"named_{kind}")()
        }

    def _name(self, parameter: Any, name: str = "") -> str:
        name = self._names.setdefault(id(parameter), name or f"parameter {len(self._names) + 1}")
        self._parameters[name] = parameter
        return name

    @unwatched
    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        self._at.calls += 1
        # The first calls after an optimizer step, then whenever their number has doubled:
        # text generation makes thousands of calls.
        calls = self._at.calls
        is_compared = calls <= 8 or not calls & (calls - 1)
        if self._state.is_free or self.run.diverged or not is_compared:
            return
        given = {n: v for n, v in _tokens(args, kwargs).items() if is_exact(v)}
        self.run.diverged = any(row.count or not row.fits for row in self._look("given", given))
        if not self.run.diverged:
            # Plans may store keys and values in another shape; later outputs depend on all of them.
            found = leaves(result, "output").items()
            self._look("output", {n: v for n, v in found if CACHE not in n})

    @unwatched
    def before_backward(self, tensors: Any) -> None:
        self._at.in_backward = True
        if not self._state.is_free:
            divisor = self.scale() if self.loss_is_scaled else 1.0
            self._look("output", _divided(leaves(tensors, "loss"), divisor), "loss")

    @unwatched
    def after_backward(self) -> None:
        self._at.in_backward = False
        self._state.is_fresh = True
        self.run.steps += self._at.within
        self._at.within, self._at.tag = 0, ""
        if self._at.in_closure and not self._state.is_free:
            self._gradients(self._parameters.values(), 1.0, replace=True)
            self._at.in_closure = False
        elif self._at.depth:  # a repeated evaluation of a closure
            self._state.drifts = True
        if self._state.is_free and self.kind.ends_early:
            raise Enough

    @unwatched
    def differentiated(self, gradients: Any) -> None:
        if not self._state.is_free:
            self._look("gradient", leaves(gradients, "autograd.grad"))

    @unwatched
    def before_zero_grad(self) -> None:
        if self._state.is_fresh and not self._state.is_free:
            self._gradients(self._parameters.values(), self.scale())

    @unwatched
    def before_step(self, optimizer: Any, with_closure: bool) -> None:
        self._at.depth += 1
        if self._at.depth > 1:  # the step of its base class
            return
        at, state = self._at, self._state
        state.steps_taken[id(optimizer)] += 1
        state.is_free = state.is_free or state.steps_taken[id(optimizer)] > FOLLOWED
        own = parameters_of([optimizer])
        names = [self._name(parameter) for parameter in own]
        # In the backward pass, parameters get their gradients in any order.
        at.tag = names[0] if at.in_backward and own else ""
        if state.is_free:
            if self.kind.ends_early and not at.in_backward:
                raise Enough
            return
        state.stepped |= set(names)
        # A closure after a backward pass computes no gradients, as in Lightning.
        at.in_closure = with_closure and not state.is_fresh and not at.in_backward
        state.led = state.led and not at.in_closure  # parameters have changed
        if not at.in_closure:
            # Fused optimizers unscale gradients themselves; for others they are unscaled already.
            still_in = getattr(optimizer, "grad_scale", None)
            self._gradients(own, 1.0 if still_in is None else float(still_in), replace=True)
            if self.kind.stops_at_step and not at.in_backward:
                raise Enough

    @unwatched
    def after_step(self, optimizer: Any) -> None:
        self._at.depth -= 1
        if self._at.depth:
            return
        if self._at.in_backward:
            self._at.within += 1
        else:
            self.run.steps += 1
            self._at.calls = 0
        self._at.in_closure = False
        if self._state.is_free:
            return
        own = {self._name(p): p for p in parameters_of([optimizer])}
        self._moves("parameter", own, led=self._state.led)
        self._moves("buffer", self._all("buffers"))

    @unwatched
    def step_ended(self, results: Sequence[Any] | Mapping[str, Any]) -> None:
        """Compare the results of a call: its return value, or values by name."""
        self.before_zero_grad()
        kind = "result" if self._state.is_free else "output"
        self._look(kind, leaves(results, "result"), "result")
        if self.run.diverged:  # from here on numbers follow from other tokens, not from rounding
            own = {place: row for place, row in self.run.rows.items() if place[0] == self._key}
            numbers = {place: row for place, row in own.items() if row.error is not None}
            self.run.rows |= {p: replace(row, kind="result") for p, row in numbers.items()}
        if not self._state.is_free:
            rest = {n: p for n, p in self._parameters.items() if n not in self._state.stepped}
            self._state.drifts = self._moves("moved", rest) or self._state.drifts
            self._moves("buffer", self._all("buffers"))
        self.run.ends.append(self.run.steps)
        self._at.calls, self._state.stepped = 0, set()

    @property
    def is_done(self) -> bool:
        """Return whether another call would show nothing new, or start from rounded state."""
        state = self._state
        is_last = any(taken >= FOLLOWED for taken in state.steps_taken.values())
        return state.is_free or state.drifts or is_last

    def _gradients(self, parameters: Iterable[Any], scale: float, replace: bool = False) -> None:
        self._state.is_fresh, parameters = False, list(parameters)
        gradients = {self._name(p): self._gradient(p) for p in parameters}
        values = {n: None if one is None else plain(one) for n, one in gradients.items()}
        self._look("gradient", _divided(values, scale))
        if replace and self._state.led:
            for parameter in parameters:
                parameter.grad = None
            return
        expected = self.trace[self._key].values if replace and self._key in self.trace else {}
        for name, gradient in gradients.items():
            value = expected.get(name)
            # This process has only a shard of the gradient.
            own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            is_plain = type(own) is torch.Tensor and own.layout is torch.strided
            if value is not None and is_plain and own.numel() == value.numel():
                own.copy_((value if scale == 1.0 else value * scale).view_as(own))

    def _gradient(self, parameter: Any) -> Any:
        has_one = parameter.is_leaf or parameter.retains_grad
        return parameter.grad if has_one and id(parameter) not in self.step.unread else None

    def _moves(self, kind: str, holders: Values, led: bool = False) -> bool:
        known = {n: value for n, one in holders.items() if (value := plain(one)) is not None}
        self._look(kind, known, led=led)
        look = self.trace.get(self._key)
        return look is not None and any(look.ways.values())

    def _look(
        self, kind: str, found: Values, tag: str = "", led: bool = False
    ) -> Iterable[ObservedDifference]:
        """Compare values with the trace, or add them; if `led`, write the trace's values first."""
        moment = (len(self.run.ends), self.run.steps, kind, tag or self._at.tag)
        self._numbers[moment] += 1
        key = self._key = (*moment, self._numbers[moment])
        look = self.trace.get(key)
        if look is None and self.kind.extends:
            self.trace[key], look = self._stored(kind, found), Look(found)
        for name, value in look.values.items() if led and look is not None else ():
            if name in found and found[name].shape == value.shape:
                found[name].copy_(value)
        rows = compared(kind, found, look)
        self.run.rows |= {(key, name): row for name, row in rows.items()}
        return rows.values()

    def _stored(self, kind: str, found: Values) -> Look:
        """Return copies in float32, which is far more precise than the relevant differences."""
        values, moved = dict(found), dict[str, Any]()
        for name, value in found.items():
            if value is None or isinstance(value, str):
                continue
            values[name] = kept = _copy(value)
            if kind in MOVES and not is_exact(kept):
                seen = self._seen.get(name)
                moved[name] = kept, None if seen is None or seen.shape != kept.shape else seen
                self._seen |= {name: kept} if kind == "parameter" else {}
        ways = zip(moved, deviations.sums([*moved.values()]), strict=True)
        return Look(values, {name: math.sqrt(way.off) for name, way in ways})


def _tokens(args: Any, kwargs: Mapping[str, Any]) -> Values:
    """Return what a step may feed back: a plan's cache may have its own masks and positions."""
    named = {name: value for name, value in kwargs.items() if not MASKS.search(name)}
    return leaves([args, named])


def _copy(value: Any) -> Any:
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True)


def _divided(values: Values, divisor: float) -> Values:
    if divisor == 1.0:
        return values
    return {n: value / divisor if hasattr(value, "numel") else value for n, value in values.items()}
