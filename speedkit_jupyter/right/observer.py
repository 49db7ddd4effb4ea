"""Watch steps: the first run leaves a trace of values, every later run is compared with it.

A compared run leaves a few numbers for each tensor. Before each of an optimizer's first steps its
gradients are compared and replaced by the trace's: then parameters go the same way in every
precision, up to rounding, also by Adam's first steps, which are signs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from speedkit_jupyter.right import tolerance
from speedkit_jupyter.right.reference import parameters_of
from speedkit_jupyter.right.tolerance import Deviation, Sums
from speedkit_jupyter.right.values import leaves
from speedkit_jupyter.step.watching import Watcher, unwatched
from speedkit_jupyter.torchglue.storage import is_in_memory, plain

# Gradients are compared and replaced in this many steps of each optimizer: the first meets the
# user's state, the second the first one's. The trace holds as many copies of the parameters.
FOLLOWED = 2
# Kinds of looks at moved values: parameters by optimizers or otherwise, and buffers.
MOVES = ("parameter", "moved", "buffer")

# A moment of a step: the call, optimizer steps until then, kind of look, tag, number.
Key = tuple[int, int, str, str, int]
Values = dict[str, Any]


@dataclass
class Look:
    """The values at one moment; `ways` are how far parameters and buffers went before it."""

    values: Values
    ways: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ObservedDifference:
    """The difference of a value from the trace's; `fits` unless it is missing or has another shape.

    `error` belongs to floating-point numbers. `count` integers differ, by `most` at most, where the
    trace's largest is `largest`. Text has no size. Of a kind `result`, after more optimizer steps
    than are followed, only the form is compared.
    """

    kind: str
    size: int = 0
    fits: bool = True
    dtype: str = ""
    sums: Sums = field(default_factory=lambda: Sums(0))
    error: Deviation | None = None
    count: int = 0
    most: float = 0.0
    largest: float = 0.0
    is_finite: bool = True


@dataclass
class ObservedRun:
    """The differences of a few calls of the step.

    `steps` counts the optimizers' steps, `ends` are the counts at the end of each call. A run has
    `diverged` if a model was given other integers than in the trace: a step feeds back its tokens.
    """

    rows: dict[tuple[Key, str], ObservedDifference] = field(default_factory=dict)
    steps: int = 0
    ends: list[int] = field(default_factory=list)
    diverged: bool = False

    @cached_property
    def latest(self) -> dict[tuple[str, str], ObservedDifference]:
        """Return the last row of each kind and name. The value is cached: read it after the run."""
        return {(row.kind, name): row for (_, name), row in self.rows.items() if row.fits}


class Enough(BaseException):
    """End a step early. It is a BaseException, so that the user's code doesn't catch it."""


@dataclass
class Observer(Watcher):
    """Compare a step with a trace. Gradients are cleared first; the caller puts them back."""

    models: Sequence[Any]
    others: Sequence[Any]  # parameters outside of the models
    trace: dict[Key, Look]
    scale: Callable[[], float]  # returns the loss scale in force
    model_names: Sequence[str]
    loss_is_scaled: bool = False  # by the step itself
    extends: bool = False  # adds to the trace
    ends_early: bool = False  # raises `Enough` once nothing more is compared with values,
    stops_at_step: bool = False  # or before the first step of an optimizer
    led: bool = False  # optimizers get no gradients, and parameters go where the trace's went
    unread: Collection[int] = ()  # ids of parameters without gradients that count
    run: ObservedRun = field(default_factory=ObservedRun)

    def __post_init__(self) -> None:
        self._names: dict[int, str] = {}
        self._parameters: Values = {}
        for name, parameter in self._all("parameters").items():
            self._name(parameter, name)
        for parameter in self.others:
            self._name(parameter)
        self._taken: Counter[int] = Counter()  # steps of each optimizer
        self._stepped: set[str] = set()  # parameters that optimizers moved in the call
        self._calls = 0  # of models
        self._depth = 0  # of an optimizer's step within its parent class's
        self._within = 0  # steps in a backward pass
        self._numbers: Counter[tuple[int, int, str, str]] = Counter()
        self._tag = ""
        self._is_fresh = False  # no look has seen the gradients
        self._is_free = False  # an optimizer made more steps than are followed
        self._in_backward = self._in_closure = False
        self._drifts = False  # parameters moved by gradients that were not replaced
        held = (self._parameters | self._all("buffers")) if self.extends else {}
        # If the trace is extended: parameters before an optimizer's step, other state at first.
        self._seen = {n: _copy(v) for n, one in held.items() if (v := plain(one)) is not None}
        for gradient in map(self._gradient, self._parameters.values()):
            if gradient is not None and is_in_memory(gradient):
                gradient.detach().zero_()

    def _all(self, kind: str) -> Values:
        return {
            f"{prefix}.{name}" if len(self.models) > 1 else name: value
            for prefix, model in zip(self.model_names, self.models, strict=True)
            for name, value in getattr(model, f"named_{kind}")()
        }

    def _name(self, parameter: Any, name: str = "") -> str:
        name = self._names.setdefault(id(parameter), name or f"parameter {len(self._names) + 1}")
        self._parameters[name] = parameter
        return name

    @unwatched
    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        self._calls += 1
        # The first calls after an optimizer step, then each time their number has doubled: a loop
        # that generates text makes thousands.
        is_compared = self._calls <= 8 or not self._calls & (self._calls - 1)
        if self._is_free or self.run.diverged or not is_compared:
            return
        given = {n: v for n, v in leaves([args, kwargs]).items() if _is_exact(v)}
        self.run.diverged = any(row.count or not row.fits for row in self._look("given", given))
        if not self.run.diverged:
            self._look("output", leaves(result, "output"))

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
        self.run.steps, self._within, self._tag = self.run.steps + self._within, 0, ""
        if self._in_closure and not self._is_free:
            self._gradients(self._parameters.values(), 1.0, replace=True)
            self._in_closure = False
        elif self._depth:  # a closure that is evaluated again
            self._drifts = True
        if self._is_free and self.ends_early:
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
        if self._depth > 1:  # the step of its parent class
            return
        self._taken[id(optimizer)] += 1
        self._is_free = self._is_free or self._taken[id(optimizer)] > FOLLOWED
        own = parameters_of([optimizer])
        names = [self._name(parameter) for parameter in own]
        # Within the backward pass parameters get their gradients in any order.
        self._tag = names[0] if self._in_backward and own else ""
        if self._is_free:
            if self.ends_early and not self._in_backward:
                raise Enough
            return
        self._stepped |= set(names)
        # A closure after a backward pass makes none of the gradients: Lightning's does nothing.
        self._in_closure = with_closure and not self._is_fresh and not self._in_backward
        self.led = self.led and not self._in_closure  # evaluated again, it meets moved parameters
        if not self._in_closure:
            # A fused optimizer is handed the scale, for every other it is taken out before.
            still_in = getattr(optimizer, "grad_scale", None)
            self._gradients(own, 1.0 if still_in is None else float(still_in), replace=True)
            if self.stops_at_step and not self._in_backward:
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
        self._moves("parameter", own, led=self.led)
        self._moves("buffer", self._all("buffers"))

    @unwatched
    def step_ended(self, results: Sequence[Any] | Mapping[str, Any]) -> None:
        """Look at the results of a call: its return value, or values by name."""
        self.before_zero_grad()
        kind = "result" if self._is_free else "output"
        self._look(kind, leaves(results, "result"), "result")
        if not self._is_free:
            rest = {n: p for n, p in self._parameters.items() if n not in self._stepped}
            self._drifts = self._moves("moved", rest) or self._drifts
            self._moves("buffer", self._all("buffers"))
        self.run.ends.append(self.run.steps)
        self._calls, self._stepped = 0, set()

    @property
    def is_done(self) -> bool:
        """Return whether another call would show nothing new, or begin where rounding led."""
        return self._is_free or self._drifts or any(n >= FOLLOWED for n in self._taken.values())

    def _gradients(self, parameters: Iterable[Any], scale: float, replace: bool = False) -> None:
        self._is_fresh, parameters = False, list(parameters)
        gradients = {self._name(p): self._gradient(p) for p in parameters}
        values = {n: None if one is None else plain(one) for n, one in gradients.items()}
        self._look("gradient", _divided(values, scale))
        if replace and self.led:
            for parameter in parameters:
                parameter.grad = None
            return
        expected = self.trace[self._key].values if replace and self._key in self.trace else {}
        for name, gradient in gradients.items():
            value = expected.get(name)
            # This process has only a part of a sharded gradient.
            own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            is_plain = type(own) is torch.Tensor and own.layout is torch.strided
            if value is not None and is_plain and own.numel() == value.numel():
                own.copy_((value if scale == 1.0 else value * scale).view_as(own))

    def _gradient(self, parameter: Any) -> Any:
        counts = id(parameter) not in self.unread and (parameter.is_leaf or parameter.retains_grad)
        return parameter.grad if counts else None

    def _moves(self, kind: str, holders: Values, led: bool = False) -> bool:
        known = {n: value for n, one in holders.items() if (value := plain(one)) is not None}
        self._look(kind, known, led=led)
        look = self.trace.get(self._key)
        return look is not None and any(look.ways.values())

    def _look(
        self, kind: str, found: Values, tag: str = "", led: bool = False
    ) -> Iterable[ObservedDifference]:
        """Compare with the trace, or add to it; if `led`, write the trace's values first."""
        moment = (len(self.run.ends), self.run.steps, kind, tag or self._tag)
        self._numbers[moment] += 1
        key = self._key = (*moment, self._numbers[moment])
        look = self.trace.get(key)
        if look is None and self.extends:
            self.trace[key], look = self._stored(kind, found), Look(found)
        for name, value in look.values.items() if led and look is not None else ():
            if name in found and found[name].shape == value.shape:
                found[name].copy_(value)
        rows = _compared(kind, found, look)
        self.run.rows |= {(key, name): row for name, row in rows.items()}
        return rows.values()

    def _stored(self, kind: str, found: Values) -> Look:
        """Return copies in float32, which is far finer than the differences that count."""
        values, moved = dict(found), dict[str, Any]()
        for name, value in found.items():
            if value is None or isinstance(value, str):
                continue
            values[name] = kept = _copy(value)
            if kind in MOVES and not _is_exact(kept):
                seen = self._seen.get(name)
                moved[name] = kept, None if seen is None or seen.shape != kept.shape else seen
                self._seen |= {name: kept} if kind == "parameter" else {}
        ways = zip(moved, tolerance.sums([*moved.values()]), strict=True)
        return Look(values, {name: math.sqrt(way.off) for name, way in ways})


