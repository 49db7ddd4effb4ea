"""Calls of a function on fresh inputs: how these are drawn, and what one gives in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speedkit_jupyter.extras.check.watch import PatchWatch
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.step.memory import MemoryUse, needed
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.torchglue.private import tree_map

# Shapes by name: batch, heads, length, head_dim. One row, an odd length, and what models have.
SIZES: dict[str, Any] = {
    "single": (1, 1, 1, 16),
    "small": (1, 2, 16, 16),
    "odd": (2, 3, 37, 24),
    "realistic": (2, 8, 512, 64),
    "large": (4, 16, 1024, 64),
    "xlarge": (8, 32, 2048, 128),
}
GIVEN = "given"
# Weights differ by so much from call to call, as in training: what a candidate kept of them shows.
WEIGHTS_MOVE = 0.1
SAME = "inputs gave the same numbers twice: draw them anew, and set no seed inside"
# The kinds of values, by how their names begin; what begins otherwise is an output.
GRADIENT, INPUT, BUFFER = "gradient of ", "input ", "buffer "
CHANGED = "a result changes after it was given: it shares memory with a later one, or comes late"
Values = dict[str, Any]  # of tensors


@dataclass(frozen=True)
class Drawn:
    """Fresh inputs of one call by name, and the gradients of its outputs that go backward.

    `weights` are values for a module's parameters and buffers, `seed` is for what the call draws.
    """

    arguments: Mapping[str, Any]
    by_keyword: bool
    seed: int = 0
    cotangents: Values = field(default_factory=dict)
    weights: Values = field(default_factory=dict)


@dataclass
class Taken:
    """What a call gave: tensors by name, the classes of its outputs, the names of outputs that
    share memory with an input, those that gradients go through, and what is wrong whatever they
    hold.
    """

    values: Values
    classes: dict[str, str] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)
    differentiable: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def written(self, drawn: Drawn) -> list[str]:
        """Return the names of the inputs that the call has left with other values."""
        pairs = [(INPUT + name, before) for name, before in inputs_of(drawn.arguments)]
        return [name for name, before in pairs if not are_equal(self.values[name], before)]


def named_tensors(value: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a result with their places in it; numbers count as tensors."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, bool | int | float | complex):
        yield name, torch.tensor(value)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from named_tensors(part, f"{name}[{key}]")


class Here:
    """The candidate or the reference in this process, to prepare calls, time them, and take what
    they gave. A module has its own weights and buffers again on exit.
    """

    def __init__(
        self, function: Callable[..., Any], gradients: bool, watch: PatchWatch | None = None
    ) -> None:
        self.function, self._gradients, self._watch = function, gradients, watch
        self._parameters = dict(getattr(function, "named_parameters", dict)())
        self._buffers = dict(getattr(function, "named_buffers", dict)())
        self.state = {**self._parameters, **self._buffers}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.state.items()}
        self._start = {name: tensor.detach().clone() for name, tensor in self.state.items()}
        self._drawn: list[Drawn] = []
        self.given: list[dict[str, Any]] = []
        self.results: list[Values] = []  # of each call of the last `run`, as they lie there
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(self._start)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, tensor in self.state.items():
            tensor.data.copy_(values.get(name, self._start[name]))

    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None:
        """Copy the inputs of the next calls, and set weights and seed.

        They are written into the memory of the last inputs where these are to `reuse` it.
        """
        self._drawn = list(drawn)
        fresh = [tree_map(self._copy, dict(one.arguments)) for one in drawn]
        if reuse and len(fresh) == len(self.given):
            fresh = [tree_map(_written, *both) for both in zip(self.given, fresh, strict=True)]
        self.given, self.results = fresh, []
        self._set(drawn[0].weights)
        torch.manual_seed(drawn[0].seed)
        synchronize(self.device)

    def _copy(self, value: Any) -> Any:
        """Return a value of its own for each call; of floats one that wants a gradient."""
        if not isinstance(value, torch.Tensor):
            return value
        # As it lies in memory, expanded dimensions too.
        copy = value.detach().clone()
        return copy.requires_grad_(self._gradients and copy.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Return where the first tensor that it is given lies."""
        tensors = [t for one in self.given for _, t in inputs_of(one)]
        return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))

    def run(self, computes: bool = True) -> None:
        """Make the calls; or else do all but computing, which is nothing here."""
        if computes:
            calls = zip(self._drawn, self.given, strict=True)
            self.results = [self._call(drawn, given) for drawn, given in calls]

    @user_code_boundary
    def _call(self, drawn: Drawn, given: dict[str, Any]) -> Values:
        result = self.function(**given) if drawn.by_keyword else self.function(*given.values())
        values = dict(named_tensors(result))
        through = {n: t for n, t in values.items() if n in drawn.cotangents and t.requires_grad}
        if self._gradients and through:
            every = {**dict(inputs_of(given)), **self._parameters}
            leaves = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
            outputs, cotangents = list(through.values()), [drawn.cotangents[n] for n in through]
            found = torch.autograd.grad(outputs, [*leaves.values()], cotangents, allow_unused=True)
            pairs = zip(leaves, found, strict=True)
            values |= {GRADIENT + name: one for name, one in pairs if one is not None}
        return values

    def take(self, full: bool = False) -> list[Taken]:
        """Return copies of what the calls gave, and what is wrong with it by itself.

        A `full` look is also at what they left in inputs and buffers.
        """
        found, kept = [], []
        for given, outputs in zip(self.given, self.results, strict=True):
            values = {name: tensor.detach().clone() for name, tensor in outputs.items()}
            names = [name for name in outputs if not name.startswith(GRADIENT)]
            taken = Taken(values, {name: type(outputs[name]).__name__ for name in names})
            held = {_address(t) for _, t in (*inputs_of(given), *self._parameters.items())} - {0}
            taken.aliases = [name for name in names if _address(outputs[name]) in held]
            taken.differentiable = [name for name in names if outputs[name].requires_grad]
            own = values.keys() - set(taken.aliases)
            kept += [(outputs[name].detach(), values[name]) for name in own]
            if full:
                values |= {INPUT + name: t.detach().clone() for name, t in inputs_of(given)}
                values |= {BUFFER + n: t.detach().clone() for n, t in self._buffers.items()}
            found.append(taken)
        faults = found[0].faults
        faults += self._watch.changes() if self._watch else []
        if any(not are_equal(tensor, before) for tensor, before in (*self._kept, *kept)):
            faults.append(CHANGED)
        # What lies there for longer takes the timed calls the memory that they would use again.
        self._kept = kept if full else []
        return found

    def memory(self) -> MemoryUse:
        """Return what the calls need."""
        tensors = [t for one in self.given for _, t in inputs_of(one)]
        return needed(self.run, self.device, [*tensors, *self.state.values()])


