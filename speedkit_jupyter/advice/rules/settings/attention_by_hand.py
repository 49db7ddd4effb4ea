"""Attention that is written out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.code import Part, is_called
from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.05
OPERATORS = ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::softmax", "aten::matmul",
             "aten::masked_fill", "aten::div", "aten::_softmax_backward")  # fmt: skip
TIMES = (1.05, 3.5)


class AttentionByHand(Rule):
    """A softmax between two products, in code of the user's."""

    name: ClassVar[str] = "attention_by_hand"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """One for each function."""
        for part in seen.code.parts:
            softmax = next((node for node in part.nodes(ast.Call) if is_called(node, "softmax")),
                           None)  # fmt: skip
            if softmax is None or _products(part) < 2:
                continue
            taken = seen.operators(*OPERATORS)
            if taken < LEAST:
                continue
            yield Opportunity(
                self.name,
                "F.scaled_dot_product_attention in place of softmax(q @ k) @ v",
                f"{seen.place(part, softmax)}: softmax between two products; products of batches "
                f"and softmax: {share(taken)} of the step",
                amdahl(min(taken, 0.9), *TIMES),
                "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=…)",
                "rounding; the attention weights themselves are not there any more",
                spots=part.spots(softmax),
            )


def _products(part: Part) -> int:
    by_sign = sum(isinstance(node.op, ast.MatMult) for node in part.nodes(ast.BinOp))
    by_name = sum(is_called(node, "matmul", "bmm", "einsum") for node in part.nodes(ast.Call))
    return by_sign + by_name
