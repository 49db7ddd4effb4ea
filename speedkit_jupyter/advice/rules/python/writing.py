"""Printing, drawing and saving in every step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.code import dotted
from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.03
# What writes, shows or draws, by the last part of its name.
CALLS = (
    *("print", "display", "savefig", "imshow", "plot", "add_scalar", "add_scalars", "add_image"),
    *("add_histogram", "to_csv", "to_json", "dump", "write", "flush", "fsync", "savez"),
    *("info", "set_postfix", "clear_output"),
)
# Those by their whole names: `save` alone is anything.
WHOLE = ("torch.save", "np.save", "numpy.save", "wandb.log", "mlflow.log_metric")


class Writing(Rule):
    """Where such a line takes part of the step."""

    name: ClassVar[str] = "writing"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Each statement once."""
        told = set[tuple[str, int]]()
        for part, node in seen.code.nodes(ast.Call):
            called = dotted(node.func)
            place = part.file, getattr(part.statement(node), "lineno", 0)
            taken = seen.line_share(part, node)
            if place in told or not _writes(called) or taken < LEAST:
                continue
            if isinstance(part.statement(node), ast.For | ast.While | ast.With):
                continue
            told.add(place)
            yield Opportunity(
                self.name,
                f"{called.rpartition('.')[2]}() every so many steps only",
                f"{seen.place(part, node)}: {share(taken)} of the step",
                amdahl(taken, 5.0),
                "if step % 50 == 0: around it, with values that were collected until then",
                "less often in the log",
                spots=part.spots(part.statement(node)),
            )


def _writes(called: str) -> bool:
    return called in WHOLE or called.rpartition(".")[2] in CALLS
