"""A step: the code that is measured, and everything that it may change."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from types import CoroutineType, GeneratorType
from typing import Any, ParamSpec, TypeVar

import torch

from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.state.guard import MeasurementGuard
from speedkit_jupyter.state.handlers.names import Names
from speedkit_jupyter.state.output import users_log_handlers
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.step.discovery import holding
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue.interrupts import in_a_window
from speedkit_jupyter.torchglue.modules import global_hooks

# A call of an async or generator function makes an object, and runs none of the code.
UNRUN = "{0} that nobody runs: write the step as a plain function, or give lambda: list({1}())"
P = ParamSpec("P")
R = TypeVar("R")


class StateWarning(UserWarning):
    """A change of the step can't be put back."""


def _warn(line: str) -> None:
    messages.warn(line, StateWarning)


def reports_out_of_data(function: Callable[P, R]) -> Callable[P, R]:
    """Have a StopIteration of the step raise StepError: it would end a generator of ours."""

    @wraps(function)  # no context manager, whose frames would stay in the user's traceback
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except StopIteration:
            raise StepError(
                "the step ran out of data (StopIteration): an iterator that it draws from has "
                "ended. One that the cell names begins anew by itself"
            ) from None

    return call


@dataclass
class Step:
    """The code that is measured, and the objects that it may change.

    `run` is called with the context of the variant at hand. `models` and `optimizers` get the
    variants' plans; the step also reaches `bystanders`, and begins from `others`. A cell runs in
    the namespace `names`, assigns the names `assigned` and draws from `iterators`. `around_blocks`
    surrounds blocks of steps. Gradients of parameters whose ids are `unread` are not compared.
    `say` tells the user a line. `source` is a cell's code.
    """

    run: Callable[[SpeedContext], object]
    models: Sequence[torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    bystanders: Sequence[torch.nn.Module | torch.optim.Optimizer] = ()
    names: MutableMapping[str, Any] | None = None
    assigned: Sequence[str] = ()
    others: Sequence[Any] = ()
    iterators: Sequence[str] = ()
    rewind: Callable[[], None] = lambda: None
    around_blocks: Callable[[], AbstractContextManager[None]] = nullcontext
    unread: frozenset[int] = frozenset()
    say: Callable[[str], object] = _warn
    source: str = ""
    said: list[str] = field(default_factory=list, repr=False)
    # While it is guarded: the copy that it began with, and whether copies are in main memory.
    _begun: Snapshot | None = field(default=None, init=False, repr=False)
    _off_device: bool = field(default=False, init=False, repr=False)

    @user_code_boundary
    @reports_out_of_data
    def call(self, context: SpeedContext) -> object:
        """Run it as the user does. Raises StepError where it runs out of data."""
        return in_a_window(partial(self.run, context))

    def roots(self, scalers: Sequence[torch.amp.GradScaler] = ()) -> list[Any]:
        """Return the objects from which all that it can change is reached."""
        space = [] if self.names is None else [Names(self.names, self.iterators, self.assigned)]
        others = [*self.others, *self.bystanders, *global_hooks(), *users_log_handlers()]
        return [*space, *others, *self.models, *self.optimizers, *scalers]

    def walk(self) -> Walk:
        """Return a walk over all that it can change."""
        return Walk(self.roots())

    def state(
        self, scalers: Sequence[torch.amp.GradScaler] = (), for_timing: bool = False
    ) -> Snapshot:
        """Return a copy of what the step changes, as it is now; see `Snapshot`."""
        return Snapshot(Walk(self.roots(scalers)), self._off_device, self._begun, for_timing)

    @contextmanager
    def guarded(
        self, shows_first: bool = True, off_device: bool = False
    ) -> Iterator[MeasurementGuard]:
        """Undo at the end whatever the block does; iterators replay their first draws.

        The user sees the output of the first call if it `shows_first`. Copies of the state are in
        main memory if `off_device`. Raises StepError while another step is measured.
        """
        guard = MeasurementGuard(self.roots(), self.models, self.tell, shows_first, off_device)
        with guard:
            self._begun, self.rewind, self._off_device = guard.state, guard.rewind, off_device
            try:
                yield guard
            finally:
                self._begun, self.rewind, self._off_device = None, lambda: None, False

    def tell(self, lines: Sequence[str]) -> None:
        """Say each line once."""
        for line in lines:
            if line not in self.said:
                self.said.append(line)
                self.say(line)

    def values(self, names: Sequence[str]) -> list[Any]:
        """Return what the step left in these names; raise StepError if a name is missing."""
        space = self.names or {}
        for name in names:
            if name not in space:
                raise StepError(f"--check {name}: the step leaves no such name")
        return [space[name] for name in names]

    @cached_property
    def model_names(self) -> list[str]:
        """Return how the code calls each of several models: `D`, `trainer.net`; `Linear 2` without
        a name of its own.
        """
        walk, found = Walk(self.others if len(self.models) > 1 else ()), list[str]()
        for number, model in enumerate(self.models, 1):
            name = walk.name(model)  # "a Linear" without one
            has_own = name not in found and not name.startswith("a ")
            found.append(name if has_own else f"{type(model).__name__} {number}")
        return found

    def results(self) -> dict[str, Any]:
        """Return what the step left in the names that it assigns."""
        space = self.names or {}
        return {name: space[name] for name in self.assigned if name in space and name != "ctx"}

    def holders(self, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers that hold a parameter of the model."""
        return holding(self.optimizers, model)

    def why_no_model(self, aim: str) -> str:
        """Return why there is nothing to do when `models` is empty."""
        return f"no model with parameters is used in this step, so there is nothing to {aim}"

    def with_others(self, *more: Any) -> Step:
        """Return the same step, where these are called between its steps."""
        return replace(self, others=[*self.others, *more])

    def on(self, model: torch.nn.Module) -> Step:
        """Return the same step with plans for this model only; raise StepError if it is unused."""
        same = [candidate for candidate in self.models if unwrapped(candidate) is unwrapped(model)]
        if not same:
            raise StepError("the step does not use this model")
        rest = [candidate for candidate in self.models if candidate is not same[0]]
        return replace(self, models=[same[0]], bystanders=[*rest, *self.bystanders])


def refuse_unrun_result(result: Any) -> None:
    """Raise StepError for a coroutine or generator that a step returns without running it.

    A generator expression passes: it most often goes through what the step has computed.
    """
    kind = ""
    if is_a(result, GeneratorType) and result.gi_code.co_name != "<genexpr>":
        kind = "a generator" if inspect.getgeneratorstate(result) == inspect.GEN_CREATED else ""
    elif is_a(result, Awaitable | AsyncGenerator):
        kind = f"something to await ({type(result).__name__})"
    if is_a(result, CoroutineType):
        result.close()  # Python would warn that it was never awaited
    if kind:
        name = getattr(result, "__name__", "step")
        raise StepError(f"the step returns {UNRUN.format(kind, name)}")
