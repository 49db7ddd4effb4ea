"""Tensors made from Python's lists, number by number."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.03
NAMES = ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor", "torch.Tensor")


class TensorOfList(Rule):
    """`torch.tensor(list)` asks every number what it is."""

    name: ClassVar[str] = "tensor_of_list"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where such a call takes part of the step."""
        for part, node in seen.code.calls(*NAMES):
            taken = seen.line_share(part, node)
            if taken < LEAST or not node.args or isinstance(node.args[0], ast.Constant):
                continue
            yield Opportunity(
                self.name,
                "make this tensor once, or of a whole array",
                f"{seen.place(part, node)}: `{ast.unparse(node)}`, {share(taken)} of the step",
                amdahl(taken, 1.8),
                "torch.from_numpy(array), or make the tensor once, before the loop",
                "a tensor of an array shares its memory",
                spots=part.spots(part.statement(node)),
            )
