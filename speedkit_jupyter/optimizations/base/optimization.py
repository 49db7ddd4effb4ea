"""What every optimization is made of: a request, a decision, and how it is applied and undone."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from pydantic.fields import FieldInfo

from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.options import Fields, choices, fields_of
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.facts.model import Facts, OptimizerFacts
from speedkit_jupyter.support.alive import Alive
from speedkit_jupyter.support.wrappers import each_once, layers

if TYPE_CHECKING:
    import torch

Source = Literal["auto", "user", "env", "measured"]
Switch = Literal["auto", True, False]


class Effect(Enum):
    """What an optimization does to the numbers."""

    EXACT = "bit-equal results"
    ROUNDING = "lower precision or another order of summation"
    CHANGES_MODEL = "other arithmetic"


@dataclass(frozen=True)
class Decision:
    """One optimization's outcome.

    `value` is in the config's own words; `active` says whether applying changes anything;
    `declined` that something was asked for and not granted (or replaced by the nearest that
    works). `worth_measuring` is the value that may pay here and may cost: no rule turns it on,
    and None where there is none.

    Why: `rule` names the rule or the fact; `asked` says that it is done as it was asked; `measured`
    is the number that decided, and `variable` the environment variable. `hint` is what follows
    from it for the user. One of the first three is there. `evidence` is the table behind the
    number, row by row, where there is one.
    """

    name: str
    value: Any
    rule: str
    source: Source = "auto"
    active: bool = False
    declined: bool = False
    worth_measuring: Any = None
    details: Mapping[str, Any] = field(default_factory=dict)
    asked: bool = False
    measured: str = ""
    variable: str | None = None
    hint: str = ""
    evidence: tuple[Any, ...] = ()

    @property
    def why(self) -> str:
        """The reason without its hint; never empty."""
        first = self.measured or ("as asked" if self.asked else "")
        reason = "; ".join(filter(None, (first, self.rule)))
        if self.variable:
            reason += f" (the environment variable {self.variable} decides)"
        return reason

    @property
    def reason(self) -> str:
        """In words; never empty."""
        return "; ".join(filter(None, (self.why, self.hint)))


@dataclass(frozen=True)
class Request:
    """What is asked of one optimization: the config's value, where it came from, and the number
    that it was `measured` by.
    """

    name: str
    value: Any
    source: Source = "auto"
    variable: str | None = None
    measured: str = ""

    @property
    def explicit(self) -> bool:
        """Whether something definite was asked for, rather than left to SpeedKit."""
        value = self.value
        first = next(iter(dict(value).values())) if isinstance(value, Fields) else value
        return self.source != "auto" and first != "auto"

    def apply(self, value: Any, rule: str, **more: Any) -> Decision:
        """Do it, by this rule."""
        return self._decision(value, rule, active=True, **more)

    def obey(self, value: Any, rule: str = "", **more: Any) -> Decision:
        """Do it, since it was asked for."""
        return self._decision(value, rule, active=True, asked=True, **more)

    def leave(self, value: Any, rule: str = "", **more: Any) -> Decision:
        """Change nothing; `value` is what is in force without SpeedKit."""
        return self._decision(value, rule, **more)

    def offer(self, value: Any, worth_measuring: Any, rule: str, **more: Any) -> Decision:
        """Change nothing: what may pay and may cost waits until it is measured."""
        return self._decision(value, rule, worth_measuring=worth_measuring, **more)

    def decline(self, value: Any, rule: str, **more: Any) -> Decision:
        """Change nothing, although it was asked for."""
        return self._decision(value, rule, declined=self.explicit, **more)

    def _decision(self, value: Any, rule: str, **more: Any) -> Decision:
        more |= {"measured": self.measured, "variable": self.variable}
        return Decision(self.name, value, rule, source=self.source, **more)


class _Weakly:
    """A field that doesn't keep its value alive, nor what that wraps; None once all are gone."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __set__(self, holder: Any, value: Any) -> None:
        holder.__dict__[self._name] = [weakref.ref(layer) for layer in layers(value)]

    def __get__(self, holder: Any, owner: type) -> Any:
        if holder is None:  # asked by dataclass for a default
            raise AttributeError
        alive = (reference() for reference in holder.__dict__[self._name])
        return next((value for value in alive if value is not None), None)


