"""What the forms of generated code share: a plan's snippets in their places, and optimizers."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.catalog import named as catalog_entry
from speedkit_jupyter.catalog.base.snippet import Form, Snippet
from speedkit_jupyter.catalog.facts.optimizers import OptimizerFacts
from speedkit_jupyter.codegen.training_loop import (
    INDENT,
    Block,
    ModelCall,
    indented,
    needs_closure,
    stepped,
)
from speedkit_jupyter.plans.planning import Plan, describe
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import each_once, unwrapped
from speedkit_jupyter.torchglue.modules import SCALES_IN_STEP

if TYPE_CHECKING:
    Optimizers = Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
    Named = Mapping[str, torch.optim.Optimizer | None]

WIDTH = 88  # of a comment
# As they follow one another in a script; a piece's reason stands at the first that it has.
PLACES = ("setup", "arguments", "model", "optimizers", "training", "compiled", "forward")
# Names that generated code gives to something else.
TAKEN = {
    "accelerator", "arguments", "attention", "batch", "batches", "block", "checkpoint", "closure",
    "compiled_model", "dist", "epoch", "fabric", "group", "inputs", "loader", "loss", "loss_fn",
    "losses", "module", "more", "name", "number", "one", "outputs", "rank", "ranks", "scaler",
    "shuffles", "size", "targets", "torch", "train", "train_dataset", "trainer",
}  # fmt: skip
# Strategies by which a process holds a part of each parameter.
SHARDED = ("fsdp2", "hybrid")
# What snippets call the model; the user's own word takes its place.
MODEL = "model"


@dataclass(frozen=True)
class Script:
    """A plan's snippets in the catalog's order, each with its decision's reason as `comment`.

    `optimizers` are the user's by name; None stands for one that only the facts know, and `words`
    are how the user writes those that are no plain variables. `call` is how the model is called,
    `model` the user's word for it. `own` are the optimizers that the code takes as they are.
    """

    plan: Plan
    snippets: tuple[Snippet, ...]
    optimizers: Named
    words: Mapping[str, str]
    call: ModelCall
    model: str
    own: frozenset[str] = frozenset()

    @property
    def own_name(self) -> bool:
        """Whether the code can call the model as the user does; else it begins with `model = …`."""
        return self.model.isidentifier() and self.model not in TAKEN

    @property
    def beginning(self) -> Block:
        """Variables for a model and optimizers that the user writes otherwise."""
        words = [] if self.own_name else [(MODEL, self.model)]
        words += [(name, word) for name, word in self.words.items() if name in self.own]
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
        """Return process-wide switches; those of torch.compile where the model is compiled."""
        compiling = self.blocks("compiling") if self.plan["compile"].active else []
        return [*self.blocks("setup"), *compiling]

    def facts_of(self, name: str) -> OptimizerFacts:
        return self.plan.facts.optimizers[list(self.optimizers).index(name)]

    def class_name(self, name: str) -> str:
        optimizer = self.optimizers[name]
        return self.facts_of(name).name if optimizer is None else type(optimizer).__name__

    def added(self, name: str) -> dict[str, str]:
        """Return the keyword arguments that the plan adds to one optimizer."""
        index = list(self.optimizers).index(name)
        every = [snippet.optimizers[index] for snippet in self.snippets if snippet.optimizers]
        return {key: value for added in every for key, value in added.items()}

    def surrounded(self, lines: Sequence[str]) -> Block:
        """Return the lines within everything that belongs around a forward pass."""
        managers = [manager for snippet in self.snippets for manager in snippet.forward]
        if not managers:
            return [*lines]
        return [*self.reasons("forward"), f"with {', '.join(managers)}:", *indented(lines)]


def gather(
    plan: Plan, form: Form, optimizers: Named, words: Mapping[str, str], call: ModelCall, model: str
) -> Script:
    """Return the code of every decision that the form has to say; raises SpeedKitError."""
    snippets, facts = [], plan.facts_after
    for decision in plan:
        optimization = catalog_entry(decision.name)
        told = optimization.frameworks_choose and form != "torch"
        if not decision.active and not told:
            continue
        snippet = optimization.code(decision, facts, form)
        if not decision.active:  # the batches lie where the model does already
            snippet = replace(snippet, batch="")
        if not optimizers and (snippet.optimizers or snippet.training):
            snippet = Snippet(f"{decision.reason} (for training only, so not in here)")
        reason = f"{decision.name}: {snippet.comment or decision.reason}"
        reason = reason.replace(f"`{MODEL}`", f"`{model}`")
        snippets.append(replace(snippet, comment=reason if decision.active else ""))
    return Script(plan, tuple(snippets), optimizers, words, call, model)


def _reason(snippet: Snippet, place: str) -> Block:
    """Return the reason as a comment, if it stands here: at the first place with code of it."""
    first = next((place for place in PLACES if getattr(snippet, place)), "arguments")
    return comment(snippet.comment, depth=place == "forward") if place == first else []


def _header(script: Script) -> Block:
    """Return what this was planned for, and the names that the code takes as given."""
    hardware = script.plan.hardware
    machine = describe(hardware, script.plan.facts_after.device)
    lines = comment(f"Planned by SpeedKit for {machine}, torch {hardware.torch}.")
    if not any(decision.active for decision in script.plan):
        lines += comment("Nothing is to be changed here: this is the plain loop.")
    words = [script.model, *(name for name in script.optimizers if name in script.own)]
    return [*lines, *comment(f"Yours: {', '.join(f'`{word}`' for word in words)}.")]


def function(script: Script, model: str, backward: str) -> Block:
    """Return `train_step`, or `predict` where there is no optimizer.

    `model` is what is called; `backward` the line that runs it, with `{loss}` for the loss.
    """
    move, call = "".join(snippet.batch for snippet in script.snippets), script.call
    if not script.optimizers:
        body = [*call.moved(move, False), *script.surrounded([f"return {call.of(model)}"])]
        return [f"def predict({call.given}):", *indented(body)]
    forward, optimizers = script.surrounded(call.loss(model)), [*script.optimizers]
    move_batch = call.moved(move, True)
    facts = script.plan.facts.optimizers
    pairs = zip(script.optimizers.values(), facts, strict=False)
    if any(needs_closure(optimizer, fact.name) for optimizer, fact in pairs):
        steps = [*stepped(forward, optimizers, backward, closure=True), "return losses[0]"]
    else:
        scaling = next((one for one in script.snippets if one.training), Snippet())
        after = [line for snippet in script.snippets for line in snippet.after_step]
        steps = stepped(forward, optimizers, backward, scaling.loss, scaling.step, after)
        steps.append("return loss.detach()")
    return [f"def train_step({call.arguments}):", *indented([*move_batch, *steps])]


def assembled(script: Script, blocks: Iterable[Block], function: Block, *imports_too: str) -> str:
    """Return the whole text: header, the imports that it needs, the blocks, the function."""
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
    """Return it with the user's own names, where these are names and not, say, `models[0]`."""
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


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return them as they were handed over, wrappers and all."""
    return list(optimizers.values() if isinstance(optimizers, Mapping) else optimizers)


def named(plan: Plan, optimizers: Optimizers) -> Named:
    """Return them, or None for those unknown, by the user's names or `optimizer_1` and so on."""
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
    """Return the user's words by the code's names, of what `names`, the notebook's, have."""
    words = {}
    for name in optimizers if isinstance(optimizers, Mapping) else ():
        with suppress(SpeedKitError):  # no word, or none of anything here
            word = lookup.canonical(name)
            if names is not None:
                lookup.value_of(names, name)
            words[_variable(name)] = word
    return words