def inputs_of(given: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors among arguments, and in lists of them."""
    return [pair for name, value in given.items() for pair in named_tensors(value, name)]


def _written(old: Any, new: Any) -> Any:
    """Return the old tensor with the new values, at the same address and of the same version."""
    if not isinstance(old, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
        return new
    old.data.copy_(new.data)
    return old


def are_equal(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether all values are the same, NaN too."""
    return bool(((tensor == before) | ((tensor != tensor) & (before != before))).all())


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or made of other tensors
        return 0


# --- fresh inputs ---


class InputSource:
    """Draws the inputs of `reference` from `source`: new numbers for each call, of the user's
    function or like an example.
    """

    def __init__(self, source: Any, reference: Callable[..., Any], weights: Values) -> None:
        parameters = _parameters(getattr(reference, "forward", reference))
        self._names = [one.name for one in parameters]
        self._weights = {name: value.detach().clone() for name, value in weights.items()}
        self._moving = {n for n, t in weights.items() if t.requires_grad and t.is_floating_point()}
        self._source = source
        self.takes_size = any(
            p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in _parameters(source)
        )

    def draw(self, seed: int, size: Any) -> Drawn:
        """Return new ones."""
        torch.manual_seed(seed)
        if callable(self._source):
            value = self._source(size) if self.takes_size else self._source()
        else:
            value = tree_map(_resampled, self._source)
        value = (value,) if isinstance(value, torch.Tensor) else value
        if not isinstance(value, Mapping | list | tuple):
            kind = type(value).__name__
            raise ArgumentError(f"inputs must give tensors in a tuple or a dict, not {kind}")
        more = (f"input_{at}" for at in range(len(self._names), len(value)))
        by_keyword = isinstance(value, Mapping)
        arguments = dict(value if by_keyword else zip([*self._names, *more], value, strict=False))
        weights = dict(self._weights)
        for name in self._moving:
            weights[name] = weights[name] * (1 + WEIGHTS_MOVE * torch.randn_like(weights[name]))
        return Drawn(arguments, by_keyword, weights=weights)

    def check_fresh(self, first: Drawn, second: Drawn) -> None:
        """Raise ArgumentError if two calls have the same numbers, but for what is constant."""
        both = zip(inputs_of(first.arguments), inputs_of(second.arguments), strict=True)
        pairs = [(a, b) for (_, a), (_, b) in both if a.is_floating_point() and len(a.unique()) > 1]
        if pairs and all(a.shape == b.shape and are_equal(a, b) for a, b in pairs):
            raise ArgumentError(SAME)


def _resampled(value: Any) -> Any:
    """Return other numbers from those of a floating-point tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    flat = value.detach().flatten()
    if flat.numel() < 2 or not flat.isfinite().all():
        return value
    return flat[torch.randint(flat.numel(), flat.shape, device=flat.device)].reshape(value.shape)


def _parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C, or an example
        return []
