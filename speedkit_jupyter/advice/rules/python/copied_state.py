"""The whole model copied or saved in every step."""

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


class CopiedState(Rule):
    """`copy.deepcopy(model…)`, `torch.save(model…)`, `load_state_dict`."""

    name: ClassVar[str] = "copied_state"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where such a line takes part of the step."""
        found = [
            (part, node)
            for part, node in seen.code.calls("deepcopy", "torch.save", "load_state_dict")
            if seen.line_share(part, node) >= LEAST
        ]
        lines = {part.spots(part.statement(node)): (part, node) for part, node in found}
        if not lines:
            return
        taken = min(sum(seen.line_share(*one) for one in lines.values()), 0.98)
        (part, node), *_ = lines.values()
        yield Opportunity(
            self.name,
            "copy or save the model once an epoch, not in each step",
            f"{seen.place(part, node)}: `{ast.unparse(node)}`, {share(taken)} of the step",
            amdahl(taken, 4.0),
            "under `if` a validation loss got better, or every so many steps",
            "what is kept is up to an epoch older",
            spots=tuple(spot for spots in lines for spot in spots),
        )