def _copy(value: Any) -> Any:
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True)


def _compared(kind: str, found: Values, look: Look | None) -> dict[str, ObservedDifference]:
    expected = found if look is None else look.values
    rows, pairs = dict[str, ObservedDifference](), dict[str, Any]()
    for name in {**expected, **found}:
        mine, theirs = found.get(name), expected.get(name)
        is_known = look is not None and name in found and name in expected
        rows[name] = _form(kind, mine, theirs, is_known)
        if rows[name].fits and _are_floating(mine, theirs):
            pairs[name] = mine, theirs
    parts = dict(zip(pairs, tolerance.sums(list(pairs.values())), strict=True))
    for name, way in (look.ways if look is not None else {}).items():
        if name in parts:
            parts[name] = parts[name].along(way, pairs[name][0].dtype)
    every = list(parts.values())
    # A value that hardly moves, as the mean of a zero, is compared with the ways of the others.
    together = kind == "gradient" or kind in MOVES
    errors = tolerance.of_gradients(parts) if together else [part.deviation() for part in every]
    for (name, (mine, theirs)), part, error in zip(pairs.items(), every, errors, strict=True):
        is_own = mine is theirs and mine is not None and mine.numel()  # others may be masks
        # A sum is far cheaper than to ask of each element.
        of_own = (bool(check.isfinite().any()) for check in (mine.sum(), mine)) if is_own else ()
        is_finite = any(of_own) if is_own else math.isfinite(part.off)
        rows[name] = replace(rows[name], sums=part, error=error, is_finite=is_finite)
    if kind == "gradient" and len(parts) > 1:
        whole = tolerance.total(every)
        error = whole.deviation(tolerance.LEAST_GRADIENT)
        rows[""] = ObservedDifference("gradients", whole.size, error=error)
    return rows


