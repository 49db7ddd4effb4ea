"""The common part of all forms of generated code: a plan's snippets in order, and optimizers."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.catalog import named as catalog_entry
from speedkit_jupyter.catalog.base.decision import Form, Snippet
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.codegen import training_loop
from speedkit_jupyter.codegen.training_loop import INDENT, Block, ModelCall, indented, stepped
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
# Names that generated code gives to other objects.
TAKEN = {
    "accelerator", "arguments", "attention", "batch", "batches", "block", "checkpoint", "closure",
    "compiled_model", "dist", "epoch", "fabric", "group", "inputs", "loader", "loss", "loss_fn",
    "losses", "module", "more", "name", "number", "one", "outputs", "rank", "ranks", "scaler",
    "shuffles", "size", "targets", "torch", "train", "train_dataset", "trainer",
}  # fmt: skip
# Strategies by which a process holds a part of each parameter.
SHARDED = ("fsdp2", "hybrid")
# The model's name in snippets; the user's own name replaces it.
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

    @property
    def class_name(self) -> str:
        return self.facts.name if self.optimizer is None else type(self.optimizer).__name__

    @property
    def needs_closure(self) -> bool:
        return training_loop.needs_closure(self.optimizer, self.facts.name)


@dataclass(frozen=True)
class Script:
    """A plan's snippets in the catalog's order, each with its decision's reason as `comment`.

    `call` is the way to call the model, and `model` the user's expression for it.
    """

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

    @property
    def own_name(self) -> bool:
        """Return whether the user's expression for the model is a usable variable."""
        return self.model.isidentifier() and self.model not in TAKEN

    @property
    def beginning(self) -> Block:
        """Return assignments for a model and optimizers whose expressions are no variables."""
        words = [] if self.own_name else [(MODEL, self.model)]
        words += [(one.name, one.word) for one in self.optimizers if one.own and one.word]
        return [f"{name} = {word}" for name, word in words if name != word]

    @property
    def arguments(self) -> dict[str, str]:
        return {k: v for snippet in self.snippets for k, v in snippet.arguments.items()}

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
    optimizers: Mapping[str, torch.optim.Optimizer | None],
    words: Mapping[str, str],
    call: ModelCall,
    model: str,
) -> Script:
    """Return the script of a plan. Raises SpeedKitError if a framework can't do the plan.

    `optimizers` are the plan's by variable (None if only facts are known), `words` the user's
    expressions for them, `call` the way to call the model, `model` the user's expression for it.
    """
    snippets, facts = [], plan.facts_after
    for decision in plan:
        optimization = catalog_entry(decision.name)
        told = optimization.frameworks_choose and form != "torch"
        if not decision.active and not told:
            continue
        snippet = optimization.code(decision, facts, form)
        if not decision.active:  # the batches are on the model's device already
            snippet = replace(snippet, batch="")
        if not optimizers and (snippet.optimizers or snippet.training):
            snippet = Snippet(f"{decision.reason} (for training only, so not in here)")
        reason = f"{decision.name}: {snippet.comment or decision.reason}"
        reason = reason.replace(f"`{MODEL}`", f"`{model}`")
        snippets.append(replace(snippet, comment=reason if decision.active else ""))
    each = _script_optimizers(plan, snippets, optimizers, words, form != "torch")
    return Script(plan, tuple(snippets), tuple(each), call, model)


def _script_optimizers(
    plan: Plan,
    snippets: Sequence[Snippet],
    optimizers: Mapping[str, torch.optim.Optimizer | None],
    words: Mapping[str, str],
    keeps_known: bool,
) -> Iterator[ScriptOptimizer]:
    # An optimizer of a sharded model has to be made after the parts.
    sharded = plan["distributed"].value in SHARDED
    for index, (name, optimizer) in enumerate(optimizers.items()):
        every = [snippet.optimizers[index] for snippet in snippets if snippet.optimizers]
        added = {key: value for pairs in every for key, value in pairs.items()}
        facts = plan.facts.optimizers[index]
        makeable = _is_makeable(optimizer, facts.name, plan.facts.parameters)
        own = not (added or sharded) or not makeable or (keeps_known and name in words)
        yield ScriptOptimizer(name, optimizer, facts, added, makeable, own, words.get(name, ""))


def _is_makeable(optimizer: torch.optim.Optimizer | None, name: str, parameters: int) -> bool:
    """Return whether one line makes it: torch's own class, all parameters in one group."""
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


def _header(script: Script) -> Block:
    """Return the machine of the plan, and the names that the code takes as given."""
    hardware = script.plan.hardware
    machine = describe(hardware, script.plan.facts_after.device)
    lines = comment(f"Planned by SpeedKit for {machine}, torch {hardware.torch}.")
    if not any(decision.active for decision in script.plan):
        lines += comment("Nothing is to be changed here: this is the plain loop.")
    words = ", ".join(f"`{word}`" for word in [script.model, *script.own])
    return [*lines, *comment(f"Yours: {words}.")]


def function(script: Script, model: str, backward: str) -> Block:
    """Return `train_step`, or `predict` without an optimizer.

    `model` is the variable to call, `backward` the backward pass with `{loss}` for the loss.
    """
    move, call = "".join(snippet.batch for snippet in script.snippets), script.call
    if not script.optimizers:
        body = [*call.moved(move, False), *script.surrounded([f"return {call.of(model)}"])]
        return [f"def predict({call.given}):", *indented(body)]
    forward = script.surrounded(call.loss(model))
    if any(one.needs_closure for one in script.optimizers):
        steps = [*stepped(forward, script.names, backward, closure=True), "return losses[0]"]
    else:
        scaling = next((one for one in script.snippets if one.training), Snippet())
        after = [line for snippet in script.snippets for line in snippet.after_step]
        steps = stepped(forward, script.names, backward, scaling.loss, scaling.step, after)
        steps.append("return loss.detach()")
    return [f"def train_step({call.arguments}):", *indented([*call.moved(move, True), *steps])]


