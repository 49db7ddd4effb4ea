"""Watch runs of a step: the first runs record a trace of values for comparison with later runs.

Before the first steps of each optimizer, gradients are compared with the trace's gradients, and
then replaced by them. Parameters therefore change alike in every precision, up to rounding. This
matters in Adam's first step, which depends mostly on the signs of gradients.

| run | arithmetic | trace | gradients | ends |
| --- | --- | --- | --- | --- |
| REFERENCE_RUN | the baseline in float64 | begins it | kept | before a step with ready gradients |
| BASELINE_RUN | the baseline's own | completes it | the reference's | after its calls |
| COMPARED_RUN | a variant's, or the baseline's again | – | replaced | after its calls |
| CONTROL_RUN | rounded to a variant's precision | – | replaced | when comparisons end |
| LED_CONTROL_RUN | rounded as well | – | none: parameters get the trace's values | as above |
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
    leaves,
)
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.watching import Watcher, unwatched
from speedkit_jupyter.torchglue.storage import is_in_memory, plain

# Gradients are compared and replaced in this many steps of each optimizer: one from the user's
# state, and one from the state after it. Each step adds a copy of the parameters to the trace.
FOLLOWED = 2
CACHE = "past_key_values"
# Keyword arguments with these words in their names hold no tokens, and are not compared.
MASKS = re.compile(f"mask|{CACHE}|cache|position")


@dataclass(frozen=True)
class RunKind:
    """Describe how an observed run uses the trace, and when the run ends."""

    extends: bool = False  # True if the run adds to the trace
    ends_early: bool = False  # True if the run ends when no more values are compared
    stops_at_step: bool = False  # True if the run ends before a step with ready gradients
    led: bool = False  # True if parameters get the trace's values, and optimizers no gradients


REFERENCE_RUN = RunKind(extends=True, ends_early=True, stops_at_step=True)
BASELINE_RUN = RunKind(extends=True)
COMPARED_RUN = RunKind()
CONTROL_RUN = RunKind(ends_early=True)
LED_CONTROL_RUN = RunKind(ends_early=True, led=True)


class Enough(BaseException):
    """Raised to end a step early; a BaseException, so that `except Exception` doesn't catch it."""


