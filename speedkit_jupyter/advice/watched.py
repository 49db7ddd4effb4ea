"""One call of a step, watched: which modules it calls with what, what it draws, how it steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.code import what_ran
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks, patched
from speedkit_jupyter.profiling.lines import Spot, user_spot
from speedkit_jupyter.support.marks import version
from speedkit_jupyter.support.torch_private import loader_iterator

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

Original = Callable[..., Any]


@dataclass
class ModelCall:
    """A call of an outermost module, in the optimizer step `step`.

    `versions` are those of the input tensors when it began, and of the parameters: one that was
    written to since is another one.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    step: int
    training: bool
    versions: tuple[int, ...]
    has_graph: bool = False

    def __call__(self) -> object:
        """Make it again."""
        return self.module(*self.args, **self.kwargs)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Return its tensors, also those within lists and dicts."""
        return list(tensors((self.args, self.kwargs)))

    def is_same_as(self, other: ModelCall) -> bool:
        """Return whether it computes the same: one module, the same tensors and parameters."""
        return (
            self.module is other.module
            and (self.step, self.training) == (other.step, other.training)
            and self.versions == other.versions
            and [id(one) for one in self.inputs] == [id(one) for one in other.inputs]
        )

    def with_rows(self, times: int) -> ModelCall:
        """Return the same call with every tensor's rows repeated; a vector is one row."""
        is_row = any(one.dim() < 2 for one in self.inputs)
        args = tuple(_grown(one, times, is_row) for one in self.args)
        return replace(self, args=args, kwargs=_grown(dict(self.kwargs), times, is_row))


def _grown(value: Any, times: int, is_row: bool) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        rows = value.detach().unsqueeze(0) if is_row else value.detach()
        return torch.cat([rows] * times) if rows.dim() else value
    if isinstance(value, dict):
        return {key: _grown(one, times, is_row) for key, one in value.items()}
    if isinstance(value, list | tuple) and any(True for _ in tensors(value)):
        return type(value)(_grown(one, times, is_row) for one in value)
    return value


@dataclass
class Backward:
    """A call of `backward`: what was asked for."""

    retains_graph: bool
    creates_graph: bool


@dataclass
class Draws:
    """Seconds of one DataLoader: until its iterator was there, for each batch, for each end."""

    begun_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)


@dataclass
class Watched:
    """What was seen in one call of the step.

    `calls` are those of outermost modules, `times` how often modules of each class were called;
    `got_gradients` are ids of parameters whose gradient was written to; `gradients_asked` says
    whether `torch.autograd.grad` was called, `passes` how often a line asked for a backward pass of
    either kind; `steps` are those of all optimizers, `held` the ids of what these hold, be they
    made in the step itself, as `loaders` may be. `flags` are those of the moment in which modules
    were called; `checks` of distributions took `checks_s`.
    """

    calls: list[ModelCall] = field(default_factory=list)
    times: Counter[type] = field(default_factory=Counter)
    backwards: list[Backward] = field(default_factory=list)
    passes: Counter[Spot] = field(default_factory=Counter)
    gradients_asked: bool = False
    held: set[int] = field(default_factory=set)
    got_gradients: set[int] = field(default_factory=set)
    zeroed_to: Counter[bool] = field(default_factory=Counter)
    steps: int = 0
    loaders: dict[int, DataLoader[Any]] = field(default_factory=dict)
    draws: dict[int, Draws] = field(default_factory=lambda: defaultdict(Draws))
    ran: set[CodeType] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)
    checks: int = 0
    checks_s: float = 0.0

    def of_models(self) -> list[ModelCall]:
        """Return the calls of what has parameters: no loss, no activation."""
        return [call for call in self.calls if any(True for _ in call.module.parameters())]


