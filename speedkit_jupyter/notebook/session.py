"""What one notebook remembers: its config, the plans that it applied, the step that it measured."""

from __future__ import annotations

import gc
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary, ref

import torch

from speedkit_jupyter.plans import context
from speedkit_jupyter.plans.applying import applied_to, trained_by
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.step.discovery import holding
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.weak import Listeners
from speedkit_jupyter.support.wrappers import unwrapped

# The variable that a context gets.
CTX = "ctx"
# The elements of a longer list or dict get no words.
MOST_PARTS = 32


# --- the words of objects ---


def public(names: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the variables of a namespace that are the user's, with their names."""
    every = list((names or {}).items())
    return [pair for pair in every if pair[0][:1] != "_" and pair[0] not in ("In", "Out")]


def named(names: Mapping[str, Any] | None, kind: type, inside: bool = True) -> dict[str, Any]:
    """Return the objects of a class by the words that find them, each once.

    After the variables come those `inside` lists, dicts and the user's own objects, one level deep.
    """
    entries = public(names)
    parts = (
        (f"{name}{word}", value)
        for name, owner in entries
        if inside and not lookup.is_a(owner, ModuleType | type)
        for word, value in _parts_of(owner)
    )
    found: dict[int, tuple[str, Any]] = {}
    for name, value in itertools.chain(entries, parts):
        if lookup.is_a(value, kind):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    if type(owner) in {list, tuple} and len(owner) <= MOST_PARTS:
        yield from ((f"[{number}]", part) for number, part in enumerate(owner))
    elif type(owner) is dict and len(owner) <= MOST_PARTS:
        plain = ((key, part) for key, part in list(owner.items()) if type(key) in {str, int})
        yield from ((f"[{key!r}]", part) for key, part in plain)
    else:
        attributes = list(lookup.attributes_of(owner).items())
        yield from ((f".{key}", part) for key, part in attributes if str(key)[:1] != "_")


# --- the session ---


@dataclass(frozen=True)
class MeasuredCell:
    """The last `%%speedbench` cell: its first line, all of it, and what makes a step of it.

    That is made anew each time, so that no model is kept alive by having been measured.
    """

    title: str
    command: str
    step: Callable[[], Step]


@dataclass
class Found:
    """What tuning found last for a model: the config that `%speedkit apply WORDS` puts into force.

    `proof` says what it brings, if anything; `is_newer` until a plan is applied to the model.
    """

    config: SpeedConfig
    proof: str
    words: str = ""
    is_newer: bool = True

    @property
    def line(self) -> str:
        """The magic that puts it into force."""
        return f"`%speedkit apply {self.words}".rstrip() + "`"


class Session:
    """`names` is the notebook's namespace, if there is one.

    `listeners` are told "config", "measured" or "tuned" when one of them is another; `panels` holds
    what the panels of one model share, by the model's id; `last_advice` is what was advised last,
    `last_report` what a magic has measured last, with all of its notes, `search` the last `Tuning`.
    """

    def __init__(self, names: MutableMapping[str, Any] | None = None) -> None:
        self.names = names
        # With the word for the model that the user has typed.
        self._applied: list[tuple[str, SpeedContext]] = []
        self.last_advice: Any = None
        self.last_report: Any = None
        self.search: Any = None
        self.open_panel: Callable[..., Any] | None = None
        self.listeners = Listeners()
        self.panels: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # The last `%%speedbench` cell, and what applying starts from.
        self.measured: MeasuredCell | None = None
        self.reset()
        # By the id of a model, which may be one that has no hash.
        self._found: dict[int, tuple[ref[torch.nn.Module], Found]] = {}
        context.CHANGES.add(self._applied_or_restored)

    def __setattr__(self, name: str, value: Any) -> None:
        """Tell the listeners of another config, and of a cell that was measured."""
        super().__setattr__(name, value)
        if name in ("config", "measured"):
            self.listeners.tell(name)

    def reset(self) -> None:
        """Start from what the environment says. Raises ConfigError."""
        self.config = self._environment = SpeedConfig()

    def read_environment(self) -> None:
        """Read it anew, unless another config was loaded. Raises ConfigError."""
        if self.config is self._environment and self.config != SpeedConfig():
            self.reset()

    def tuned(self, models: Iterable[torch.nn.Module], found: Found) -> None:
        """Remember what a search has found for these models."""
        for model in models:
            self._found[id(unwrapped(model))] = (ref(unwrapped(model)), found)
        self.listeners.tell("tuned")

    def found_for(self, model: torch.nn.Module | None) -> Found | None:
        """Return what the last search of this session has found for a model; None without one."""
        whole = None if model is None else unwrapped(model)
        reference, found = self._found.get(id(whole), (None, None))
        return found if reference is not None and reference() is whole else None

    def _applied_or_restored(self, model: torch.nn.Module | None) -> None:
        found = self.found_for(model)
        if found is not None and model is not None and applied_to(model) is not None:
            found.is_newer = False

    def applied(self, names: Mapping[str, Any]) -> list[tuple[str, SpeedContext]]:
        """Return the contexts in force by the words of their models, marked where these changed."""
        contexts = [(word, applied_to(one)) for word, one in named(names, torch.nn.Module).items()]
        by_id = {id(one): (word, one) for word, one in contexts if one is not None}
        by_id |= {id(one): (word, one) for word, one in self._applied if not one.restored}
        return [
            (word if _means(names, word, one.model) else f"{word} (an earlier model)", one)
            for word, one in by_id.values()
        ]

    def keep(self, name: str, context: SpeedContext) -> str:
        """Remember an applied plan; return the variable of the notebook that its context gets."""
        variable = self._variable_for(name, context.model)
        others = (pair for pair in self._applied if pair[1].model is not context.model)
        self._applied = [*(pair for pair in others if not pair[1].restored), (name, context)]
        if self.names is not None:
            self.names[variable] = context
        return variable

    def _variable_for(self, name: str, model: torch.nn.Module) -> str:
        """Return `ctx` where it is free: another model's context and the user's variables stay."""
        names = {} if self.names is None else self.names
        own = "_".join([CTX, *re.findall(r"\w+", name)])
        if not is_free(names.get(CTX), model):
            gc.collect()  # an earlier model without a name may be waiting for it
        tried = itertools.chain((CTX, own), (f"{own}_{number}" for number in itertools.count(2)))
        return next(candidate for candidate in tried if is_free(names.get(candidate), model))

    def variable_of(self, context: SpeedContext) -> str:
        """Return the name that a context has in the notebook."""
        return next((name for name, value in public(self.names) if value is context), CTX)

    def name_of(self, model: torch.nn.Module, otherwise: str = "model") -> str:
        """Return the word by which the notebook finds a model: `net`, `models['lm']`."""
        words = named(self.names, torch.nn.Module).items()
        whole = unwrapped(model)
        return next((word for word, one in words if unwrapped(one) is whole), otherwise)

    def optimizers_of(self, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers that hold a parameter of the model, also those inside of objects;
        but not a Trainer's, which makes its own each time.
        """
        is_mine = not trained_by(model, self.names or {})
        return holding(named(self.names, torch.optim.Optimizer, is_mine).values(), model)


def is_free(value: Any, model: torch.nn.Module) -> bool:
    """Whether a variable may hold a new context of this model: nothing, or one that it replaces."""
    if type(value) is SpeedContext:
        return value.restored or value.model is model
    return value is None


def _means(names: Mapping[str, Any], word: str, model: torch.nn.Module) -> bool:
    try:
        return unwrapped(lookup.value_of(names, word)) is unwrapped(model)
    except SpeedKitError:  # a method's own variable, as `self.net`
        return "." in word


# State at module level, on purpose: plans and flags belong to the process, as one notebook does.
_CURRENT: list[Session] = []


def current(names: MutableMapping[str, Any] | None = None) -> Session:
    """Return the session of this process; `names` is the namespace for one that has none yet."""
    if not _CURRENT:
        _CURRENT.append(Session())
    if names is not None and _CURRENT[0].names is None:
        _CURRENT[0].names = names
    return _CURRENT[0]


def notebook() -> MutableMapping[str, Any] | None:
    """Return the namespace of the notebook that this runs in; None in a script."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return None if shell is None else shell.user_ns  # type: ignore[no-any-return]


def begin(names: MutableMapping[str, Any]) -> Session:
    """Return the session of a shell, and end another one's."""
    if current(names).names is not names:
        end()
    return current(names)


def end() -> None:
    """Forget the session, and stop what it measures between the cells."""
    for session in _CURRENT:
        for choice in list(session.panels.values()):
            choice.stop()
    _CURRENT.clear()
