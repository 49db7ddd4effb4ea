"""The common part of all forms of generated code: a plan's snippets in order, and optimizers."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.catalog import named as catalog_entry
from speedkit_jupyter.catalog.base.decision import Form, Snippet
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.codegen.training_loop import (
    BY_CLOSURE,
    INDENT,
    Block,
    ModelCall,
    indented,
    stepped,
)
from speedkit_jupyter.plans.planning import Plan, describe
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import each_once, unwrapped
from speedkit_jupyter.torchglue.modules import SCALES_IN_STEP

if TYPE_CHECKING:
    Optimizers = Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]

# Columns of a comment, as many as formatters of Python allow by default.
WIDTH = 88
# Places of a script in order; a snippet's reason is written at the first place that has a line.
PLACES = ("setup", "arguments", "model", "optimizers", "training", "compiled", "forward")
# The model's name in generated code.
MODEL = "model"


@dataclass(frozen=True)
class ScriptOptimizer:
    """An optimizer of the plan in a script; `optimizer` is None if only its facts are known."""

    name: str  # a variable of the script
    optimizer: torch.optim.Optimizer | None
    facts: OptimizerFacts
    added: Mapping[str, str]  # keyword arguments that the plan adds
    makeable: bool  # by one line: torch's own class, all parameters in one group
    own: bool = True  # the user's object is used, not a new one
    word: str = ""  # the user's expression for it, if known


@dataclass(frozen=True)
class Script:
    """A plan's snippets in the catalog's order; `model` is the user's expression for the model."""

    plan: Plan
    snippets: tuple[Snippet, ...]
    optimizers: tuple[ScriptOptimizer, ...]
    call: ModelCall
    model: str

    @property
    def names(self) -> list[str]:
        """Return the variables of the optimizers."""
        return [one.name for one in self.optimizers]

    @property
    def own(self) -> list[str]:
        """Return the variables of the optimizers that are the user's objects."""
        return [one.name for one in self.optimizers if one.own]

    def header(self) -> Block:
        """Return comments: the plan's machine, and the names that the code takes as given."""
        hardware = self.plan.hardware
        machine = describe(hardware, self.plan.facts_after.device)
        lines = comment(f"Planned by SpeedKit for {machine}, torch {hardware.torch}.")
        if not any(decision.active for decision in self.plan):
            lines += comment("Nothing is to be changed here: this is the plain loop.")
        words = [self.model, *(one.word or one.name for one in self.optimizers if one.own)]
        return [*lines, *comment(f"Yours: {', '.join(f'`{word}`' for word in words)}.")]

    def beginning(self) -> Block:
        """Return the assignment of the user's model and optimizers to the script's variables."""
        pairs = [(MODEL, self.model)]
        pairs += [(one.name, one.word or one.name) for one in self.optimizers if one.own]
        changed = [pair for pair in pairs if pair[0] != pair[1]]
        return [" = ".join(map(", ".join, zip(*changed, strict=True)))] if changed else []

    def reasons(self, place: str) -> Block:
        return [line for snippet in self.snippets for line in _reason(snippet, place)]

    def blocks(self, place: str) -> list[Block]:
        """Return a block for each snippet with lines for this place."""
        pairs = [(snippet, getattr(snippet, place)) for snippet in self.snippets]
        return [[*_reason(snippet, place), *lines] for snippet, lines in pairs if lines]

    def setup(self) -> list[Block]:
        """Return process-wide switches, for a compiled model torch.compile's too."""
        compiling = self.blocks("compiling") if self.plan["compile"].active else []
        return [*self.blocks("setup"), *compiling]

    def surrounded(self, lines: Sequence[str]) -> Block:
        """Return the lines inside the context managers of a forward pass."""
        managers = [manager for snippet in self.snippets for manager in snippet.forward]
        if not managers:
            return [*lines]
        return [*self.reasons("forward"), f"with {', '.join(managers)}:", *indented(lines)]