def watched(call: Callable[[], object], parameters: Sequence[torch.nn.Parameter] = ()) -> Watched:
    """Make the call; `parameters` are those of the step's models."""
    import torch
    from torch.distributions import Distribution
    from torch.utils.data import DataLoader

    found, optimizer = Watched(), torch.optim.Optimizer
    loaders: dict[int, int] = {}
    before = {id(one): _gradient(one) for one in parameters}
    with ExitStack() as stack:
        for owner, name, make in (
            (torch.nn.Module, "__call__", partial(_module, found, [])),
            (torch.autograd, "backward", partial(_backward, found)),
            (torch.autograd, "grad", partial(_grad, found)),
            (optimizer, "zero_grad", partial(_zero_grad, found)),
            (DataLoader, "__iter__", partial(_loader, found, loaders)),
            (loader_iterator(), "__next__", partial(_draw, found, loaders)),
            (Distribution, "__init__", partial(_check, found)),
            (Distribution, "_validate_sample", partial(_check, found)),
        ):
            stack.enter_context(patched(owner, name, make))
        stack.enter_context(optimizer_hooks(after=partial(_stepped, found)))
        found.ran = what_ran(call)
    found.got_gradients = {
        id(one) for one in parameters if _gradient(one) not in (None, before[id(one)])
    }
    return found


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors within lists, tuples, mappings and result objects."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(one)


def _gradient(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """Return what is another one where the gradient was written to."""
    found = parameter.grad
    return None if found is None else (id(found), found._version)


def _module(found: Watched, inside: list[Any], original: Original) -> Original:
    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.times[type(module)] += 1
        if inside:
            return original(module, *args, **kwargs)
        found.flags |= _flags()
        read = (*tensors((args, kwargs)), *module.parameters())
        versions = tuple(map(version, read))
        seen = ModelCall(module, args, kwargs, found.steps, module.training, versions)
        found.calls.append(seen)
        inside.append(module)
        try:
            result = original(module, *args, **kwargs)
        finally:
            inside.pop()
        given = vars(result) if hasattr(result, "__dataclass_fields__") else result
        seen.has_graph = any(one.requires_grad for one in tensors(given))
        return result

    return call


def _flags() -> set[str]:
    import torch

    known = {
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
    }
    return {name for name, is_on in known.items() if is_on}


def _backward(found: Watched, original: Original) -> Original:
    def call(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found.passes[user_spot() or Spot("", 0)] += 1
        found.backwards.append(Backward(bool(retain_graph), create_graph))
        return original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)

    return call


def _grad(found: Watched, original: Original) -> Original:
    def call(*args: Any, **kwargs: Any) -> Any:
        found.gradients_asked = True
        found.passes[user_spot() or Spot("", 0)] += 1
        return original(*args, **kwargs)

    return call


def _zero_grad(found: Watched, original: Original) -> Original:
    def call(optimizer: Any, set_to_none: bool = True) -> Any:
        found.zeroed_to[set_to_none] += 1
        return original(optimizer, set_to_none)

    return call


def _stepped(found: Watched, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    found.steps += 1
    found.held |= {id(one) for group in optimizer.param_groups for one in group["params"]}


def _check(found: Watched, original: Original) -> Original:
    """Time what a distribution's constructor and `log_prob` call to check what they are given."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begun_s = clock.now()
        try:
            return original(*args, **kwargs)
        finally:
            found.checks += 1
            found.checks_s += clock.now() - begun_s

    return call


def _loader(found: Watched, loaders: dict[int, int], original: Original) -> Original:
    def call(loader: DataLoader[Any]) -> Any:
        begun_s = clock.now()
        found.loaders[id(loader)] = loader
        iterator = original(loader)
        found.draws[id(loader)].begun_s.append(clock.now() - begun_s)
        loaders[id(iterator)] = id(loader)
        return iterator

    return call


def _draw(found: Watched, loaders: dict[int, int], original: Original) -> Original:
    def call(iterator: Any) -> Any:
        begun_s, draws = clock.now(), found.draws[loaders.get(id(iterator), 0)]
        try:
            batch = original(iterator)
        except StopIteration:
            draws.ended_s.append(clock.now() - begun_s)
            raise
        draws.next_s.append(clock.now() - begun_s)
        return batch

    return call
