"""What every entry of the catalog is: how it decides, is applied and undone, and its code."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from pydantic.fields import FieldInfo

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request
from speedkit_jupyter.catalog.base.options import Fields, choices, described
from speedkit_jupyter.catalog.base.snippet import Form, Snippet
from speedkit_jupyter.catalog.base.target import Target, newcomers, overridden
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.calls import CALLS, Call
from speedkit_jupyter.catalog.properties.swapped import SWAPPED, Slots
from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.private import missing_name

BY_REQUEST = "changes what the model computes, so it is there on request only"


class Optimization(ABC):
    """One file, one class, one line in CATALOG; everything else derives from it."""

    name: ClassVar[str]
    effect: ClassVar[Effect]
    # What `%speedkit explain` says: what it is, where it pays, what it may do wrong, how it goes
    # back, and torch's (or the library's) own page about it.
    summary: ClassVar[str]
    helps: ClassVar[str]
    risk: ClassVar[str]
    undone: ClassVar[str]
    page: ClassVar[str]
    Options: ClassVar[Any]  # type of the config field: a pydantic model, or an annotation
    fields: ClassVar[Mapping[str, FieldInfo]] = {}  # the bare word's first; none for one value
    default: ClassVar[Any] = "auto"
    aliases: ClassVar[tuple[str, ...]] = ()
    variable: ClassVar[str | None]  # environment variable that wins; `SPEEDKIT_<NAME>`, or none
    follows: ClassVar[bool] = False  # another one needs it: a plan that names only that has it too
    costly: ClassVar[bool] = False  # takes seconds at the first step: a search tries it last
    excludes: ClassVar[frozenset[str]] = frozenset()  # others beside which it does nothing
    free: ClassVar[str] = ""  # stands for values that no word names (`threads:NUMBER`)
    frameworks_choose: ClassVar[bool] = False  # a framework is told even to leave it
    lowers: ClassVar[bool] = False  # the precision of products
    rivals: ClassVar[bool] = False  # its values are a choice among equals
    library: ClassVar[str] = ""  # the optional one that it calls, by its name on PyPI
    bare: ClassVar[str] = ""  # the word that the name alone stands for, where it is not `true`
    none: ClassVar[Any] = False  # the value that changes nothing
    refusal: ClassVar[str] = ""  # what an optimizer that is made later would train, and may not
    flag: ClassVar[str] = ""  # the switch whose value is that of the field, where there is one

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
        """Return the annotation of each field by its path: `tf32`, `compile.enabled` …"""
        named = {f"{self.name}.{field}": info.annotation for field, info in self.fields.items()}
        return named or {self.name: self.Options}

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words that its bare option takes, with true and false spelled out."""
        return choices(next(iter(self.paths.values())))

    def changes(self) -> dict[str, Any]:
        """Return the words for changes in comparisons, each with the config's value."""
        changes: dict[str, Any] = {self.name: self.bare} if self.bare else {}
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

    @abstractmethod
    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide from records alone: reads no state of torch, so it plans for any machine."""

    def as_is(self, facts: Facts) -> Any:
        """Return the value that stands for leaving everything as it is."""
        return facts.flags.get(self.flag, self.none)

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Return the facts that later optimizations decide upon."""
        passes_by = decision.active and "compile" in self.excludes
        return replace(facts, passed_by=self.name) if passes_by else facts

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        """Return what it writes to its switches, of which `now` are the values in force."""
        return {self.flag: decision.value} if self.flag else {}

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        """Return the layers that it puts around the calls of modules."""
        return []

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        """Return what it puts in the places of parts of modules, by the modules that hold them."""
        return {}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Apply on entry; on exit put back exactly what was found, around the values."""

        def refuse(optimizer: torch.optim.Optimizer) -> None:
            raise SpeedKitError(
                f"{type(optimizer).__name__} would train {self.refusal}: ctx.restore() or "
                "`%speedkit restore` first"
            )

        # No name in here may hold the model: it would live as long as the plan.
        with (
            self.switched(decision, target),
            SWAPPED.overriding(list(self.stand_ins(decision, target).items())),
            CALLS.overriding([(call.module, call) for call in self.calls(decision, target)]),
            newcomers(target, target.live_optimizers(), refuse) if self.refusal else nullcontext(),
        ):
            yield

    def switched(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        """Return what sets its process-wide switches for a block."""
        switches = self.switches()
        values = self.values(decision, {name: one.read() for name, one in switches.items()})

        def change() -> None:
            for name, value in values.items():
                switches[name].write(value)

        return overridden(target, tuple(values), change) if values else nullcontext()

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """Return what makes the context around a forward pass, called at every step."""
        return nullcontext

    @abstractmethod
    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return the same without SpeedKit, with the arguments of a framework where it has them;
        `facts` are those under the plan. Raises SpeedKitError where a framework can't do it.
        """

    def switches(self) -> Mapping[str, flags.Switch]:
        """Return the process-wide switches that it owns, by the names that reports give them."""
        return {}

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        """Return the state that this changes, as it is, or once `planned` is applied."""
        return {}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Return what flags and `observe` say once this is applied to a model of these facts."""
        return {**self.values(decision, facts.flags), **self.observe(target, decision)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Return config values worth trying here, cheapest first."""
        return ()

    def fingerprint(self, model: torch.nn.Module) -> str:
        """Return a mark of code that is the user's own: what was learned with another is void."""
        return ""

    def saving(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Return further values where memory is the objective: they save some and cost time."""
        return ()


def lacks(hardware: Hardware, library: str, since: tuple[int, int]) -> str:
    """Return why this environment's `library` is of no use; empty where it is."""
    installed = hardware.libraries.get(library)
    if installed is None:
        return f"needs {library}: pip install {library}"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < since:
        return f"needs {library} {dotted(since)}; this is {installed}: pip install -U {library}"
    return ""


def imported(module: str) -> Any:
    """Return a library's module. Raises SpeedKitError where it can't be imported."""
    try:
        return import_module(module)
    except Exception as error:
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        library = module.partition(".")[0]
        raise SpeedKitError(f"{library} can't be imported: {first}") from None


def no_triton(hardware: Hardware, facts: Facts) -> str:
    """Return why Triton can't serve the model's device; empty where it can, or need not."""
    gpu, kind = hardware.accelerator(facts.device), devices.kind_of(facts.device)
    if kind is not None and kind.has_triton and not hardware.triton:
        triton = "triton-windows" if hardware.system == "Windows" else "triton"
        return f"no working Triton on {hardware.system}: pip install {triton}"
    if gpu is not None and gpu.is_nvidia and gpu.capability and gpu.capability < (7, 0):
        return f"Triton needs compute capability 7.0; {gpu.name} has {dotted(gpu.capability)}"
    return ""


def dotted(version: Iterable[int]) -> str:
    """Return `8.0` for (8, 0)."""
    return ".".join(map(str, version))


def decided(
    optimization: Optimization, request: Request, hardware: Hardware, facts: Facts
) -> Decision:
    """Return its decision; declined where torch has moved what it stands on. No rule turns on, or
    offers, what changes the model's arithmetic.
    """
    try:
        optimization.switches()
        decision = optimization.decide(request, hardware, facts)
    except (AttributeError, ImportError) as error:
        if not (missing := missing_name(error)):
            raise
        rule = f"torch {hardware.torch} has no {missing}, which this stands on"
        hint = "a newer SpeedKit may know it"
        return request.decline(optimization.as_is(facts), rule, hint=hint)
    is_rules = decision.active or decision.worth_measuring is not None
    if optimization.effect is Effect.CHANGES_MODEL and is_rules and not request.explicit:
        return request.leave(optimization.as_is(facts), BY_REQUEST)
    return decision
