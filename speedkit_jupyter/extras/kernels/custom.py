"""The user's own catalog entries: functions that replace the `forward` of a module class."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from keyword import iskeyword
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from pydantic.fields import FieldInfo

from speedkit_jupyter.catalog import CATALOG, add, find
from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.calls import has_own_forward
from speedkit_jupyter.catalog.model_changes.overrides import FORWARD, SWAPPED, Slots, StandIn
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.config import ALONE, WHEN_ADDED, FromCatalog, SpeedConfig
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import hide_internal_frames

F = TypeVar("F", bound=Callable[..., Any])
NAME = re.compile(r"[a-z][a-z0-9_]*")
# Reserved names: variants, `alone`, and options of `%speedkit apply` and `Tuning.apply`.
TAKEN = {"baseline", "current", "auto", ALONE, "model", "optimizer", "config", "rules", "likely"}


@hide_internal_frames
def optimization(name: str, *, replaces: type[torch.nn.Module]) -> Callable[[F], F]:
    """Return a decorator that registers a function as the optimization `name`.

    The function gets a module and the inputs of the module's call, and returns the result of the
    module's `forward`. For inputs that the function can't take, return the original result, such as
    `nn.LayerNorm.forward(module, x)`; `module(x)` would call the function again. A C++ or Triton
    kernel needs a backward function for gradients; see `torch.library.register_autograd`.

    The optimization is off until requested: by `%speedkit apply --my_layernorm true`, `--tune` or
    `SpeedConfig(my_layernorm=True)`. Running the cell again replaces the function; an applied plan
    keeps the earlier function.

    Args:
        name: The name in configs, options and variants: lower-case letters, digits and _.
        replaces: The module class whose `forward` is replaced, also in classes that inherit it.

    Returns:
        A decorator, which returns the function itself.

    Raises:
        ArgumentError: The name is taken or invalid, `replaces` is not a class of modules, or the
            decorated object is not a function.

    Example::

        @optimization("my_layernorm", replaces=nn.LayerNorm)
        def fast_layernorm(module, x):
            return my_kernel(x, module.weight, module.bias, module.eps)
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or iskeyword(name):
        example = "lower-case letters, digits and _, as in 'my_layernorm'"
        raise ArgumentError(f"{arguments.shown(name)} can't name an optimization: take {example}")
    is_word = any(name in entry.changes() for entry in CATALOG)
    is_taken = is_word or find(name) or name in TAKEN or hasattr(SpeedConfig, name)
    if is_taken and not isinstance(find(name), OwnKernel):
        raise ArgumentError(f"the name {name!r} is taken: choose another, as 'my_{name}'")
    if not (isinstance(replaces, type) and issubclass(replaces, torch.nn.Module)):
        given = arguments.shown(replaces)
        raise ArgumentError(f"replaces must be a class of modules, as nn.LayerNorm, not {given}")

    def register(function: F) -> F:
        if not isinstance(function, FunctionType):
            kind = type(function).__name__
            raise ArgumentError(f"{name}: decorate a function of (module, *inputs), not {kind}")
        forget(name)
        _add(OwnKernel.made(name, function, replaces))
        return function

    return register


def _add(entry: OwnKernel) -> None:
    """Add an optimization to the catalog and config classes; call the functions in WHEN_ADDED."""
    add(entry)
    options: Any = entry.Options
    for model in (FromCatalog, SpeedConfig):
        made = FieldInfo.from_annotated_attribute(options, entry.default)
        model.model_fields[entry.name] = made
        model.model_rebuild(force=True)
    setattr(SpeedConfig, entry.name, entry.default)
    for call in WHEN_ADDED:
        call(entry)


def forget(name: str) -> None:
    """Remove the user's optimization `name`, if any; built-in optimizations stay."""
    if isinstance(entry := find(name), OwnKernel):
        CATALOG.remove(entry)
        delattr(SpeedConfig, name)
        for model in (FromCatalog, SpeedConfig):
            del model.model_fields[name]
            model.model_rebuild(force=True)


class OwnKernel(Optimization):
    """Replace the `forward` of modules whose class is `replaces` or inherits its `forward`."""

    variable = None
    before = "malloc"  # precedes quantization, so that modules are still plain
    effect = Effect.ROUNDING
    helps = "if a benchmark says so: measure it"
    risk = "your own code: a benchmark checks its results and gradients against float64"
    page = "https://docs.pytorch.org/tutorials/advanced/custom_ops_landing_page.html"
    Options = Switch
    function: ClassVar[FunctionType]
    replaces: ClassVar[type[torch.nn.Module]]

    @staticmethod
    def made(name: str, function: FunctionType, replaces: type[torch.nn.Module]) -> OwnKernel:
        """Return the optimization for a function; the docstring's first line is the summary."""
        said = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
        own = {"name": name, "function": staticmethod(function), "replaces": replaces}
        own["summary"] = said or f"{function.__name__}() for {replaces.__name__}"
        own["__doc__"] = OwnKernel.__doc__
        kind: type[OwnKernel] = type("OwnKernel", (OwnKernel,), own)
        return kind()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        forward, why = self.replaces.forward, ""
        count = sum(n for kind, n in facts.classes.items() if kind.forward is forward)
        rule = f"{self.function.__name__}() for {count} {self.replaces.__name__}"
        if facts.compiled == "script":
            why = "the modules of TorchScript are compiled as they are"
        elif not count:
            why = f"the model has no {self.replaces.__name__}"
        return request.on_request(why, f"{rule}: yours, on request", rule)

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        places = list(self._places(target.model))
        every = [SWAPPED.current(module).get(FORWARD) for module in places]
        now = sum(one is not None and one.word == self.name for one in every)
        count = len(places) if planned is not None and planned.value else now
        words = f"in {count} of {len(places)} {self.replaces.__name__}"
        return {f"model.{self.name}": words} if places else {}

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        put = {FORWARD: StandIn(self.function, self.name)}
        return dict.fromkeys(self._places(target.model), put) if decision.value else {}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        kind, function = self.replaces, self.function
        is_torchs = getattr(torch.nn, kind.__name__, None) is kind
        word = f"torch.nn.{kind.__name__}" if is_torchs else kind.__name__
        others: list[Any] = [function] if is_torchs else [function, kind]
        places = [one for one in others if one.__module__ != "__main__"]
        imports = (f"from {one.__module__} import {one.__name__}" for one in places)
        lines = (
            "for module in model.modules():",
            f"    if type(module).forward is {word}.forward:",
            f"        module.forward = types.MethodType({function.__name__}, module)",
        )
        return Snippet(imports=("import types", *imports), model=lines)

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return (True,)  # a search skips plans without effect

    def fingerprint(self, model: torch.nn.Module) -> str:
        """Return the name and a digest of the function's code; "" if no module changes."""
        if not any(self._places(model)):
            return ""
        source = self.function.__code__.co_code.hex()
        with suppress(OSError, TypeError):
            source = inspect.getsource(self.function)
        return f"{self.name} {hashlib.sha256(source.encode()).hexdigest()}"

    def _places(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Yield the modules to change, except modules whose `forward` the user has replaced."""
        for module in model.modules():
            is_plain = not has_own_forward(module) or FORWARD in SWAPPED.current(module)
            if type(module).forward is self.replaces.forward and is_plain:
                yield module