def gather(
    plan: Plan,
    form: Form,
    optimizers: Optimizers,
    names: Mapping[str, Any] | None,
    call: ModelCall,
    model: str,
) -> Script:
    """Return the script of a plan. Raises SpeedKitError if a framework can't do the plan.

    The keys of `optimizers` are the user's expressions, which count if they are in `names`.
    """
    snippets, facts = [], plan.facts_after
    for decision in plan:
        optimization = catalog_entry(decision.name)
        told = optimization.frameworks_choose and form != "torch"
        if not decision.active and not told:
            continue
        snippet = optimization.code(decision, facts, form)
        if not plan.facts.optimizers and (snippet.optimizers or snippet.training):
            snippet = Snippet(f"{decision.reason} (for training only, so not in here)")
        reason = f"{decision.name}: {snippet.comment or decision.reason}"
        snippets.append(replace(snippet, comment=reason if decision.active else ""))
    each = _script_optimizers(plan, snippets, optimizers, names, form != "torch")
    return Script(plan, tuple(snippets), tuple(each), call, model)


def _script_optimizers(
    plan: Plan,
    snippets: Sequence[Snippet],
    given: Optimizers,
    names: Mapping[str, Any] | None,
    keeps_known: bool,
) -> list[ScriptOptimizer]:
    number = len(plan.facts.optimizers)
    words = [_word(name, names) for name in given] if isinstance(given, Mapping) else []
    every: Sequence[torch.optim.Optimizer | None] = (
        [*map(unwrapped, given.values())] if isinstance(given, Mapping) else each_once(given)
    )
    if every and len(every) != number:
        raise SpeedKitError(f"the plan was made with {number} optimizers, not {len(every)}")
    # An optimizer of a sharded model has to be made after the parts.
    sharded, found = plan["distributed"].value == "fsdp2", []
    for index, facts in enumerate(plan.facts.optimizers):
        parts = [snippet.optimizers[index] for snippet in snippets if snippet.optimizers]
        added = {key: value for pairs in parts for key, value in pairs.items()}
        optimizer, word = every[index] if every else None, words[index] if words else ""
        if facts.name == BY_CLOSURE:
            raise SpeedKitError(f"{BY_CLOSURE} steps by a closure: there is no code for it")
        makeable = _is_makeable(optimizer, facts.name, plan.facts.parameters)
        own = not (added or sharded) or not makeable or (keeps_known and bool(word))
        name = f"optimizer_{index + 1}" if number > 1 else "optimizer"
        found.append(ScriptOptimizer(name, optimizer, facts, added, makeable, own, word))
    return found


def _word(name: str, names: Mapping[str, Any] | None) -> str:
    """Return the user's expression for an optimizer; empty where `names` don't have it."""
    with suppress(SpeedKitError):
        if names is not None:
            lookup.value_of(names, name)
        return lookup.canonical(name)
    return ""


def _is_makeable(optimizer: torch.optim.Optimizer | None, name: str, parameters: int) -> bool:
    if optimizer is None:
        return hasattr(torch.optim, name)
    kind, groups = type(optimizer), optimizer.param_groups
    is_torchs = kind.__module__.startswith("torch.optim") and hasattr(torch.optim, kind.__name__)
    size = sum(parameter.numel() for group in groups for parameter in group["params"])
    return is_torchs and len(groups) == 1 and size == parameters


def _reason(snippet: Snippet, place: str) -> Block:
    """Return the snippet's reason as a comment if this is its first place with lines."""
    first = next((place for place in PLACES if getattr(snippet, place)), "arguments")
    return comment(snippet.comment, depth=place == "forward") if place == first else []


def function(script: Script, model: str) -> Block:
    """Return `train_step`, or `predict` without an optimizer; `model` is the variable to call."""
    move, call = "".join(snippet.batch for snippet in script.snippets), script.call
    if not script.optimizers:
        body = [*call.moved(move, False), *script.surrounded([f"return {call.of(model)}"])]
        return [f"def predict({call.given}):", *indented(body)]
    forward = script.surrounded(call.loss(model))
    scaling = next((one for one in script.snippets if one.training), Snippet())
    after = [line for snippet in script.snippets for line in snippet.after_step]
    steps = stepped(forward, script.names, scaling.loss, scaling.step, after)
    body = [*call.moved(move, True), *steps, "return loss.detach()"]
    return [f"def train_step({call.arguments}):", *indented(body)]


