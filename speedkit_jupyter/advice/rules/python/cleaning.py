"""Memory that is tidied up in every step."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.02


class Cleaning(Rule):
    """`gc.collect()` and `empty_cache()`: what they free is asked for again at once."""

    name: ClassVar[str] = "cleaning"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where such a line takes part of the step."""
        import torch

        for part, node in seen.code.calls("gc.collect", "empty_cache"):
            taken = seen.line_share(part, node)
            if taken < LEAST:
                continue
            yield Opportunity(
                self.name,
                f"leave {ast.unparse(node.func)}() out of the step",
                f"{seen.place(part, node)}: {share(taken)} of the step",
                amdahl(taken, 5.0),
                "once after the training, if at all",
                "what refers to itself lies in memory a little longer",
                trial=partial(trials.doing_nothing, [(gc, "collect"), (torch.cuda, "empty_cache")]),
                spots=part.spots(part.statement(node)),
            )
