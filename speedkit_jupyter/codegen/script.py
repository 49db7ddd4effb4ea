"""Build the parts that all forms of code share: header, model call, snippets, optimizers."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.catalog import named as catalog_entry
from speedkit_jupyter.catalog.base.decision import Form, Snippet
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.catalog.model_changes.calls import parts_called
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.wrappers import each_once, layers, unwrapped
from speedkit_jupyter.torchglue.private import TREE_MAP_IMPORT

if TYPE_CHECKING:
    Optimizers = Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]

# Width of comments in columns: the default line length of Black and Ruff.
WIDTH = 88
# The model's name in generated code.
MODEL = "model"
Block = list[str]
INDENT = "    "
PASSED_ON = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}
# Inputs of a call: one tensor, several positional tensors, or keyword arguments.
ONE, SEVERAL, BATCH = "inputs", "*inputs", "**batch"
LIGHTNING = ("loss = {model}.training_step(batch, 0)",)
# Models that take labels return a dict or an output of transformers, which is indexed like a dict.
LABELS = ('loss = {call}["loss"]',)
# torch's optimizer whose `step` needs a closure that calls the model.
BY_CLOSURE = "LBFGS"


def indented(lines: Iterable[str]) -> Block:
    return [f"{INDENT}{line}" if line else "" for line in lines]


@dataclass(frozen=True)
class ModelCall:
    """The call of the model in a script; `inputs` is ONE, SEVERAL or BATCH.

    `own_loss` has the lines for a model that computes its loss from the batch. If empty, a loss
    function compares the result with `targets`.
    """

    inputs: str = ONE
    own_loss: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()  # expressions of parts that methods other than `forward` call

    @property
    def given(self) -> str:
        return self.inputs.strip("*")

    @property
    def arguments(self) -> str:
        return "batch" if self.own_loss else f"{self.given}, targets, loss_fn"

    def of(self, model: str) -> str:
        return f"{model}({self.inputs})"

    def loss(self, model: str) -> Block:
        call = self.of(model)
        own = [line.format(model=model, call=call) for line in self.own_loss]
        return own or [f"loss = loss_fn({call}, targets)"]

    def moved(self, to: str, trains: bool) -> Block:
        """Return the line that calls `to` on inputs and (if `trains`) targets; [] without `to`."""
        names = ["batch"] if trains and self.own_loss else [self.given, *["targets"] * trains]
        joined = ", ".join(names)
        if not to:
            return []
        if self.inputs == ONE and not self.own_loss:
            return [f"{joined} = {', '.join(f'{name}{to}' for name in names)}"]
        # transformers' batches are dict-like objects that `tree_map_only` does not traverse.
        given = joined.replace("batch", "{**batch}") if self.inputs == BATCH else joined
        return [f"{joined} = tree_map_only(torch.Tensor, lambda one: one{to}, ({given}))"]


def call_of(model: torch.nn.Module | None) -> ModelCall:
    """Return the call that fits a model's class and `forward`; by default `model(inputs)`."""
    parts = () if model is None else parts_called(layers(model)[-1])
    return replace(_call_of(model), parts=tuple(called for called, _ in parts))


def _call_of(model: torch.nn.Module | None) -> ModelCall:
    parameters = _parameters(model)
    if _is_a(model, "LightningModule"):
        return ModelCall(own_loss=LIGHTNING)
    if "labels" in (parameters or ()):
        return ModelCall(BATCH, LABELS)
    required = [one for one in (parameters or {}).values() if one.default is one.empty]
    if _is_a(model, "PreTrainedModel") or any(one.kind is one.KEYWORD_ONLY for one in required):
        return ModelCall(BATCH)
    plain = [one for one in required if one.kind <= one.POSITIONAL_OR_KEYWORD]
    return ModelCall(SEVERAL if len(plain) > 1 or parameters == {} else ONE)


def _parameters(model: Any) -> Mapping[str, Parameter] | None:
    """Return the parameters of the outermost `forward` that isn't `(*args, **kwargs)`, or None."""
    for layer in layers(model):
        try:
            parameters = dict(signature(layer.forward).parameters)
        except (AttributeError, TypeError, ValueError):
            return None
        kinds = {parameter.kind for parameter in parameters.values()}
        if not parameters or kinds - PASSED_ON:
            return parameters
    return None


def _is_a(model: Any, name: str) -> bool:
    """Return whether a class or base class of the (wrapped) model has this name; import nothing."""
    return any(base.__name__ == name for layer in layers(model) for base in type(layer).__mro__)


