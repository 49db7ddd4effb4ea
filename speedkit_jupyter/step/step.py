"""A step: the code to measure, and everything that it may change."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from types import CoroutineType, GeneratorType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.catalog.facts.model import has_lazy_parameters
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.state.handlers.names import Names
from speedkit_jupyter.state.measurement_guard import MeasurementGuard
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.step import reachable
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.support.units import count
from speedkit_jupyter.support.wrappers import each_once, unwrapped
from speedkit_jupyter.torchglue.interrupts import in_a_window
from speedkit_jupyter.torchglue.modules import global_hooks

EMPTY = "the loader gives no batch: its data set is empty, or drop_last leaves nothing"
P = ParamSpec("P")
R = TypeVar("R")


class StateWarning(UserWarning):
    """A warning that a step may change state that can't be restored; it names the state."""


def reports_out_of_data(function: Callable[P, R]) -> Callable[P, R]:
    """Make `function` raise StepError instead of StopIteration, which generators can't pass on."""

    @wraps(function)  # not a context manager, whose frames would stay in tracebacks
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except StopIteration:
            raise StepError(
                "the step ran out of data (StopIteration): an iterator that it draws from has "
                "ended. An iterator that the cell names starts again where the cell found it"
            ) from None

    return call


@dataclass
class Step:
    """The code to measure, and the objects that it may change.

    `run` gets a plan's context. Plans apply to `models` and `optimizers`; the step's other models
    and optimizers are `bystanders`. `others` are further roots for walks. A cell runs in the
    namespace `names` and assigns the variables `assigned`. It draws from the iterators in the
    variables `iterators`, which `rewind` restarts. `around_blocks` returns a context manager for a
    timed block. Gradients of parameters with ids in `unread` are ignored. `say` shows a line.
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
    say: Callable[[str], object] = lambda line: messages.warn(line, StateWarning)
    said: list[str] = field(default_factory=list, repr=False)
    # Set in `guarded`: a copy of the initial state, and whether copies are in main memory.
    _begun: Snapshot | None = field(default=None, init=False, repr=False)
    _off_device: bool = field(default=False, init=False, repr=False)

    @user_code_boundary
    @reports_out_of_data
    def call(self, context: SpeedContext) -> object:
        """Run the step; return its result.

        Raises StepError if data runs out, or if the result is an awaitable or a new generator.
        """
        result = in_a_window(partial(self.run, context))
        refuse_unrun_result(result)
        return result

    def roots(self, scalers: Sequence[torch.amp.GradScaler] = ()) -> list[Any]:
        """Return the objects from which a walk reaches all state that the step can change."""
        space = [] if self.names is None else [Names(self.names, self.iterators, self.assigned)]
        others = [*self.others, *self.bystanders, *global_hooks()]
        return [*space, *others, *self.models, *self.optimizers, *scalers]

    def walk(self) -> Walk:
        """Return a walk over all state that the step can change."""
        return Walk(self.roots())

    def state(
        self, scalers: Sequence[torch.amp.GradScaler] = (), for_timing: bool = False
    ) -> Snapshot:
        """Return a copy of the current state that the step can change; see `Snapshot`."""
        return Snapshot(Walk(self.roots(scalers)), self._off_device, self._begun, for_timing)

    @contextmanager
    def guarded(self, off_device: bool = False) -> Iterator[MeasurementGuard]:
        """Yield a guard; undo the step's changes at the end. `rewind` works only in the block.

        With `off_device`, copies of the state are in main memory. Raises StepError while another
        step is measured or another thread trains a model. Warns of state that can't be restored.
        """
        guard = MeasurementGuard(self.roots(), self.models, self.tell, off_device)
        with guard:
            self._begun, self.rewind, self._off_device = guard.state, guard.rewind, off_device
            try:
                yield guard
            finally:
                self._begun, self.rewind, self._off_device = None, lambda: None, False

    def tell(self, lines: Sequence[str]) -> None:
        """Show each line to the user once."""
        for line in lines:
            if line not in self.said:
                self.said.append(line)
                self.say(line)

    def expressions(self, objects: Sequence[Any]) -> list[str]:
        """Return the code's expression for each object, such as `trainer.net`; '' if unknown."""
        walk = Walk(self.others if objects else ())
        return ["" if name.startswith("a ") else name for name in map(walk.name, objects)]

    @cached_property
    def model_names(self) -> list[str]:
        """Return distinct names of the models: expressions or classes, numbered if repeated."""
        found = list[str]()
        for model, word in zip(self.models, self.expressions(self.models), strict=True):
            name = word or type(unwrapped(model)).__name__
            found.append(f"{name} {len(found) + 1}" if name in found else name)
        return found

    def results(self) -> dict[str, Any]:
        space = self.names or {}
        return {name: space[name] for name in self.assigned if name in space and name != "ctx"}

    def holders(self, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        return reachable.holding(self.optimizers, model)

    def refuse_unfit(self, aim: str) -> None:
        """Raise StepError if models are missing or lazy, or if `run` needs more than `ctx`."""
        if not self.models:
            why = "no model with parameters is used in this step"
            raise StepError(f"{why}, so there is nothing to {aim}")
        refuse_unfit_call(self.run, [None])
        takes_one = arguments_of(self.run) == 1
        if takes_one and not {"ctx", "context", "_"} & {*inspect.signature(self.run).parameters}:
            raise StepError("a step takes no batch: use `lambda: step(batch)`, or the argument ctx")
        if any(map(has_lazy_parameters, (*self.models, *self.bystanders))):
            raise StepError("lazy layers have no shape yet: run one forward pass before")

    def on(self, *models: torch.nn.Module) -> Step:
        """Return a step with plans for `models` only. Raises StepError if none of them is used."""
        wanted = {id(unwrapped(model)) for model in models}
        same = [one for one in self.models if id(unwrapped(one)) in wanted]
        if not same:
            which = "this model" if len(models) == 1 else "these models"
            raise StepError(f"the step does not use {which}: measure a step that does")
        rest = [one for one in self.models if id(unwrapped(one)) not in wanted]
        return replace(self, models=same, bystanders=[*rest, *self.bystanders])


def refuse_unrun_result(result: Any) -> None:
    """Raise StepError for an awaitable, async generator or new generator: its code has not run.

    A coroutine is closed. Generator expressions are allowed: they usually iterate over results.
    """
    is_generator = is_a(result, GeneratorType) and result.gi_code.co_name != "<genexpr>"
    if is_generator and inspect.getgeneratorstate(result) == inspect.GEN_CREATED:
        kind, way = "a generator", "list({}())"
    elif is_a(result, Awaitable | AsyncGenerator):
        kind, way = f"an awaitable ({type(result).__name__})", "asyncio.run({}())"
    else:
        return
    if is_a(result, CoroutineType):
        result.close()  # avoids Python's warning about a coroutine that was never awaited
    raise StepError(
        f"the step returns {kind} that is never run: write the step as a plain function, or give "
        f"lambda: {way.format(getattr(result, '__name__', 'step'))}"
    )


# --- a function as a step ---


def step_of(
    step: Callable[..., object],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Step:
    """Return `step` as a Step; by default, with all models and optimizers that `step` reaches."""
    if not callable(step):
        raise StepError(f"the step must be a function, not {type(step).__name__}")
    takes_context = _takes_context(step)
    objects = reachable.reached([step])
    models = reachable.outermost(objects) if model is None else arguments.modules("model", model)
    given = [] if optimizer is None else arguments.optimizers("optimizer", optimizer)
    optimizers = reachable.optimizers_among(objects) if optimizer is None else each_once(given)
    return Step(
        step if takes_context else (lambda context: step()),
        models,
        optimizers,
        reachable.bystanders_among(objects, [*models, *optimizers]),
        others=[step],
    )


def refuse_unfit_call(step: Callable[..., object], given: Sequence[Any]) -> None:
    """Raise StepError if the signature of `step` does not fit these arguments."""
    with suppress(ValueError):  # some functions in C have no signature
        try:
            inspect.signature(step).bind(*given)
        except TypeError as error:
            name, number = getattr(step, "__name__", "the step"), count(len(given), "argument")
            raise StepError(f"{name} can't be called with {number}: {error}") from None


def _takes_context(step: Callable[..., object]) -> bool:
    """Return whether the first parameter takes the context: it is required, `*args` or `ctx`."""
    try:
        first = next(iter(inspect.signature(step).parameters.values()), None)
    except (TypeError, ValueError):  # some functions in C have no signature
        return False
    if first is None or first.kind in (first.VAR_KEYWORD, first.KEYWORD_ONLY):
        return False
    return first.default is first.empty or first.name == "ctx"


def over_batches(
    step: Callable[..., object], loader: DataLoader[Any] | None, name: str, advice: str
) -> Callable[..., object]:
    """Return `step` or, if it takes batches, a loop over `loader` (StepError if that is None)."""
    takes = arguments_of(step) if callable(step) else 0
    words = "a batch" if takes == 1 else f"{takes} arguments"
    # A single argument named ctx or context gets SpeedKit's context, not a batch.
    if not takes or (takes == 1 and {*inspect.signature(step).parameters} & {"ctx", "context"}):
        return step
    if loader is None:
        raise StepError(f"{name} takes {words}: {advice}, or name a function that takes none")
    return partial(loop, loader, step, takes > 1)


def loop(
    loader: DataLoader[Any], step: Callable[..., object] = lambda batch: None, spread: bool = False
) -> None:
    """Call `step` with each batch, unpacked if `spread`. Raises StepError without batches."""
    is_empty = True
    for batch in loader:
        given = batch if spread and isinstance(batch, tuple | list) else [batch]
        if is_empty:
            refuse_unfit_call(step, given)
        is_empty = False
        refuse_unrun_result(step(*given))
    if is_empty:
        raise StepError(EMPTY)


def arguments_of(step: Callable[..., object]) -> int:
    """Return the number of required positional arguments; 2 with `*args`, 1 if unknown."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return 1
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 2
    positional = (one for one in parameters if one.kind <= one.POSITIONAL_OR_KEYWORD)
    return sum(one.default is one.empty for one in positional)
