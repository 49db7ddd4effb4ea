"""torch.compile at work again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.02


class Recompiling(Rule):
    """Calls after the first one still compile: shapes, or numbers, are new each time."""

    name: ClassVar[str] = "recompiling"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of later calls."""
        compiling = seen.share("compiling")
        if compiling < LEAST or not seen.profile.splits:
            return
        shapes = {
            tuple(tuple(one.shape) for one in call.inputs) for call in seen.watched.of_models()
        }
        seen_shapes = f", for {len(shapes)} kinds of shapes in a call" if len(shapes) > 1 else ""
        yield Opportunity(
            self.name,
            "give compiled code the same shapes each time",
            f"compiling: {share(compiling)} of the step, also after the first call{seen_shapes}",
            amdahl(compiling, 3.0),
            "torch.compile(model, dynamic=True), or pad batches to a few sizes; drop_last=True for "
            "the last one",
            "dynamic shapes can be a little slower than fixed ones",
        )
