"""Samples that go to the device one by one, in the data set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.code import Part, dotted, is_called
from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.02


class MovedInDataSet(Rule):
    """`.to(device)` or `.cuda()` in `__getitem__`: a copy for each sample, and no workers."""

    name: ClassVar[str] = "moved_in_data_set"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """In data sets that ran."""
        data = seen.share("data", "host to device")
        if seen.on_cpu or data < LEAST:
            return
        for part in seen.code.parts:
            if part.code.co_name not in ("__getitem__", "__getitems__", "__iter__"):
                continue
            for node in part.nodes(ast.Call):
                if is_called(node, "cuda") or _moves(node):
                    yield self._opportunity(seen, part, node, data)

    def _opportunity(self, seen: Situation, part: Part, node: ast.Call, data: float) -> Opportunity:
        return Opportunity(
            self.name,
            "move whole batches to the device, not single samples",
            f"{seen.place(part, node)}: `{ast.unparse(node)}` for each sample; data and copies: "
            f"{share(data)} of the step",
            amdahl(data, 1.3, 20.0),
            "leave it out of the data set, and write x = x.to(device, non_blocking=True) in the "
            "loop",
            spots=part.spots(node),
        )


def _moves(node: ast.Call) -> bool:
    if not is_called(node, "to") or not node.args:
        return False
    return "device" in dotted(node.args[0]).lower() or isinstance(node.args[0], ast.Constant)
