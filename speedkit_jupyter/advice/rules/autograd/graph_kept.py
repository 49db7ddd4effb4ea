"""Losses that are summed or collected with their graphs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.code import Part, is_called, names_in
from speedkit_jupyter.advice.gain import Gain
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation

# A graph whose backward pass is done is a few objects; one that never has any keeps activations.
DONE, NOT_DONE = Gain(0.99, 1.05), Gain(1.0, 1.6)
# What makes a plain number or a tensor without a graph of it.
LETS_GO = ("item", "detach", "float", "tolist", "numpy", "int", "len")


class GraphKept(Rule):
    """`total += loss`, `losses.append(loss)`: every step's graph stays in memory."""

    name: ClassVar[str] = "graph_kept"
    is_no_speed: ClassVar[bool] = True

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of the names that `backward()` is called on."""
        for part in seen.code.parts:
            losses = _losses(part)
            for node in part.nodes(ast.AugAssign, ast.Call):
                kept = _kept(part, node, losses)
                if kept is None:
                    continue
                is_done = bool(seen.watched.backwards)
                yield Opportunity(
                    self.name,
                    f"keep {kept} without its graph",
                    f"{seen.place(part, node)}: `{ast.unparse(node)}` keeps the graph of every "
                    "step in memory, which grows",
                    DONE if is_done else NOT_DONE,
                    f"{kept}.detach() in its place (or .item(), which waits on a GPU)",
                    spots=part.spots(node),
                    share=seen.computing,
                )


def _losses(part: Part) -> set[str]:
    """Names with a graph: what backward is called on in this code."""
    return {
        node.func.value.id
        for node in part.nodes(ast.Call)
        if isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        and isinstance(node.func.value, ast.Name)
    }


def _kept(part: Part, node: ast.AST, losses: set[str]) -> str | None:
    """The loss that a sum or a list keeps with its graph."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = node.target.id if isinstance(node.target, ast.Name) else ""
        if target in losses:  # one loss of several parts
            return None
        value: ast.AST = node.value
    elif is_called(node, "append"):
        assert isinstance(node, ast.Call)
        if len(node.args) != 1:
            return None
        value = node.args[0]
    else:
        return None
    if any(is_called(one, *LETS_GO) for one in ast.walk(value)):
        return None
    return next(iter(sorted(names_in(value) & losses)), None)
