"""Watches steps: the first run leaves a trace of values, every other one is compared with it.

Nothing is kept of a run that is compared but a few numbers a tensor. Before each of an optimizer's
first steps the gradients are compared, and then the trace's are put in their place: so the
parameters go the same way in every precision, up to rounding, and what the optimizer does with the
same gradients is compared sharply, Adam's first steps too, which are those of signs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.deviations import (
    LEAST_GRADIENT,
    Deviation,
    Sums,
    of_gradients,
    sums,
)
from speedkit_jupyter.measure.checks.values import Leaves, plain
from speedkit_jupyter.measure.checks.watching import Watcher, unwatched, watching
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

# Steps of each optimizer whose gradients are compared and replaced: the first meets the state that
# the user has, the second what the first left. The trace holds as many copies of the parameters.
FOLLOWED = 2
# Model calls that are compared between two optimizer steps, the first ones and each that follows
# as many as all before: a loop that generates text makes thousands.
FIRST_CALLS = 8
# Kinds of looks at what a step moves: parameters by optimizers or otherwise, and buffers.
MOVES = ("parameter", "moved", "buffer")
# A parameter that is off by so many roundings of its dtype is where it should be.
STORED = 4.0


@dataclass
class Look:
    """What was seen at one moment: its `kind`, where in the step, and the values by name.

    `ways` are how far parameters and buffers went since they were seen before.
    """

    kind: str
    place: str
    values: Leaves
    ways: dict[str, float] = field(default_factory=dict)


@dataclass
class Seen:
    """How far a look is off the trace's, tensor by tensor; `fits` unless names or shapes differ.

    `integers` are how many elements differ, of how many, by how much at most, and the largest of
    the trace; `words` the names of those that differ; `dtypes` those of its numbers. After more
    optimizer steps than are followed only its form is compared, which `is_free` says.
    """

    kind: str
    place: str
    errors: dict[str, Deviation] = field(default_factory=dict)
    integers: dict[str, tuple[int, int, float, float]] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    whole: Sums = field(default_factory=lambda: Sums(0))
    fits: bool = True
    is_finite: bool = True
    is_free: bool = False

    @property
    def pooled(self) -> Deviation:
        """All numbers of the look together."""
        return self.whole.deviation(LEAST_GRADIENT if self.kind == "gradient" else 0.0)


@dataclass
class Run:
    """What a few steps showed, look by look; `steps` counts those of optimizers, and `ends` are the
    counts at the end of each call.

    `diverged` is whether a model was called with other integers than in the trace, as where a step
    feeds its own tokens back; `unknown` names what could not be compared.
    """

    looks: dict[str, Seen] = field(default_factory=dict)
    steps: int = 0
    ends: list[int] = field(default_factory=list)
    diverged: bool = False
    unknown: list[str] = field(default_factory=list)


class Enough(BaseException):
    """Ends a step where all that is needed is known."""


@contextmanager
def observing(
    models: Sequence[torch.nn.Module],
    others: Sequence[torch.Tensor],
    trace: dict[str, Look],
    **options: Any,
) -> Iterator[Observer]:
    """Watch steps, compare them with the trace, or add to it: see `Observer`.

    Gradients are set to zero, which the caller puts back: what the step adds is then its own.
    """
    import torch

    with torch.no_grad():
        for parameter in (*(p for model in models for p in model.parameters()), *others):
            gradient = parameter.grad if parameter.is_leaf else None
            if gradient is not None and is_in_memory(gradient):
                gradient.zero_()
    observer = Observer(models, others, trace, **options)
    with watching(models, observer), suppress(Enough):
        yield observer


@dataclass
class Observer(Watcher):
    """Keeps in `run` how far a step is off the trace, to which it adds where it `extends` that.

    `others` are parameters beside those of the models; gradients of those whose ids are `unread`
    do not count. `scale` is the loss scale in force. A run that `ends_early` leaves the block
    after the followed steps of its optimizers, or after one call. Where results are `named`, they
    are compared in place of all outputs.
    """

    models: Sequence[Any]
    others: Sequence[Any]
    trace: dict[str, Look]
    scale: Callable[[], float]
    loss_is_scaled: bool = False
    extends: bool = False
    ends_early: bool = False
    named: bool = False
    unread: Collection[int] = ()
    run: Run = field(default_factory=Run)

    def __post_init__(self) -> None:
        self._names: dict[int, str] = {}
        self._parameters: dict[str, Any] = {}
        for model in self.models:
            for name, parameter in model.named_parameters():
                self._add(parameter, self._prefix(model) + name)
        for parameter in self.others:
            self._add(parameter, "")
        self._taken: Counter[int] = Counter()  # steps of each optimizer
        self._stepped: set[str] = set()  # parameters that optimizers moved in this step
        self._calls = self._depth = 0
        self._counts: Counter[tuple[int, int, str, str]] = Counter()
        self._key = self._tag = ""
        self._within = 0  # steps within a backward pass
        self._is_fresh = self._in_backward = self._in_closure = self._is_free = False
        self._drifts = False  # parameters moved by gradients that were not replaced
        self._before: dict[str, Any] = {}
        self._keep_before(self._parameters | self._buffers())

    def _prefix(self, model: Any) -> str:
        return f"{type(model).__name__}." if len(self.models) > 1 else ""

    def _add(self, parameter: Any, name: str) -> None:
        if id(parameter) not in self._names:
            self._names[id(parameter)] = name or f"parameter {len(self._names) + 1}"
            self._parameters[self._names[id(parameter)]] = parameter

    # What `watching` tells.

    @unwatched
    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        self._calls += 1
        number = self._calls
        is_compared = number <= FIRST_CALLS or not number & (number - 1)
        if self._is_free or self.named or self.run.diverged or not is_compared:
            return
        given = Leaves().add([args, kwargs]).integers
        seen = self._look("given", Leaves(integers={n: _checksum(v) for n, v in given.items()}))
        if seen.fits and not any(count for count, *_ in seen.integers.values()):
            self._look("output", Leaves().add(result), "output")
        else:
            self.run.diverged = True

    @unwatched
    def before_backward(self, tensors: Any) -> None:
        self._in_backward = True
        if not (self._is_free or self.named):
            divisor = self.scale() if self.loss_is_scaled else 1.0
            self._look("output", _divided(Leaves().add(tensors), divisor), "loss")

    @unwatched
    def after_backward(self) -> None:
        self._in_backward = False
        self._is_fresh = True
        self.run.steps, self._within, self._tag = self.run.steps + self._within, 0, ""
        if self._in_closure and not self._is_free:
            self._gradients(list(self._parameters.values()), 1.0, replace=True)
            self._in_closure = False
        elif self._depth:  # a closure that is evaluated once more
            self._drifts = True

    @unwatched
    def differentiated(self, gradients: Any) -> None:
        if not self._is_free:
            self._look("gradient", Leaves().add(gradients), "autograd.grad")

    @unwatched
    def before_zero_grad(self) -> None:
        self._flush()

    @unwatched
    def before_step(self, optimizer: Any, with_closure: bool) -> None:
        self._depth += 1
        if self._depth > 1:  # that of its parent class
            return
        self._taken[id(optimizer)] += 1
        self._is_free = self._is_free or self._taken[id(optimizer)] > FOLLOWED
        own = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in own:
            self._add(parameter, "")
        # Within the backward pass parameters get their gradients in any order.
        self._tag = self._names[id(own[0])] if self._in_backward and own else ""
        if self._is_free:
            return
        self._stepped |= {self._names[id(parameter)] for parameter in own}
        self._keep_before({name: self._parameters[name] for name in self._stepped})
        # A closure after a backward pass makes none of the gradients: Lightning's does nothing.
        self._in_closure = with_closure and not self._is_fresh and not self._in_backward
        if not self._in_closure:
            # A fused optimizer is handed the scale, for every other it is taken out before.
            still_in = getattr(optimizer, "grad_scale", None)
            self._gradients(own, 1.0 if still_in is None else float(still_in), replace=True)

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
        own = {self._names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        self._moves("parameter", own)
        self._moves("buffer")
        if self.ends_early and self._taken[id(optimizer)] >= FOLLOWED and not self._in_backward:
            raise Enough

    # What the caller tells.

    @unwatched
    def step_ended(self, results: Sequence[Any]) -> None:
        """With what it returned and left in its names."""
        self._flush()
        found = Leaves()
        for result in results:
            found.add(result)
        found.words |= self._modes()
        self._look("output", found, "result")
        if not self._is_free:
            moved = self._moves("moved", self._parameters.keys() - self._stepped).ways.values()
            self._drifts = self._drifts or any(moved)
            self._moves("buffer")
        self.run.unknown += found.unknown
        self.run.ends.append(self.run.steps)
        self._calls, self._stepped = 0, set()
        if self.ends_early:
            raise Enough

    @property
    def is_done(self) -> bool:
        """Whether another step would show nothing new, or begin where rounding led."""
        followed = any(count >= FOLLOWED for count in self._taken.values())
        return self._is_free or self._drifts or followed

    # Looks.

    def _flush(self) -> None:
        """Compare gradients that nobody has looked at: they are cleared, or the step ends."""
        if self._is_fresh and not self._is_free:
            self._gradients(list(self._parameters.values()), self.scale())

    def _gradients(self, parameters: Sequence[Any], scale: float, replace: bool = False) -> None:
        import torch

        self._is_fresh = False
        gradients = {self._names[id(p)]: self._gradient(p) for p in parameters}
        values = {n: None if one is None else plain(one) for n, one in gradients.items()}
        self._look("gradient", _divided(Leaves(values), scale))
        expected = self.trace.get(self._key)
        if not replace or expected is None:
            return
        with torch.no_grad():
            for name, gradient in gradients.items():
                value = expected.values.numbers.get(name)
                if gradient is None or value is None or gradient.layout is not torch.strided:
                    continue
                if type(gradient) is torch.Tensor and gradient.shape == value.shape:
                    gradient.copy_(value if scale == 1.0 else value * scale)

    def _gradient(self, parameter: Any) -> Any:
        if id(parameter) in self.unread or not (parameter.is_leaf or parameter.retains_grad):
            return None
        return parameter.grad

    def _moves(self, kind: str, names: Collection[str] = ()) -> Look:
        """Compare where parameters or buffers are now; returns the trace's look."""
        found = Leaves()
        holders = self._buffers() if kind == "buffer" else self._parameters
        for name, tensor in holders.items():
            if (kind == "buffer" or name in names) and (value := plain(tensor)) is not None:
                is_exact = not (value.is_floating_point() or value.is_complex())
                (found.integers if is_exact else found.numbers)[name] = value  # type: ignore[index]
        self._look(kind, found)
        return self.trace.get(self._key) or Look(kind, "", found)

    def _keep_before(self, holders: dict[str, Any]) -> None:
        """Remember where these are, in a run that extends the trace: parameters before each step,
        what no optimizer moves at the beginning of all.
        """
        if self.extends and not self._is_free:
            values = {name: plain(tensor) for name, tensor in holders.items()}
            self._before |= {n: value.clone() for n, value in values.items() if value is not None}

    def _buffers(self) -> dict[str, Any]:
        named = ((self._prefix(model), model.named_buffers()) for model in self.models)
        return {prefix + name: buffer for prefix, buffers in named for name, buffer in buffers}

    def _modes(self) -> dict[str, str]:
        """Which parts are in training mode, and which parameters get gradients, after a step."""
        modes = {
            f"{number}.{name}.training": str(part.training)
            for number, model in enumerate(self.models)
            for name, part in model.named_modules()
        }
        return modes | {
            f"{name}.requires_grad": str(parameter.requires_grad)
            for name, parameter in self._parameters.items()
            if id(parameter) not in self.unread
        }

    @property
    def _place(self) -> str:
        step = f"in step {len(self.run.ends) + 1}" if self.run.ends else ""
        count = self.run.steps - (self.run.ends[-1] if self.run.ends else 0)
        after = f"after {count} optimizer step{'s' * (count > 1)}" if count else ""
        return " ".join(filter(None, (step, after)))

    def _look(self, kind: str, found: Leaves, name: str = "") -> Seen:
        """Compare with the trace, or add to it."""
        if name:
            found.numbers = {f"{name} {key}".strip(): v for key, v in found.numbers.items()}
        moment = (len(self.run.ends), self.run.steps, kind, self._tag)
        self._counts[moment] += 1
        key = self._key = " ".join(map(str, (*moment, self._counts[moment])))
        if key in self.trace:
            seen = _compared(found, self.trace[key], self._place)
        else:
            made = {n: value for n, value in found.numbers.items() if value is not None}
            seen = Seen(kind, self._place, fits=self.extends)
            seen.errors = {n: Deviation(made[n].numel() if n in made else 0) for n in found.numbers}
            seen.is_finite = all(bool(v.isfinite().any()) for v in made.values() if v.numel())
            if self.extends:
                self.trace[key] = self._stored(kind, found)
        seen.dtypes, seen.is_free = dict(found.dtypes), self._is_free
        self.run.looks[key] = seen
        return seen

    def _stored(self, kind: str, found: Leaves) -> Look:
        """Copies: in float32, which is far finer than what is told apart."""
        import torch

        integers = {name: value.clone() for name, value in found.integers.items()}
        look = Look(kind, self._place, Leaves({}, {}, integers, dict(found.words)))
        for name, value in found.numbers.items():
            if value is None:
                look.values.numbers[name] = None
                continue
            narrow = torch.complex64 if value.is_complex() else torch.float32
            look.values.numbers[name] = value.detach().to(narrow, copy=True)
            if kind in MOVES:
                old = self._before.get(name)
                way = value - old if old is not None and old.shape == value.shape else value
                look.ways[name] = float(way.norm())
        return look