def assembled(script: Script, blocks: Iterable[Block], function: Block, *imports_too: str) -> str:
    """Return the whole text: header, needed imports, blocks, function."""
    parts = [block for block in (script.beginning, *blocks, function) if block]
    *body, function = [[_worded(line, script) for line in block] for block in parts]
    text = "\n".join(line for block in [*body, function] for line in block)
    imports = {line for snippet in script.snippets for line in snippet.imports} | {*imports_too}
    for module in ("torch", "torch.compiler.config"):
        if re.search(rf"^[^#\n]*\b{re.escape(module)}\.", text, re.MULTILINE):
            imports.add(f"import {module}")
    # The standard library's, then the others; `import` before `from`.
    ordered = sorted(imports, key=lambda line: (line.startswith("from"), line))
    standard = [x for x in ordered if x.split()[1].split(".")[0] in sys.stdlib_module_names]
    packages = [line for line in ordered if line not in standard]
    groups = [_header(script), *filter(None, (standard, packages)), *body]
    return "\n\n".join("\n".join(group) for group in groups) + "\n\n\n" + "\n".join(function) + "\n"


def _worded(line: str, script: Script) -> str:
    """Return the line with the user's name for the model, if that is a variable."""
    if line.lstrip().startswith("#") or not script.own_name:
        return line
    return re.sub(rf"(?<![\w.\"]){MODEL}\b(?!=[^=])", script.model, line)


def keywords(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def comment(text: str, depth: int = 0) -> Block:
    """Return comment lines that will be indented `depth` times."""
    columns = WIDTH - depth * len(INDENT) - len("# ")
    lines = textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def named(plan: Plan, optimizers: Optimizers) -> dict[str, torch.optim.Optimizer | None]:
    """Return the plan's optimizers by the user's names, or by `optimizer_1` and so on.

    Raises SpeedKitError for another number of optimizers than the plan has.
    """
    number = len(plan.facts.optimizers)
    given = optimizers if isinstance(optimizers, Mapping) else each_once(optimizers)
    if given and len(given) != number:
        raise SpeedKitError(f"the plan was made with {number} optimizers, not {len(given)}")
    if isinstance(given, Mapping):
        return {_variable(name): unwrapped(optimizer) for name, optimizer in given.items()}
    names = ["optimizer"] if number == 1 else [f"optimizer_{i + 1}" for i in range(number)]
    values: Sequence[torch.optim.Optimizer | None] = given or [None] * number
    return dict(zip(names, values, strict=True))


def words_of(optimizers: Optimizers, names: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the user's expressions by variable, for the optimizers that `names` contain."""
    words = {}
    for name in optimizers if isinstance(optimizers, Mapping) else ():
        with suppress(SpeedKitError):  # not an expression, or not one of these names
            word = lookup.canonical(name)
            if names is not None:
                lookup.value_of(names, name)
            words[_variable(name)] = word
    return words


def _variable(name: str) -> str:
    """Return a variable for an expression: the name itself, if possible (`os_` is not `os`)."""
    word = re.sub(r"\W+", "_", name).strip("_")
    for variable in (name, word):
        if variable.isidentifier() and not iskeyword(variable) and variable not in TAKEN:
            return variable
    return f"optimizer_{word}".rstrip("_")


def making(script: Script) -> Block:
    """Return the lines that make each optimizer, or switch one that only the user can make."""
    lines = script.reasons("optimizers")
    for one in script.optimizers:
        lines += _switched(script, one) if one.own else _made(one)
    return lines


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


def _made(one: ScriptOptimizer) -> Block:
    hint = [] if one.optimizer else comment("With your own learning rate and the rest.")
    values = {} if one.optimizer is None else _hyperparameters(one.optimizer)
    replaced = ("fused", "foreach") if "fused" in one.added else ()
    own = {
        key: f"torch.tensor({value.item()!r})" if hasattr(value, "item") else repr(value)
        for key, value in values.items()
        if key not in replaced
    }
    arguments = ", ".join(filter(None, ["model.parameters()", keywords({**own, **one.added})]))
    return [*hint, f"{one.name} = torch.optim.{one.class_name}({arguments})"]


def _switched(script: Script, one: ScriptOptimizer) -> Block:
    if not one.added:
        return []
    name, foreach = one.name, {"foreach": "False"} if True in one.facts.foreach else {}
    has_begun = one.optimizer is not None and bool(one.optimizer.state)
    when = "" if has_begun else "before its first step and "
    text = f"This switches `{name}` ({one.class_name}), {when}again after load_state_dict()."
    settings = {**one.added, **foreach}
    lines = [
        *comment(text),
        f"for group in ({name}.defaults, *{name}.param_groups):",
        *indented(f'group["{key}"] = {value}' for key, value in settings.items()),
    ]
    if has_begun and script.plan.facts_after.device_type != "cpu":
        lines += comment("Its counts of steps go where the fused kernel wants them.")
        lines.append(f"{name}.load_state_dict({name}.state_dict())")
    if script.plan["grad_scaler"].active:
        lines += comment("Else the scaler would wait for the device before every step.")
        lines.append(f"{name}.{SCALES_IN_STEP} = True")
    return lines
