"""A tensor or array that grows by a copy of itself."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.code import Part, dotted, is_called
from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation, spots_of
from speedkit_jupyter.support.words import share

LEAST = 0.05
JOINING = ("cat", "concat", "concatenate", "append", "hstack", "vstack", "row_stack", "insert")
# A row that is written in place costs next to nothing; the whole is copied once at the most.
TIMES = (3.0, 1e9)


class GrowingCopies(Rule):
    """`memory = torch.cat([memory, row])`: each row costs a copy of all before it."""

    name: ClassVar[str] = "growing_copies"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """For each function, all such lines together."""
        found = defaultdict[Part, list[ast.Assign]](list)
        for part, node in seen.code.nodes(ast.Assign):
            if _grows(node):
                found[part].append(node)
        for part, nodes in found.items():
            taken = min(seen.line_share(part, *nodes), 0.95)
            if taken < LEAST:
                continue
            first = nodes[0]
            yield Opportunity(
                self.name,
                f"write into memory that is there already: {seen.place(part, first)}",
                f"`{ast.unparse(first)}` copies all of it for each new row: {share(taken)} of the "
                "step",
                amdahl(taken, *TIMES),
                "a list that is joined once; or torch.empty(capacity, …) and memory[at] = row",
                spots=tuple(spots_of(*((part, node) for node in nodes))),
            )


def _grows(node: ast.Assign) -> bool:
    """Whether it joins what it is assigned to with something."""
    if len(node.targets) != 1 or not is_called(node.value, *JOINING):
        return False
    target, call = dotted(node.targets[0]), node.value
    if "?" in target or not isinstance(call, ast.Call):
        return False
    held = (one for argument in call.args for one in ast.walk(argument))
    return any(isinstance(one, ast.Name | ast.Attribute) and dotted(one) == target for one in held)
