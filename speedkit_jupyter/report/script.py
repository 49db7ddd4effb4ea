"""What the forms of generated code share: a plan's snippets, each in its place."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base import MEASURE
from speedkit_jupyter.optimizations.snippet import Form, Snippet
from speedkit_jupyter.planning import Plan, describe

if TYPE_CHECKING:
    import torch

    Optimizers = Mapping[str, torch.optim.Optimizer | None]

WIDTH = 88  # of black and ruff
INDENT = "    "
# As they follow one another in a script; a piece's reason stands at the first that it has.
PLACES = ("setup", "arguments", "model", "optimizers", "training", "compiled", "forward")
Block = list[str]


@dataclass(frozen=True)
class Piece:
    """A decision's code under its reason; no reason where it is only said that all is as it was."""

    reason: str
    snippet: Snippet

    @property
    def place(self) -> str:
        """Where the reason stands; what the framework does unasked is among its arguments."""
        return next((one for one in PLACES if getattr(self.snippet, one)), "arguments")


@dataclass(frozen=True)
class Script:
    """A plan's pieces in the catalog's order.

    `optimizers` are the user's by name; None stands for one that only the facts know.
    """

    plan: Plan
    pieces: tuple[Piece, ...]
    optimizers: Optimizers

    @property
    def snippets(self) -> list[Snippet]:
        """The code of all pieces."""
        return [piece.snippet for piece in self.pieces]

    @property
    def arguments(self) -> dict[str, str]:
        """The framework's arguments."""
        return {k: v for snippet in self.snippets for k, v in snippet.arguments.items()}

    def reasons(self, place: str) -> Block:
        """The comments that stand at this place."""
        return [
            line
            for piece in self.pieces
            if piece.place == place and piece.reason
            for line in comment(piece.reason)
        ]

    def blocks(self, place: str) -> list[Block]:
        """A block for each piece with lines for this place."""
        found = []
        for piece in self.pieces:
            lines = getattr(piece.snippet, place)
            if lines:
                reason = comment(piece.reason) if piece.place == place and piece.reason else []
                found.append([*reason, *lines])
        return found

    def setup(self) -> list[Block]:
        """Process-wide switches; those of torch.compile where the model is compiled."""
        compiling = self.blocks("compiling") if self.plan["compile"].active else []
        return [*self.blocks("setup"), *compiling]

    def surrounded(self, lines: Sequence[str]) -> Block:
        """The lines within everything that belongs around a forward pass."""
        managers = [one for snippet in self.snippets for one in snippet.forward]
        if not managers:
            return [*lines]
        inner = [f"{INDENT}{line}" for line in lines]
        return [*self.reasons("forward"), *call("with ", managers, ":", bare=True), *inner]


def gather(plan: Plan, form: Form, optimizers: Optimizers) -> Script:
    """The code of every decision that the form has to say; raises SpeedKitError."""
    pieces, facts = [], plan.facts_after
    for optimization, decision in zip(CATALOG, plan, strict=True):
        told = optimization.frameworks_choose and form != "torch"
        if not decision.active and not told:
            continue
        snippet = optimization.code(decision, facts, form)
        if not optimizers and (snippet.optimizers or snippet.training):
            snippet = Snippet(f"{_plain(decision.reason)} (for training only, so not in here)")
        reason = f"{decision.name}: {snippet.comment or _plain(decision.reason)}"
        pieces.append(Piece(reason if decision.active else "", snippet))
    return Script(plan, tuple(pieces), optimizers)


def header(script: Script, given: Sequence[str]) -> Block:
    """What this was planned for, and the names that the code takes as given."""
    hardware = script.plan.hardware
    machine = describe(hardware, script.plan.facts_after.device)
    lines = comment(f"Planned by SpeedKit for {machine}, torch {hardware.torch}.")
    if not any(decision.active for decision in script.plan):
        lines += comment("Nothing is to be changed here: this is the plain loop.")
    return [*lines, *comment(f"Yours: {', '.join(f'`{name}`' for name in given)}.")]


def assembled(
    head: Block, script: Script, blocks: Iterable[Block], function: Block, *imports_too: str
) -> str:
    """The whole text: header, the imports that it needs, the blocks, the function."""
    body = [block for block in blocks if block]
    text = "\n".join(line for block in [*body, function] for line in block)
    imports = {line for snippet in script.snippets for line in snippet.imports} | {*imports_too}
    for module in ("torch", "torch.compiler.config"):
        if re.search(rf"^[^#\n]*\b{re.escape(module)}\.", text, re.MULTILINE):
            imports.add(f"import {module}")
    groups = [head, *_groups(imports), *body]
    return "\n\n".join("\n".join(group) for group in groups) + "\n\n\n" + "\n".join(function) + "\n"


def call(
    head: str, arguments: Sequence[str], tail: str = "", *, depth: int = 0, bare: bool = False
) -> Block:
    """`head(arguments)tail` on one line, or an argument a line where that is too long.

    `depth` is how far the lines will be indented; `bare` leaves out the parentheses of one line.
    """
    inside = ", ".join(arguments)
    line = f"{head}{inside}{tail}" if bare else f"{head}({inside}){tail}"
    if len(line) + depth * len(INDENT) <= WIDTH or not arguments:
        return [line]
    return [f"{head}(", *(f"{INDENT}{one}," for one in arguments), f"){tail}"]


def keywords(arguments: Mapping[str, str]) -> list[str]:
    """Keyword arguments as they are written."""
    return [f"{name}={value}" for name, value in arguments.items()]


def comment(text: str) -> Block:
    """Comment lines of at most 88 columns."""
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent="# ", subsequent_indent="# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def indented(lines: Iterable[str]) -> Block:
    """The body of a function."""
    return [f"{INDENT}{line}" for line in lines]


def _plain(reason: str) -> str:
    """A reason without the hint at a magic."""
    return reason.replace(MEASURE, MEASURE.partition(":")[0])


def _groups(imports: Iterable[str]) -> list[Block]:
    """The standard library's imports, then the others; `import` before `from`."""
    ordered = sorted(imports, key=lambda line: (line.startswith("from"), line))
    standard = [line for line in ordered if line.split()[1] in sys.stdlib_module_names]
    others = [line for line in ordered if line not in standard]
    return [group for group in (standard, others) if group]