def _compared(found: Leaves, look: Look, place: str) -> Seen:
    kind, expected = look.kind, look.values
    seen = Seen(kind, place)
    pairs = [(found.numbers.get(name), value) for name, value in expected.numbers.items()]
    shapes = [(a.shape, b.shape) for a, b in pairs if a is not None and b is not None]
    integers = {name: value.shape for name, value in expected.integers.items()}
    names = found.numbers.keys() == expected.numbers.keys()
    alike = {name: value.shape for name, value in found.integers.items()} == integers
    if not (names and alike and all(mine == theirs for mine, theirs in shapes)):
        seen.fits = False
        return seen
    parts = sums(pairs)
    if kind in MOVES:
        given = zip(parts, pairs, look.ways.values(), strict=True)
        parts = [_of_way(part, tensor, way) for part, (tensor, _), way in given]
    # What hardly moves, as the mean of a zero, is compared with how far the others go.
    together = kind == "gradient" or kind in MOVES
    errors = of_gradients(parts) if together else [part.deviation() for part in parts]
    seen.errors = dict(zip(expected.numbers, errors, strict=True))
    seen.whole = sum(parts, Sums(0))
    seen.is_finite = all(math.isfinite(part.off) for part in parts)
    for name, value in expected.integers.items():
        seen.integers[name] = _differing(found.integers[name].to(value.device), value)
    every = {**expected.words, **found.words}
    seen.words = [name for name in every if found.words.get(name) != expected.words.get(name)]
    return seen


def _of_way(part: Sums, tensor: Any, way: float) -> Sums:
    """Relative to how far it went, without what its dtype rounds."""
    import torch

    eps = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)
    size = math.sqrt(part.square)
    if not math.isfinite(part.off):
        return part
    off = max(0.0, math.sqrt(part.off) - STORED * eps * size)
    return Sums(part.size, off * off, way * way)


def _differing(tensor: Any, expected: Any) -> tuple[int, int, float, float]:
    if not expected.numel():
        return 0, 0, 0.0, 0.0
    most = float((tensor.double() - expected.double()).abs().max())
    largest = float(expected.double().abs().max())
    return int((tensor != expected).sum()), expected.numel(), most, largest


def _checksum(value: Any) -> Any:
    """A few numbers that stand for the integers of a tensor and their order."""
    import torch

    flat = value.flatten()
    weights = torch.arange(1, flat.numel() + 1)
    return torch.stack([torch.tensor(value.numel()), flat.sum(), (flat * weights).sum()])


def _divided(found: Leaves, divisor: float) -> Leaves:
    if divisor != 1.0:
        values = found.numbers.items()
        found.numbers = {n: None if value is None else value / divisor for n, value in values}
    return found