@dataclass
class Observer(Watcher):
    """Compare a step with a trace: fill `run` and, if `kind.extends`, extend the trace.

    Gradients are first set to zero in place; the caller restores them.
    """

    step: Step
    kind: RunKind
    trace: dict[Key, Look]
    scale: Callable[[], float]  # returns the current loss scale
    loss_is_scaled: bool = False  # True if the step scales the loss itself
    run: ObservedRun = field(default_factory=ObservedRun)

    def __post_init__(self) -> None:
        # The current place in the step.
        self._calls = 0  # model calls since the last optimizer step or the start of the step's call
        self._depth = 0  # depth of nested optimizer steps
        self._within = 0  # number of optimizer steps inside the current backward pass
        self._tag = ""  # names an optimizer in a backward pass by its first parameter
        self._in_backward = self._in_closure = False
        # The comparisons that are still possible.
        self._led = self.kind.led  # False once a closure computes gradients
        self._is_fresh = False  # True if new gradients have not been compared yet
        self._is_free = False  # True if an optimizer began more than FOLLOWED steps
        self._drifts = False  # True if gradients that were not replaced may have moved parameters
        self._steps_taken = Counter[int]()  # by optimizer
        self._stepped = set[str]()  # parameters changed by optimizers in this call
        self._names: dict[int, str] = {}
        self._parameters: Values = {}
        for name, parameter in self._all("parameters").items():
            self._name(parameter, name)
        for parameter in parameters_of([*self.step.optimizers, *self.step.bystanders]):
            self._name(parameter)
        self._numbers: Counter[tuple[int, int, str, str]] = Counter()
        held = (self._parameters | self._all("buffers")) if self.kind.extends else {}
        # Changes are measured from the initial buffers, and from the parameters compared last.
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
        self._calls += 1
        # Compare the first eight calls after an optimizer step, then calls 16, 32 and so on,
        # because text generation makes thousands of calls.
        is_compared = self._calls <= 8 or not self._calls & (self._calls - 1)
        if self._is_free or self.run.diverged or not is_compared:
            return
        # Integer inputs that differ are tokens that the step fed back, unlike masks and positions.
        named = {name: value for name, value in kwargs.items() if not MASKS.search(name)}
        given = {n: v for n, v in leaves([args, named]).items() if is_exact(v)}
        self.run.diverged = any(row.count or not row.fits for row in self._look("given", given))
        if not self.run.diverged:
            # Plans may store keys and values in another shape; later outputs depend on all of them.
            found = leaves(result, "output").items()
            self._look("output", {n: v for n, v in found if CACHE not in n})

    @unwatched
    def before_backward(self, tensors: Any) -> None:
        self._in_backward = True
        if not self._is_free:
            divisor = self.scale() if self.loss_is_scaled else 1.0
            self._look("output", _divided(leaves(tensors, "loss"), divisor), "loss")

    @unwatched
    def after_backward(self) -> None:
        self._in_backward = False
        self._is_fresh = True
        self.run.steps += self._within
        self._within, self._tag = 0, ""
        if self._in_closure and not self._is_free:
            self._gradients(self._parameters.values(), 1.0, replace=True)
            self._in_closure = False
        elif self._depth:  # a repeated evaluation of a closure
            self._drifts = True
        if self._is_free and self.kind.ends_early:
            raise Enough

    @unwatched
    def differentiated(self, gradients: Any) -> None:
        if not self._is_free:
            self._look("gradient", leaves(gradients, "autograd.grad"))

    @unwatched
    def before_zero_grad(self) -> None:
        if self._is_fresh and not self._is_free:
            self._gradients(self._parameters.values(), self.scale())

    @unwatched
    def before_step(self, optimizer: Any, with_closure: bool) -> None:
        self._depth += 1
        if self._depth > 1:  # a nested step, such as super().step()
            return
        self._steps_taken[id(optimizer)] += 1
        self._is_free = self._is_free or self._steps_taken[id(optimizer)] > FOLLOWED
        own = parameters_of([optimizer])
        names = [self._name(parameter) for parameter in own]
        # Inside a backward pass, optimizers step in any order: a parameter identifies an optimizer.
        self._tag = names[0] if self._in_backward and own else ""
        if self._is_free:
            if self.kind.ends_early and not self._in_backward:
                raise Enough
            return
        self._stepped |= set(names)
        # A closure after a backward pass counts as empty, as in Lightning's manual optimization.
        self._in_closure = with_closure and not self._is_fresh and not self._in_backward
        self._led = self._led and not self._in_closure  # closures need gradients
        if not self._in_closure:
            # Fused optimizers unscale gradients; for other optimizers, the GradScaler has done so.
            still_in = getattr(optimizer, "grad_scale", None)
            self._gradients(own, 1.0 if still_in is None else float(still_in), replace=True)
            if self.kind.stops_at_step and not self._in_backward:
                raise Enough

    @unwatched
    def after_step(self, optimizer: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._in_backward:
            self._within += 1
        else:
            self.run.steps += 1
            self._calls = 0
        self._in_closure = False
        if self._is_free:
            return
        own = {self._name(p): p for p in parameters_of([optimizer])}
        self._moves("parameter", own, led=self._led)
        self._moves("buffer", self._all("buffers"))

    @unwatched
    def step_ended(self, results: Sequence[Any] | Mapping[str, Any]) -> None:
        """End a call of the step: compare its results, its last gradients and the state."""
        self.before_zero_grad()
        kind = "result" if self._is_free else "output"
        self._look(kind, leaves(results, "result"), "result")
        if self.run.diverged:  # the result's numbers follow from other tokens, not from rounding
            own = {place: row for place, row in self.run.rows.items() if place[0] == self._key}
            numbers = {place: row for place, row in own.items() if row.error is not None}
            self.run.rows |= {p: replace(row, kind="result") for p, row in numbers.items()}
        if not self._is_free:
            rest = {n: p for n, p in self._parameters.items() if n not in self._stepped}
            self._drifts = self._moves("moved", rest) or self._drifts
            self._moves("buffer", self._all("buffers"))
        self.run.ends.append(self.run.steps)
        self._calls, self._stepped = 0, set()

    @property
    def is_done(self) -> bool:
        """Return whether another call would show nothing new, or start from rounded state."""
        is_last = any(taken >= FOLLOWED for taken in self._steps_taken.values())
        return self._is_free or self._drifts or is_last

    def _gradients(self, parameters: Iterable[Any], scale: float, replace: bool = False) -> None:
        self._is_fresh, parameters = False, list(parameters)
        gradients = {self._name(p): self._gradient(p) for p in parameters}
        values = {n: None if one is None else plain(one) for n, one in gradients.items()}
        self._look("gradient", _divided(values, scale))
        if replace and self._led:
            for parameter in parameters:
                parameter.grad = None
            return
        expected = self.trace[self._key].values if replace and self._key in self.trace else {}
        for name, gradient in gradients.items():
            value = expected.get(name)
            # A DTensor's `value` is only this process's shard.
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
        """Extend the trace or, if `led`, copy it to `found`; record and return the differences."""
        moment = (len(self.run.ends), self.run.steps, kind, tag or self._tag)
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
        """Return a Look with copies (floats become float32), and with norms of state changes."""
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


def _copy(value: Any) -> Any:
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True)


def _divided(values: Values, divisor: float) -> Values:
    if divisor == 1.0:
        return values
    return {n: value / divisor if hasattr(value, "numel") else value for n, value in values.items()}
