"""Python's loops over parameters: norms, averages and updates, tensor by tensor."""

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
ITERATED = ("parameters", "named_parameters", "buffers")
# From the loop in Python to one call for all tensors; large ones gain nothing.
TIMES = (1.0, 8.0)


class ParameterLoops(Rule):
    """`for p in model.parameters(): …`: an operator for each, where one could do all."""

    name: ClassVar[str] = "parameter_loops"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where such a loop takes part of the step."""
        for part, node in seen.code.nodes(ast.For, ast.ListComp, ast.GeneratorExp):
            iterated = _iterated(node)
            if not _goes_over_parameters(iterated) or _is_for_numpy(node):
                continue
            spots = part.spots(node)
            inner = [node] if not isinstance(node, ast.For) else [*node.body, node.iter]
            taken = seen.line_share(part, *inner)
            if taken < LEAST:
                continue
            yield Opportunity(
                self.name,
                f"one call for all parameters in place of {seen.place(part, node)}",
                f"Python goes through `{ast.unparse(iterated)}`: {share(taken)} of the step",
                amdahl(min(taken, 0.9), *TIMES),
                _remedy(node),
                "sums are added up in another order",
                spots=spots,
            )


def _iterated(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return node.generators[0].iter
    assert isinstance(node, ast.For)
    return node.iter


def _goes_over_parameters(iterated: ast.AST) -> bool:
    calls = (node for node in ast.walk(iterated) if isinstance(node, ast.Call))
    return any(dotted(call.func).rpartition(".")[2] in ITERATED for call in calls)


def _is_for_numpy(node: ast.AST) -> bool:
    """Whether each one is given away: no call of torch's does what is done with it there."""
    calls = [dotted(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(call.startswith(("np.", "numpy.")) or call.endswith(".numpy") for call in calls)


def _remedy(node: ast.AST) -> str:
    text = ast.unparse(node)
    if "norm" in text:
        return "torch.nn.utils.clip_grad_norm_(model.parameters(), …), or get_total_norm(grads)"
    if ".grad" in text:
        return "an optimizer of torch.optim: it steps all of them in a few calls"
    return (
        "torch._foreach_mul_, _foreach_add_, _foreach_lerp_ on lists; for averages "
        "torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn"
    )
