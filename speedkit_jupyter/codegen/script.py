"""What the forms of generated code share: a plan's snippets, each in its place."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from speedkit_jupyter.codegen.training_loop import (
    INDENT,
    Block,
    Call,
    indented,
    needs_closure,
    stepped,
)
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.plans.planning import Plan, describe

if TYPE_CHECKING:
    import torch

    Optimizers = Mapping[str, torch.optim.Optimizer | None]

WIDTH = 88  # of a comment
# As they follow one another in a script; a piece's reason stands at the first that it has.
PLACES = ("setup", "arguments", "model", "optimizers", "training", "compiled", "forward")
# Names that generated code gives to something else.
TAKEN = {
    "accelerator", "arguments", "attention", "batch", "block", "closure", "compiled_model",
    "fabric", "group", "inputs", "loss", "loss_fn", "losses", "module", "more", "name", "number",
    "one", "outputs", "scaler", "targets", "torch", "train_dataset", "trainer",
}  # fmt: skip
# What snippets call the model; the user's own word takes its place.
MODEL = "model"


@dataclass(frozen=True)
class Piece:
    """A decision's code under its reason; no reason where it is only said that all is as it was."""

    reason: str
    snippet: Snippet

    @property
    def place(self) -> str:
        """Where the reason stands; what the framework does unasked is among its arguments."""
        return next((place for place in PLACES if getattr(self.snippet, place)), "arguments")


@dataclass(frozen=True)
class Script:
    """A plan's pieces in the catalog's order.

    `optimizers` are the user's by name; None stands for one that only the facts know, and `words`
    are how the user writes those that are no plain variables. `call` is how the model is called,
    `model` the user's word for it. `own` are the optimizers that the code takes as they are.
    """

    plan: Plan
    pieces: tuple[Piece, ...]
    optimizers: Optimizers
    words: Mapping[str, str]
    call: Call
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
    def snippets(self) -> list[Snippet]:
        """The code of all pieces."""
        return [piece.snippet for piece in self.pieces]

    @property
    def arguments(self) -> dict[str, str]:
        """The framework's arguments."""
        return {k: v for snippet in self.snippets for k, v in snippet.arguments.items()}

    def reasons(self, place: str) -> Block:
        """Return the comments that stand at this place."""
        return [
            line
            for piece in self.pieces
            if piece.place == place and piece.reason
            for line in comment(piece.reason, depth=place == "forward")
        ]

    def blocks(self, place: str) -> list[Block]:
        """Return a block for each piece with lines for this place."""
        blocks = []
        for piece in self.pieces:
            lines = getattr(piece.snippet, place)
            if lines:
                reason = comment(piece.reason) if piece.place == place and piece.reason else []
                blocks.append([*reason, *lines])
        return blocks

    def setup(self) -> list[Block]:
        """Return process-wide switches; those of torch.compile where the model is compiled."""
        compiling = self.blocks("compiling") if self.plan["compile"].active else []
        return [*self.blocks("setup"), *compiling]

    def surrounded(self, lines: Sequence[str]) -> Block:
        """Return the lines within everything that belongs around a forward pass."""
        managers = [manager for snippet in self.snippets for manager in snippet.forward]
        if not managers:
            return [*lines]
        return [*self.reasons("forward"), f"with {', '.join(managers)}:", *indented(lines)]


def gather(
    plan: Plan,
    form: Form,
    optimizers: Optimizers,
    words: Mapping[str, str],
    call: Call,
    model: str,
) -> Script:
    """Return the code of every decision that the form has to say; raises SpeedKitError."""
    pieces, facts = [], plan.facts_after
    for optimization, decision in zip(CATALOG, plan, strict=True):
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
        pieces.append(Piece(reason if decision.active else "", snippet))
    return Script(plan, tuple(pieces), optimizers, words, call, model)


def header(script: Script, given: Sequence[str]) -> Block:
    """Return what this was planned for, and the names that the code takes as given."""
    hardware = script.plan.hardware
    machine = describe(hardware, script.plan.facts_after.device)
    lines = comment(f"Planned by SpeedKit for {machine}, torch {hardware.torch}.")
    if not any(decision.active for decision in script.plan):
        lines += comment("Nothing is to be changed here: this is the plain loop.")
    words = [script.model if name == MODEL else name for name in given]
    return [*lines, *comment(f"Yours: {', '.join(f'`{word}`' for word in words)}.")]


def function(script: Script, model: str, backward: str) -> Block:
    """Return `train_step`, or `predict` where there is no optimizer.

    `model` is what is called; `backward` the line that runs it, with `{loss}` for the loss.
    """
    move, call = "".join(snippet.batch for snippet in script.snippets), script.call
    if not script.optimizers:
        body = [*call.moved(move, False), *script.surrounded([f"return {call.of(model)}"])]
        return [f"def predict({'batch' if call.takes_batch else 'inputs'}):", *indented(body)]
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


def assembled(
    head: Block, script: Script, blocks: Iterable[Block], function: Block, *imports_too: str
) -> str:
    """Return the whole text: header, the imports that it needs, the blocks, the function."""
    body = [block for block in (script.beginning, *blocks) if block]
    body = [[_worded(line, script) for line in block] for block in body]
    function = [_worded(line, script) for line in function]
    text = "\n".join(line for block in [*body, function] for line in block)
    imports = {line for snippet in script.snippets for line in snippet.imports} | {*imports_too}
    for module in ("torch", "torch.compiler.config"):
        if re.search(rf"^[^#\n]*\b{re.escape(module)}\.", text, re.MULTILINE):
            imports.add(f"import {module}")
    groups = [head, *_groups(imports), *body]
    return "\n\n".join("\n".join(group) for group in groups) + "\n\n\n" + "\n".join(function) + "\n"


def _worded(line: str, script: Script) -> str:
    """Return it with the user's own names, where these are names and not, say, `models[0]`."""
    if line.lstrip().startswith("#") or not script.own_name:
        return line
    return re.sub(rf"(?<![\w.\"]){MODEL}\b(?!=[^=])", script.model, line)


def keywords(arguments: Mapping[str, str]) -> list[str]:
    """Return keyword arguments as they are written."""
    return [f"{name}={value}" for name, value in arguments.items()]


def comment(text: str, depth: int = 0) -> Block:
    """Return comment lines that will be indented `depth` times."""
    columns = WIDTH - depth * len(INDENT) - len("# ")
    lines = textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def _groups(imports: Iterable[str]) -> list[Block]:
    """Return the standard library's imports, then the others; `import` before `from`."""
    ordered = sorted(imports, key=lambda line: (line.startswith("from"), line))
    standard = [line for line in ordered if line.split()[1] in sys.stdlib_module_names]
    packages = [line for line in ordered if line not in standard]
    return [group for group in (standard, packages) if group]
