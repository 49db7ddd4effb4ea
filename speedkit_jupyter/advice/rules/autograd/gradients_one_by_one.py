"""Gradients that are asked for one after another in a loop of Python's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.code import Part
from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST, MANY = 0.1, 8
CALLED = ("autograd.grad", "backward", "jacobian", "hessian")


class GradientsOneByOne(Rule):
    """`torch.autograd.grad(u[k], x)` for each k: a backward pass each, where one could do."""

    name: ClassVar[str] = "gradients_one_by_one"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Each line that asks for many in one step."""
        for part, call in seen.code.calls(*CALLED):
            spots = part.spots(part.statement(call))
            passes = sum(seen.watched.passes[spot] for spot in spots) / max(seen.steps, 1)
            taken = _taken(seen, part, call)
            if passes < MANY or taken < LEAST:
                continue
            yield Opportunity(
                self.name,
                f"ask for all gradients at once: {seen.place(part, call)}",
                f"{passes:.0f} backward passes in a step, {share(taken)} of it at "
                f"`{ast.unparse(call)}`",
                amdahl(taken, 2.0, passes),
                "torch.autograd.grad(u, x, torch.ones_like(u)) where rows don't depend on each "
                "other; is_grads_batched=True, torch.func.vmap or jacrev otherwise",
                "sums are added up in another order",
                spots=spots,
            )


def _taken(seen: Situation, part: Part, call: ast.Call) -> float:
    """The line's share of the step, whatever part of the step it is in."""
    spots = set(part.spots(part.statement(call)))
    lines = seen.profile.lines.own.items()
    return min(sum(taken for (spot, _), taken in lines if spot in spots), 0.95)