def _variable(name: str) -> str:
    """Return a variable for it: the name itself, where it is one (`os_` is not `os`)."""
    word = re.sub(r"\W+", "_", name).strip("_")
    for variable in (name, word):
        if variable.isidentifier() and not iskeyword(variable) and variable not in TAKEN:
            return variable
    return f"optimizer_{word}".rstrip("_")


def taken_as_they_are(script: Script, given: Mapping[str, str]) -> frozenset[str]:
    """Return the `given` optimizers, those without a change, and those that one line can't make."""
    # Of a model in parts, an optimizer has to be made after the parts.
    sharded = script.plan["distributed"].value in SHARDED
    return frozenset(
        name
        for name in script.optimizers
        if name in given or not (script.added(name) or sharded) or not makeable(script, name)
    )


def makeable(script: Script, name: str) -> bool:
    """Return whether one line makes it: torch's own class, all parameters in one group."""
    optimizer = script.optimizers[name]
    if optimizer is None:
        return hasattr(torch.optim, script.class_name(name))
    kind, groups = type(optimizer), optimizer.param_groups
    own = kind.__module__.startswith("torch.optim") and hasattr(torch.optim, kind.__name__)
    size = sum(parameter.numel() for group in groups for parameter in group["params"])
    return own and len(groups) == 1 and size == script.plan.facts.parameters


def making(script: Script) -> Block:
    """Return the lines that make every optimizer, or switch those that only the user can make."""
    lines = script.reasons("optimizers")
    for name in script.optimizers:
        lines += _switched(script, name) if name in script.own else _made(script, name)
    return lines


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return those that differ from the class's own; as they were before any scheduler."""
    group = optimizer.param_groups[0]
    if "initial_lr" in group:  # a scheduler's; one that moves betas, too, leaves the defaults
        group = optimizer.defaults | {"lr": group["initial_lr"]}
    return {
        name: group[name]
        for name, parameter in signature(type(optimizer)).parameters.items()
        if name in group and name != "params" and repr(group[name]) != repr(parameter.default)
    }


def _made(script: Script, name: str) -> Block:
    optimizer, extra = script.optimizers[name], script.added(name)
    hint = [] if optimizer else comment("With your own learning rate and the rest.")
    values = {} if optimizer is None else _hyperparameters(optimizer)
    replaced = ("fused", "foreach") if "fused" in extra else ()
    own = {
        key: f"torch.tensor({value.item()!r})" if hasattr(value, "item") else repr(value)
        for key, value in values.items()
        if key not in replaced
    }
    arguments = ", ".join(filter(None, ["model.parameters()", keywords(own | extra)]))
    return [*hint, f"{name} = torch.optim.{script.class_name(name)}({arguments})"]


def _switched(script: Script, name: str) -> Block:
    extra, optimizer = script.added(name), script.optimizers[name]
    if not extra:
        return []
    has_begun = optimizer is not None and bool(optimizer.state)
    when = "" if has_begun else "before its first step and "
    text = f"This switches `{name}` ({script.class_name(name)}), {when}again after"
    if True in script.facts_of(name).foreach:
        extra["foreach"] = "False"
    lines = [
        *comment(f"{text} load_state_dict()."),
        f"for group in ({name}.defaults, *{name}.param_groups):",
        *indented(f'group["{key}"] = {value}' for key, value in extra.items()),
    ]
    if has_begun and script.plan.facts_after.device_type != "cpu":
        lines += comment("Its counts of steps go where the fused kernel wants them.")
        lines.append(f"{name}.load_state_dict({name}.state_dict())")
    if script.plan["grad_scaler"].active:
        lines += comment("Else the scaler would wait for the device before every step.")
        lines.append(f"{name}.{SCALES_IN_STEP} = True")
    return lines