@dataclass(frozen=True)
class ScriptOptimizer:
    """An optimizer in a script; `optimizer` is None if only its facts are known."""

    name: str  # the script's variable
    optimizer: torch.optim.Optimizer | None
    facts: OptimizerFacts
    added: Mapping[str, str]  # keyword arguments that the plan adds
    makeable: bool  # one line can create it: torch's own class, all parameters in one group
    own: bool = True  # True if the script uses the user's object, not a new one
    word: str = ""  # the user's expression for the optimizer, if known


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
        return [one.name for one in self.optimizers]

    @property
    def own(self) -> list[str]:
        """Return the script's variables of optimizers that the user creates."""
        return [one.name for one in self.optimizers if one.own]

    def _words(self) -> dict[str, str]:
        """Map the script's variables to the user's expressions."""
        own = {one.name: one.word or one.name for one in self.optimizers if one.own}
        return {MODEL: self.model, **own}

    def header(self) -> Block:
        """Return comments: the machine, each reason, and the names that the user must define."""
        hardware = self.plan.hardware
        machine = hardware.describe(self.plan.facts_after.device)
        reasons = [one.comment for one in self.snippets if one.comment]
        lines = [
            f"Planned by SpeedKit for {machine}, torch {hardware.torch}.",
            *(reasons or ["The plan changes nothing here: this is the plain loop."]),
            f"Yours: {', '.join(f'`{word}`' for word in self._words().values())}.",
        ]
        return [part for line in lines for part in comment(line)]

    def beginning(self) -> Block:
        """Return a line, if needed, that assigns the user's objects to the script's variables."""
        changed = [pair for pair in self._words().items() if pair[0] != pair[1]]
        return [" = ".join(map(", ".join, zip(*changed, strict=True)))] if changed else []

    def blocks(self, place: str) -> list[Block]:
        """Return the snippets' lines for a place, such as `setup`, as a block for each."""
        return [[*lines] for snippet in self.snippets if (lines := getattr(snippet, place))]

    def setup(self) -> list[Block]:
        """Return blocks that set process-wide flags, and compiler flags if the plan compiles."""
        compiling = self.blocks("compiling") if self.plan["compile"].active else []
        return [*self.blocks("setup"), *compiling]

    def lowered(self, model: str) -> Block:
        """Return lines that replace `forward` of the model and of parts that its methods call."""
        functions = [*filter(None, (snippet.changes_forward for snippet in self.snippets))]
        if not self.call.parts:
            return [f"{name}({model})" for name in functions]
        modules = indented(textwrap.wrap(", ".join((model, *self.call.parts)), WIDTH - 4))
        around = ["for module in (", *modules, "):"]
        return [*around, *(f"    {name}(module)" for name in functions)] if functions else []

    def surrounded(self, lines: Sequence[str]) -> Block:
        """Return `lines`, inside the snippets' context managers for the forward pass, if any."""
        managers = [manager for snippet in self.snippets for manager in snippet.forward]
        return [f"with {', '.join(managers)}:", *indented(lines)] if managers else [*lines]


def gather(
    plan: Plan,
    form: Form,
    optimizers: Optimizers,
    names: Mapping[str, Any] | None,
    call: ModelCall,
    model: str,
) -> Script:
    """Return a plan's script. Raises SpeedKitError if `form` or `optimizers` don't fit the plan.

    Keys of `optimizers` are the user's expressions; keys that `names` lacks are not used.
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
    named = given.items() if isinstance(given, Mapping) else (("", one) for one in each_once(given))
    every: list[Any] = [(_word(name, names), unwrapped(one)) for name, one in named]
    if every and len(every) != number:
        raise SpeedKitError(f"the plan was made with {number} optimizers, not {len(every)}")
    found, replaced = [], any(snippet.replaces_parameters for snippet in snippets)
    for index, facts in enumerate(plan.facts.optimizers):
        word, optimizer = every[index] if every else ("", None)
        parts = [snippet.optimizers[index] for snippet in snippets if snippet.optimizers]
        added = {key: value for pairs in parts for key, value in pairs.items()}
        if facts.name == BY_CLOSURE:
            raise SpeedKitError(f"{BY_CLOSURE} steps by a closure: there is no code for it")
        makeable = _is_makeable(optimizer, facts.name, plan.facts.parameters)
        own = not (added or replaced) or not makeable or (keeps_known and bool(word))
        name = f"optimizer_{index + 1}" if number > 1 else "optimizer"
        found.append(ScriptOptimizer(name, optimizer, facts, added, makeable, own, word))
    return found


def _word(name: str, names: Mapping[str, Any] | None) -> str:
    """Return the user's expression for an optimizer; empty if invalid or undefined in `names`."""
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