def _form(kind: str, mine: Any, theirs: Any, is_known: bool) -> ObservedDifference:
    """Compare shapes, text and integers; floating-point numbers are reduced together later."""
    if isinstance(mine, str) or isinstance(theirs, str):  # their number may be by chance
        return ObservedDifference(kind, count=int(mine != theirs))
    tensors = [one for one in (mine, theirs) if one is not None]
    size = max((tensor.numel() for tensor in tensors), default=1)
    fits = is_known and len({tensor.shape for tensor in tensors}) < 2
    row = ObservedDifference(kind, size, fits, str(getattr(mine, "dtype", "")))
    if not (fits and size and any(map(_is_exact, tensors))):
        return row
    off = (mine.to(theirs.device).double() - theirs.double()).abs()
    largest = float(theirs.double().abs().max())
    return replace(row, count=int((off > 0).sum()), most=float(off.max()), largest=largest)


def _are_floating(*values: Any) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and not any(isinstance(one, str) or _is_exact(one) for one in known)


def _is_exact(value: Any) -> bool:
    is_tensor = value is not None and not isinstance(value, str)
    return is_tensor and not (value.is_floating_point() or value.is_complex())


def _divided(values: Values, divisor: float) -> Values:
    if divisor == 1.0:
        return values
    return {n: value / divisor if hasattr(value, "numel") else value for n, value in values.items()}
