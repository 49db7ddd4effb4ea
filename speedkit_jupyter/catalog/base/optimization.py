"""Base classes: Optimization for catalog entries, and Fields for options with named fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import torch
from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.target import Target, newcomers, overridden
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.calls import CALLS, Call
from speedkit_jupyter.catalog.model_changes.overrides import SWAPPED, Slots
from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.private import missing_name

Flag = Annotated[bool, Strict()]
BY_REQUEST = "changes the model's results, so it is applied on request only"


class Fields(BaseModel):
    """Options with named fields.

    A single word (`compile: false`) sets the first field. A word that only a later field allows
    (`compile: blocks`) sets that field, and sets the first field to true.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for info in cls.model_fields.values():
            info.description = info.description or ", ".join(choices(info.annotation))

    @model_validator(mode="before")
    @classmethod
    def _bare_word(cls, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value
        words = {name: choices(info.annotation) for name, info in cls.model_fields.items()}
        first, *others = words
        given = dict(value) if isinstance(value, Mapping) else {first: value}
        word = given.get(first)
        takers = [name for name in others if word in words[name]]
        if takers and takers[0] not in given and word not in words[first]:
            given |= {first: True, takers[0]: word}
        return given


def described(options: Any) -> Any:
    """Return the annotation with a Field; an added Field's description lists the allowed words."""
    if any(isinstance(one, FieldInfo) for one in getattr(options, "__metadata__", ())):
        return options
    return Annotated[options, Field(description=", ".join(choices(options)))]


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that an annotation allows: `true`, `false` for bool; none for int or str."""
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        words = get_args(annotation)
        return tuple(str(word).lower() if isinstance(word, bool) else str(word) for word in words)
    return tuple(word for part in get_args(annotation) for word in choices(part))


class Optimization(ABC):
    """An entry of CATALOG: its options, decisions, effects and equivalent torch code."""

    name: ClassVar[str]
    effect: ClassVar[Effect]
    # For `%speedkit explain`: idea, use, risk, and the documentation page of torch or the library.
    summary: ClassVar[str]
    helps: ClassVar[str]
    risk: ClassVar[str]
    page: ClassVar[str]
    Options: ClassVar[Any]  # type of the config field: a pydantic model, or an annotation
    fields: ClassVar[Mapping[str, FieldInfo]] = {}  # by name; empty for options without fields
    default: ClassVar[Any] = "auto"
    aliases: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[str] = ""  # name of the entry in front of which `add` puts this entry
    forms: ClassVar[Mapping[str, str]] = {}  # modules that write more forms of `code --as`, by form
    variable: ClassVar[str | None]  # environment variable, if any; default `SPEEDKIT_<NAME>`
    follows: ClassVar[bool] = False  # True if `auto` acts even in a config with `alone`
    costly: ClassVar[bool] = False  # True if the entry compiles code, which takes seconds
    excludes: ClassVar[frozenset[str]] = frozenset()  # entries never combined with this entry
    free: ClassVar[str] = ""  # placeholder in help for arbitrary values (`threads:NUMBER`)
    frameworks_choose: ClassVar[bool] = False  # True if Trainer code is needed even if inactive
    lowers: ClassVar[bool] = False  # True if the entry reduces the precision of products
    supersedes: ClassVar[frozenset[str]] = frozenset()  # entries replaced by this entry in a search
    rivals: ClassVar[bool] = False  # True if a search must compare values: none is best
    library: ClassVar[str] = ""  # PyPI name of the optional library that the entry calls
    bare: ClassVar[str] = ""  # value that the bare name sets in `--compare`, if not `true`
    none: ClassVar[Any] = False  # the value that changes nothing
    refusal: ClassVar[str] = ""  # words for the model in errors; if set, optimizers made later fail
    flag: ClassVar[str] = ""  # the process-wide flag that holds the field's value, if any
    line: ClassVar[str] = ""  # the equivalent line of torch code, with `{value}`

    def __init_subclass__(cls) -> None:
        if "Options" not in vars(cls):
            return
        if "variable" not in vars(cls):
            cls.variable = f"SPEEDKIT_{cls.name.upper()}"
        if isinstance(cls.Options, type) and issubclass(cls.Options, Fields):
            cls.default, cls.fields = cls.Options(), cls.Options.model_fields
        else:
            cls.Options = described(cls.Options)

    @property
    def paths(self) -> dict[str, Any]:
        """Return annotations by config path: `tf32` for an option, `sdpa.backend` for a field."""
        named = {f"{self.name}.{field}": info.annotation for field, info in self.fields.items()}
        return named or {self.name: self.Options}

    @property
    def words(self) -> tuple[str, ...]:
        """Return the allowed words of the option, or of its first field."""
        return choices(next(iter(self.paths.values())))

    def changes(self) -> dict[str, Any]:
        """Return the words for `--compare`, each with its config value."""
        changes: dict[str, Any] = {self.name: self.bare} if self.bare else {}
        for word in self.words:
            if word == "true":
                changes[self.name] = True
            elif word not in ("auto", "false"):
                changes[f"{self.name}:{word}"] = word
        first, *names = [*self.fields] or [""]
        for name in names:  # fields with their own words, such as compile's mode
            words = choices(self.fields[name].annotation)
            if "true" not in words:
                every = (word for word in words if word != "auto")
                changes |= {f"{self.name}:{word}": {first: True, name: word} for word in every}
        return changes

    @abstractmethod
    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Return the decision; use only the arguments, so that plans for other machines work."""

    def as_is(self, facts: Facts) -> Any:
        """Return the value that changes nothing: the flag's value in `facts`, or else `none`."""
        return facts.flags.get(self.flag, self.none)

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Return the facts as changed by a decision, for the optimizations that follow."""
        return facts

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        """Return the values to write to the flags, by name; `now` has the current values."""
        return {self.flag: decision.value} if self.flag else {}

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        """Return the wrappers to add around calls of modules."""
        return []

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        """Return replacements of parameters, submodules and methods, by owning module."""
        return {}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Apply the decision in the block, then undo it; trained values and user changes stay."""

        def refuse(optimizer: torch.optim.Optimizer) -> None:
            raise SpeedKitError(
                f"{type(optimizer).__name__} would train {self.refusal}: ctx.restore() or "
                "`%speedkit restore` first"
            )

        # No local variable may refer to the model, or the plan would keep the model alive.
        with (
            self.switched(decision, target),
            SWAPPED.overriding(list(self.stand_ins(decision, target).items())),
            CALLS.overriding([(call.module, call) for call in self.calls(decision, target)]),
            newcomers(target, target.live_optimizers(), refuse) if self.refusal else nullcontext(),
        ):
            yield

    def switched(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        """Return a context manager that sets and then restores the entry's process-wide flags."""
        own = self.process_flags()
        values = self.values(decision, {name: one.read() for name, one in own.items()})

        def change() -> None:
            for name, value in values.items():
                own[name].write(value)

        return overridden(target, tuple(values), change) if values else nullcontext()

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """Return a function that creates the context manager of `ctx.autocast` or `ctx.sdpa`."""
        return nullcontext

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return a decision's source code. Raises SpeedKitError if the framework can't apply it."""
        return Snippet(setup=(self.line.format(value=decision.value),))

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context manager for backward passes without gradient exchange between ranks."""
        return nullcontext()

    def process_flags(self) -> Mapping[str, flags.Flag]:
        """Return the optimization's process-wide flags by name."""
        return {}

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        """Return the state that the entry changes, by name; with `planned`, the expected state."""
        return {}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Return the entry's flags and observed state, by name, as expected under the decision."""
        return {**self.values(decision, facts.flags), **self.observe(target, decision)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Return config values worth trying on this hardware and model, best guess first."""
        return ()

    def fingerprint(self, model: torch.nn.Module) -> str:
        """Return a digest of the user's code that the entry calls; empty without such code."""
        return ""


def no_triton(hardware: Hardware, facts: Facts) -> str:
    """Return why Triton can't generate code; empty if it can or the device doesn't use Triton."""
    gpu, kind = hardware.accelerator(facts.device), devices.kind_of(facts.device)
    if kind is not None and kind.has_triton and not hardware.triton:
        triton = "triton-windows" if hardware.system == "Windows" else "triton"
        return f"no working Triton on {hardware.system}: pip install {triton}"
    if gpu is not None and gpu.is_nvidia and gpu.capability and gpu.capability < (7, 0):
        return f"Triton needs compute capability 7.0; {gpu.name} has {dotted(gpu.capability)}"
    return ""


def dotted(version: Iterable[int]) -> str:
    """Return a version or compute capability as text: `8.0` for (8, 0)."""
    return ".".join(map(str, version))


def call(function: str, *sources: str, **values: object) -> str:
    """Return a call as source: `sources` verbatim, then keyword arguments from `values`."""
    plain = {key: f'"{one}"' if isinstance(one, str) else one for key, one in values.items()}
    keywords = (f"{key}={value}" for key, value in plain.items())
    return f"{function}({', '.join([*sources, *keywords])})"


def decided(entry: Optimization, request: Request, hardware: Hardware, facts: Facts) -> Decision:
    """Return the decision; inactive if torch lacks an API, or a model change was not requested."""
    try:
        entry.process_flags()
        decision = entry.decide(request, hardware, facts)
    except (AttributeError, ImportError) as error:
        if not (missing := missing_name(error)):
            raise
        rule = f"torch {hardware.torch} has no {missing}, which this needs"
        return request.decline(entry.as_is(facts), rule, hint="a newer SpeedKit may know it")
    is_rules = decision.active or decision.worth_measuring is not None
    if entry.effect is Effect.CHANGES_MODEL and is_rules and not request.explicit:
        return request.leave(entry.as_is(facts), BY_REQUEST)
    return decision