def function(script: Script, model: str) -> Block:
    """Return the source of `train_step` or, without an optimizer, of `predict`.

    `model` is the variable to call.
    """
    move, call = "".join(snippet.batch for snippet in script.snippets), script.call
    if not script.optimizers:
        body = [*call.moved(move, False), *script.surrounded([f"return {call.of(model)}"])]
        later = comment("With an optimizer (--optimizer) this is a training step.")
        trains = later if script.plan.facts.training else []
        return [*trains, f"def predict({call.given}):", *indented(body)]
    scaling = next((one for one in script.snippets if one.after_step), Snippet())
    steps = [scaling.step.format(optimizer=name) for name in script.names]
    if scaling.after_step:
        unscaled = ", ".join(f"scaler.unscale_({name})" for name in script.names)
        steps.insert(0, f"# To clip gradients: {unscaled} and then clip, here.")
    body = [
        *call.moved(move, True), *script.surrounded(call.loss(model)),
        f"{scaling.loss}.backward()", *steps, *scaling.after_step,
        *(f"{name}.zero_grad()" for name in script.names), "return loss.detach()",
    ]  # fmt: skip
    return [f"def train_step({call.arguments}):", *indented(body)]


def assembled(script: Script, blocks: Iterable[Block], function: Block, *imports_too: str) -> str:
    """Return the whole script: header, required imports, blocks, function."""
    body = [block for block in (script.beginning(), *blocks) if block]
    text = "\n".join(line for block in [*body, function] for line in block)
    imports = {line for snippet in script.snippets for line in snippet.imports} | {*imports_too}
    if "tree_map_only(" in text:
        imports.add(TREE_MAP_IMPORT)
    for module in ("torch", "torch.compiler.config"):
        if re.search(rf"^[^#\n]*\b{re.escape(module)}\.", text, re.MULTILINE):
            imports.add(f"import {module}")

    def is_package(line: str) -> bool:
        return line.split()[1].split(".")[0] not in sys.stdlib_module_names

    # The standard library first, then other packages; `import` before `from`.
    ordered = sorted(imports, key=lambda line: (is_package(line), line.startswith("from"), line))
    parts = [list(group) for _, group in groupby(ordered, is_package)]
    groups = [script.header(), *parts, *body, function]
    text = "\n".join(groups[0])
    for before, group in pairwise(groups):
        first = next((line for line in group if line[:1] != "#"), "")
        is_by_function = before[-1].startswith(INDENT) or first.startswith("def ")
        text += "\n" * (3 if is_by_function else 2) + "\n".join(group)
    return f"{text}\n"


def keywords(arguments: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


def comment(text: str) -> Block:
    columns = WIDTH - len("# ")
    lines = textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def making(script: Script) -> Block:
    """Return the lines that create new optimizers and switch settings of the user's optimizers."""
    blocks = (_switched(one) if one.own else _made(one) for one in script.optimizers)
    return [line for block in blocks for line in block]


def _made(one: ScriptOptimizer) -> Block:
    hint = [] if one.optimizer else comment("Use your own learning rate and other settings.")
    if one.optimizer is not None and one.optimizer.state:
        hint = comment("A new optimizer, for a new run: without state, unknown to schedulers.")
    values = {} if one.optimizer is None else _hyperparameters(one.optimizer)
    own = {
        key: f"torch.tensor({value.item()!r})" if hasattr(value, "item") else repr(value)
        for key, value in values.items()
        if "fused" not in one.added or key not in ("fused", "foreach")
    }
    arguments = ", ".join(filter(None, ["model.parameters()", keywords({**own, **one.added})]))
    return [*hint, f"{one.name} = torch.optim.{one.facts.name}({arguments})"]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings that differ from the class's defaults, without schedulers' changes."""
    group = optimizer.param_groups[0]
    if "initial_lr" in group:  # set by a scheduler, which may also change betas
        group = optimizer.defaults | {"lr": group["initial_lr"]}
    return {
        name: group[name]
        for name, parameter in signature(type(optimizer)).parameters.items()
        if name in group and name != "params" and repr(group[name]) != repr(parameter.default)
    }


def _switched(one: ScriptOptimizer) -> Block:
    if not one.added:
        return []
    foreach = {"foreach": "False"} if True in one.facts.foreach else {}
    when = "before its first step and again after load_state_dict()"
    return [
        *comment(f"This switches `{one.name}` ({one.facts.name}), {when}."),
        f"for group in ({one.name}.defaults, *{one.name}.param_groups):",
        *indented(f'group["{key}"] = {value}' for key, value in {**one.added, **foreach}.items()),
    ]
