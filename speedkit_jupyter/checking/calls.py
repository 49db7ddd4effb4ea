"""Calls of a function on fresh inputs: what one gives, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from speedkit_jupyter.checking.watch import Watch
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.measure.checks.memory import Memory, needed
from speedkit_jupyter.support.torch_private import tree_map
from speedkit_jupyter.support.tracebacks import user_code_boundary

if TYPE_CHECKING:
    import torch

# The kinds of values, by how their names begin; what begins otherwise is an output.
GRADIENT, INPUT, BUFFER = "gradient of ", "input ", "buffer "
CHANGED = "a result changes after it was given: it shares memory with a later one, or comes late"
THREAD = "it leaves a thread at work"
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


class Side(Protocol):
    """The candidate or the reference: prepare calls, time them, take what they gave.

    `prepare` writes into the memory of the last inputs where these are to `reuse` it. `run` makes
    the calls of the last `prepare`, and `take` returns what they gave, with a look at what else
    they did if that is `full`. One that `is_apart` is told which values to `expect` of timed calls,
    and `relay` takes as long as these take to come and go.
    """

    is_apart: bool

    def expect(self, values: Values) -> None: ...
    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None: ...
    def run(self) -> None: ...
    def relay(self) -> None: ...
    def take(self, full: bool = False) -> list[Taken]: ...
    def memory(self) -> Memory: ...


def named_tensors(value: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a result with their places in it; numbers count as tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, bool | int | float | complex):
        yield name, torch.tensor(value)
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            yield from named_tensors(part, f"{name}[{key}]")


class Here:
    """A side in this process. A module has its own weights and buffers again on exit."""

    is_apart = False

    def __init__(
        self, function: Callable[..., Any], gradients: bool, watch: Watch | None = None
    ) -> None:
        self.function, self._gradients = function, gradients
        self._watch = watch
        self._parameters = dict(getattr(function, "named_parameters", dict)())
        self._buffers = dict(getattr(function, "named_buffers", dict)())
        self.state = {**self._parameters, **self._buffers}
        self._start = {name: tensor.detach().clone() for name, tensor in self.state.items()}
        self._drawn: list[Drawn] = []
        self.given: list[dict[str, Any]] = []
        self._results: list[tuple[Any, Sequence[Any]]] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._threads: set[Any] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return those of its parameters and buffers, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.state.items()}

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(self._start)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, tensor in self.state.items():
            tensor.data.copy_(values.get(name, self._start[name]))

    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None:
        """Copy the inputs of the next calls, and set weights and seed."""
        import torch

        self._drawn = list(drawn)
        fresh = [tree_map(self._copy, dict(one.arguments)) for one in drawn]
        if reuse and len(fresh) == len(self.given):
            fresh = [tree_map(_written, *both) for both in zip(self.given, fresh, strict=True)]
        self.given = fresh
        self._set(drawn[0].weights)
        torch.manual_seed(drawn[0].seed)
        self._results = []
        synchronize(self.device)

    @property
    def device(self) -> torch.device:
        """Return where the first tensor that it is given lies."""
        import torch

        tensors = [t for one in self.given for _, t in inputs_of(one)]
        return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))

    def run(self) -> None:
        """Make the calls."""
        calls = zip(self._drawn, self.given, strict=True)
        self._results = [self._call(drawn, given) for drawn, given in calls]

    def expect(self, values: Values) -> None:
        """Nothing is shared."""

    def relay(self) -> None:
        """Nothing comes and goes."""

    @user_code_boundary
    def _call(self, drawn: Drawn, given: dict[str, Any]) -> tuple[Any, Sequence[Any]]:
        import torch

        by_keyword = drawn.by_keyword
        result = self.function(**given) if by_keyword else self.function(*given.values())
        if not (drawn.cotangents and self._gradients):
            return result, ()
        outputs = {n: t for n, t in named_tensors(result) if n in drawn.cotangents}
        outputs = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        if not outputs:
            return result, ()
        leaves = [t for _, t in self._leaves(given)]
        cotangents = [drawn.cotangents[name] for name in outputs]
        found = torch.autograd.grad(list(outputs.values()), leaves, cotangents, allow_unused=True)
        return result, found

    def _leaves(self, given: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        every = (*inputs_of(given), *self._parameters.items())
        return [(name, tensor) for name, tensor in every if tensor.requires_grad]

    def take(self, full: bool = False) -> list[Taken]:
        """Return copies of what the calls gave, and what is wrong with it by itself."""
        found, kept = [], []
        for given, outputs in zip(self.given, self.results(), strict=True):
            values = {name: tensor.detach().clone() for name, tensor in outputs.items()}
            names = [name for name in outputs if not name.startswith(GRADIENT)]
            taken = Taken(values, {name: type(outputs[name]).__name__ for name in names})
            held = {_address(t) for _, t in (*inputs_of(given), *self._parameters.items())} - {0}
            taken.aliases = [name for name in names if _address(outputs[name]) in held]
            own = values.keys() - set(taken.aliases)
            kept += [(outputs[name].detach(), values[name]) for name in own]
            if full:
                self._look(taken, given, outputs)
            found.append(taken)
        found[0].faults += self._tampered(is_settled=not full)
        if any(not are_equal(tensor, before) for tensor, before in (*self._kept, *kept)):
            found[0].faults.append(CHANGED)
        # What lies there for longer takes the timed calls the memory that they would use again.
        self._kept = kept if full else []
        return found

    def results(self) -> Iterator[Values]:
        """Yield what each call of the last `run` gave, as it lies there."""
        for given, (result, gradients) in zip(self.given, self._results, strict=True):
            values = dict(named_tensors(result))
            for (name, _), gradient in zip(self._leaves(given), gradients, strict=False):
                if gradient is not None:
                    values[GRADIENT + name] = gradient
            yield values

    def _look(self, taken: Taken, given: dict[str, Any], outputs: Values) -> None:
        """Note what a call left in its inputs and buffers, and what gradients go through."""
        taken.values |= {INPUT + name: t.detach().clone() for name, t in inputs_of(given)}
        taken.values |= {BUFFER + name: t.detach().clone() for name, t in self._buffers.items()}
        taken.differentiable = [n for n in taken.classes if outputs[n].requires_grad]

    def _tampered(self, is_settled: bool) -> list[str]:
        """Return what the calls replaced or left at work; a first call may begin workers."""
        faults = self._watch.changes() if self._watch else []
        threads = set(threading.enumerate())
        if is_settled and self._threads is not None and threads - self._threads:
            faults.append(THREAD)
        self._threads = threads
        return faults

    def memory(self) -> Memory:
        """Return what the calls need."""
        tensors = [t for one in self.given for _, t in inputs_of(one)]
        return needed(self.run, self.device, [*tensors, *self.state.values()])

    def _copy(self, value: Any) -> Any:
        """Return a value of its own for each call; of floats one that wants a gradient."""
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        # As it lies in memory, expanded dimensions too.
        copy = value.detach().clone()
        return copy.requires_grad_(self._gradients and copy.is_floating_point())


def inputs_of(given: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors among arguments, and in lists of them."""
    return [pair for name, value in given.items() for pair in named_tensors(value, name)]


def _written(old: Any, new: Any) -> Any:
    """Return the old tensor with the new values, at the same address and of the same version."""
    import torch

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
