"""An entry for a user's function that replaces the `forward` of a class of modules."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.calls import has_own_forward
from speedkit_jupyter.catalog.properties.overrides import FORWARD, SWAPPED, Slots, StandIn
from speedkit_jupyter.machines.hardware import Hardware


class OwnKernel(Optimization):
    """Replaces the `forward` of all modules with the class's `forward`, inherited or not."""

    variable = None
    before = "malloc"  # so it sees plain modules, not quantized ones
    effect = Effect.ROUNDING
    helps = "if a benchmark says so: measure it"
    risk = "your own code: a benchmark checks its results and gradients against float64"
    page = "https://docs.pytorch.org/tutorials/advanced/custom_ops_landing_page.html"
    Options = Switch
    function: ClassVar[FunctionType]
    replaces: ClassVar[type[torch.nn.Module]]

    @staticmethod
    def made(name: str, function: FunctionType, replaces: type[torch.nn.Module]) -> OwnKernel:
        """Return an entry for a function; the first line of its docstring is the summary."""
        said = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
        own = {
            "name": name,
            "summary": said or f"{function.__name__}() for {replaces.__name__}",
            "function": staticmethod(function),
            "replaces": replaces,
        }
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
        """Return a digest of the function's source if the model has such modules."""
        if not any(self._places(model)):
            return ""
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            source = self.function.__code__.co_code.hex()
        return f"{self.name} {hashlib.sha256(source.encode()).hexdigest()}"

    def _places(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Yield the modules to change, without modules whose `forward` the user has set."""
        for module in model.modules():
            is_plain = not has_own_forward(module) or FORWARD in SWAPPED.current(module)
            if type(module).forward is self.replaces.forward and is_plain:
                yield module