@dataclass(eq=False)
class Memo:
    """What lives as long as a context, whether its plan is in force or hidden for a while.

    `autocast` is the dtype in the config's word while the plan has one; `autocast_entered`,
    whether a forward pass has run inside; `scales`, whether the GradScaler does. `compiled_call` is
    what a compiled model calls, `predicting` what one does that only predicts, `graphed` what is
    recorded of its calls, `twins` what multiplies in the stead of weights. `followed` says of each
    weight whether other tensors follow its memory, as it was when the plan first came to it.
    `calls` are the layers around the calls of modules. `strangers` are optimizers that were there
    before the plan, `met_later` those made after it, with their facts.
    """

    autocast: str | None = None
    autocast_entered: bool = False
    scales: bool = False
    steps_watched: bool = False
    compiled_call: Any = None
    predicting: Any = None
    graphed: Any = None
    twins: MutableMapping[torch.Tensor, Any] | None = None
    followed: MutableMapping[torch.Tensor, bool] | None = None
    calls: MutableMapping[torch.nn.Module, Any] = field(default_factory=weakref.WeakKeyDictionary)
    strangers: weakref.WeakSet[Any] | None = None
    met_later: weakref.WeakKeyDictionary[Any, OptimizerFacts] = field(
        default_factory=weakref.WeakKeyDictionary
    )


@dataclass(eq=False)
class Target:
    """What a plan is applied to: the model, and the optimizers behind their wrappers.

    It doesn't keep the model alive, whose plan ends with it.

    `memo` lives as long as the context; `notes` (by optimization) and `kept` (the flags that the
    user changed meanwhile, and that were left alone) reach the report. A benchmark, which steps
    its own optimizers only, switches `search` off; `made` are such as its step makes. With
    `remember` one search serves until `forget()`: for as long as no optimizer can be new.
    """

    model: torch.nn.Module = cast("torch.nn.Module", _Weakly())  # noqa: RUF009
    optimizers: Sequence[torch.optim.Optimizer] = ()
    memo: Memo = field(default_factory=Memo)
    notes: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    search: bool = True
    remember: bool = False
    made: tuple[OptimizerFacts, ...] = ()
    _found: list[torch.optim.Optimizer] | None = None

    def __post_init__(self) -> None:
        self.optimizers = each_once(self.optimizers)

    def let_go(self) -> None:
        """Keep no optimizer alive from now on; those that are there are still known."""
        self.optimizers = Alive(self.optimizers)

    @contextmanager
    def searched_once(self) -> Iterator[None]:
        """One search serves for the block, in which no optimizer is made."""
        around, self.remember = self.remember, True
        try:
            yield
        finally:
            if not around:
                self.forget()

    def forget(self) -> None:
        """Search anew from now on."""
        self.remember, self._found = False, None

    def live_optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer in the process that holds a parameter of the model.

        Some state must follow the parameters' layout and device although the user did not
        hand that optimizer over; so the garbage collector is asked (60 ms of 450,000 objects).
        """
        if self._found is not None:
            return list(self._found)
        optimizers = self._searched()
        self._found = optimizers if self.remember else None
        return optimizers

    def _searched(self) -> list[torch.optim.Optimizer]:
        import gc

        import torch

        candidates = [*self.optimizers]
        if not self.search:
            return candidates
        # By type: isinstance would ask proxies and lazy modules for their __class__. An instance
        # refers to its class, and the garbage collector finds that faster than a loop would.
        kinds = _subclasses(torch.optim.Optimizer)
        candidates += [
            optimizer for optimizer in gc.get_referrers(*kinds) if type(optimizer) in kinds
        ]
        parameters = self._parameters()
        return [optimizer for optimizer in each_once(candidates) if _holds(optimizer, parameters)]

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it holds a parameter of the model."""
        return _holds(optimizer, self._parameters())

    def _parameters(self) -> set[int]:
        return set() if self.model is None else {id(p) for p in self.model.parameters()}