def assembled(script: Script, blocks: Iterable[Block], function: Block, *imports_too: str) -> str:
    """Return the whole text: header, needed imports, blocks, function."""
    body = [block for block in (script.beginning(), *blocks) if block]
    text = "\n".join(line for block in [*body, function] for line in block)
    imports = {line for snippet in script.snippets for line in snippet.imports} | {*imports_too}
    for module in ("torch", "torch.compiler.config"):
        if re.search(rf"^[^#\n]*\b{re.escape(module)}\.", text, re.MULTILINE):
            imports.add(f"import {module}")

    def is_package(line: str) -> bool:
        return line.split()[1].split(".")[0] not in sys.stdlib_module_names

    # The standard library's, then the others; `import` before `from`.
    ordered = sorted(imports, key=lambda line: (is_package(line), line.startswith("from"), line))
    groups = [script.header(), *(list(group) for _, group in groupby(ordered, is_package)), *body]
    return "\n\n".join("\n".join(group) for group in groups) + "\n\n\n" + "\n".join(function) + "\n"


def keywords(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def comment(text: str, depth: int = 0) -> Block:
    """Return comment lines that will be indented `depth` times."""
    columns = WIDTH - depth * len(INDENT) - len("# ")
    lines = textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def making(script: Script) -> Block:
    """Return the lines that make each optimizer, or switch one that only the user can make."""
    lines = script.reasons("optimizers")
    for one in script.optimizers:
        lines += _switched(script, one) if one.own else _made(one)
    return lines


def _made(one: ScriptOptimizer) -> Block:
    hint = [] if one.optimizer else comment("With your own learning rate and the rest.")
    values = {} if one.optimizer is None else _hyperparameters(one.optimizer)
    own = {
        key: f"torch.tensor({value.item()!r})" if hasattr(value, "item") else repr(value)
        for key, value in values.items()
        if "fused" not in one.added or key not in ("fused", "foreach")
    }
    arguments = ", ".join(filter(None, ["model.parameters()", keywords({**own, **one.added})]))
    return [*hint, f"{one.name} = torch.optim.{one.facts.name}({arguments})"]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the values that differ from the class's own, as before any scheduler."""
    group = optimizer.param_groups[0]
    if "initial_lr" in group:  # by a scheduler; one that moves betas too leaves the defaults
        group = optimizer.defaults | {"lr": group["initial_lr"]}
    return {
        name: group[name]
        for name, parameter in signature(type(optimizer)).parameters.items()
        if name in group and name != "params" and repr(group[name]) != repr(parameter.default)
    }


def _switched(script: Script, one: ScriptOptimizer) -> Block:
    """Return the lines that give the user's own optimizer the arguments that the plan adds."""
    if not one.added:
        return []
    foreach = {"foreach": "False"} if True in one.facts.foreach else {}
    when = "before its first step and again after load_state_dict()"
    lines = [
        *comment(f"This switches `{one.name}` ({one.facts.name}), {when}."),
        f"for group in ({one.name}.defaults, *{one.name}.param_groups):",
        *indented(f'group["{key}"] = {value}' for key, value in {**one.added, **foreach}.items()),
    ]
    has_begun = one.optimizer is not None and one.optimizer.state
    if has_begun and script.plan.facts_after.device_type != "cpu":
        lines += comment("The fused kernel takes counts of steps on its device.")
        lines.append(f"{one.name}.load_state_dict({one.name}.state_dict())")
    if script.plan["grad_scaler"].active:
        lines += comment("Else the scaler would wait for the device before every step.")
        lines.append(f"{one.name}.{SCALES_IN_STEP} = True")
    return lines