def _subclasses(kind: type) -> set[type]:
    """The class and all below it."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _holds(optimizer: torch.optim.Optimizer, parameters: set[int]) -> bool:
    return any(id(p) in parameters for g in optimizer.param_groups for p in g["params"])


@contextmanager
def overridden(target: Target, names: Iterable[str], change: Callable[[], None]) -> Iterator[None]:
    """Process-wide flags set by `change` for the block; `names` are the flags that it sets."""
    layer = flags.OVERRIDES.push(names, change)
    try:
        yield
    finally:
        target.kept.extend(flags.OVERRIDES.pop(layer))


class Optimization(ABC):
    """One file, one class, one line in CATALOG; everything else derives from it.

    `Options` is the type of the config field (a pydantic model or annotation) and `default`
    its value; `variable` is the environment variable that wins over both, `SPEEDKIT_<NAME>`, and
    None where it has none. `follows` marks what
    another optimization needs: a plan that names only that one has it too. `costly` marks what
    takes seconds at the first step: a search tries it last. `excludes` are others beside which it
    does nothing. `free` stands for values that no word names (`threads:NUMBER`); where there are
    fields, for those of the field of that name (`compile:BACKEND`). `frameworks_choose` marks what
    Accelerate, Fabric or Trainer choose by themselves, so that they are told also what is as is.
    `library` is the optional one that it calls, by its name on PyPI: declined where it is missing.
    `helps`, `risk` and `undone` are what `%speedkit explain` says: where it pays, what it may do
    wrong, how it goes back; `page` is torch's own about it, or that of the `library`.
    """

    name: ClassVar[str]
    effect: ClassVar[Effect]
    summary: ClassVar[str]
    helps: ClassVar[str]
    risk: ClassVar[str]
    undone: ClassVar[str]
    page: ClassVar[str]
    Options: ClassVar[Any]
    default: ClassVar[Any] = "auto"
    aliases: ClassVar[tuple[str, ...]] = ()
    variable: ClassVar[str | None]
    follows: ClassVar[bool] = False
    costly: ClassVar[bool] = False
    excludes: ClassVar[frozenset[str]] = frozenset()
    free: ClassVar[str] = ""
    frameworks_choose: ClassVar[bool] = False
    library: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "variable" not in vars(cls):
            cls.variable = f"SPEEDKIT_{cls.name.upper()}"

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """The fields of its option by name, the bare word's first; none where it is one value."""
        return fields_of(self.Options)

    @property
    def paths(self) -> dict[str, Any]:
        """The annotation of each field by its path: `tf32`, `compile.enabled`, `compile.mode` …"""
        named = {f"{self.name}.{field}": info.annotation for field, info in self.fields.items()}
        return named or {self.name: self.Options}

    @property
    def words(self) -> tuple[str, ...]:
        """The words that its bare option takes, with true and false spelled out."""
        return choices(next(iter(self.paths.values())))

    def changes(self) -> dict[str, Any]:
        """The words that name a change in comparisons, each with the config's value for it."""
        changes: dict[str, Any] = {}
        for word in self.words:
            if word == "true":
                changes[self.name] = True
            elif word not in ("auto", "false"):
                changes[f"{self.name}:{word}"] = word
        first, *names = [*self.fields] or [""]
        for name in names:  # with words of their own, as compile's mode
            words = choices(self.fields[name].annotation)
            if "true" not in words:
                every = (word for word in words if word != "auto")
                changes |= {f"{self.name}:{word}": {first: True, name: word} for word in every}
        return changes

    def freely(self, value: Any) -> Any:
        """The config's value for one that no word names."""
        field = self.free.lower()
        return {next(iter(self.fields)): True, field: value} if field in self.fields else value

    @abstractmethod
    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide from records alone: reads no state of torch, so it plans for any machine."""

    def effect_of(self, decision: Decision, facts: Facts) -> Effect:
        """What this decision does to the numbers: where an entry has several parts, they decide."""
        return self.effect

    def as_is(self, facts: Facts) -> Any:
        """The value that stands for leaving everything as it is."""
        return False

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """The facts that later optimizations decide upon."""
        return facts

    @abstractmethod
    def applied(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        """Apply on entry; on exit put back exactly what was found, around the values."""

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """What must surround a forward pass: asked once when applied, called at every step."""
        return nullcontext

    @abstractmethod
    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """The same without SpeedKit, with the arguments of a framework where it has them.

        `facts` are those once the plan is applied. Raises SpeedKitError where a framework can't
        do it.
        """

    def switches(self) -> Mapping[str, flags.Switch]:
        """The process-wide switches that it owns, by the names that reports give them."""
        return {}

    def observe(self, target: Target) -> Mapping[str, Any]:
        """State of model and optimizers that this changes, for the before/after table."""
        return {}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """What flags and `observe` will say once this is applied, found without applying it.

        `facts` are those of the original state. The contract test compares this with what is
        so then.
        """
        return {}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Config values worth trying here, cheapest first."""
        return ()

    def saving(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """More of them where memory is what is aimed at: what saves some and costs time."""
        return ()
