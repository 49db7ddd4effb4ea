"""Python that waits for a GPU in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.profiling import user_lines
from speedkit_jupyter.profiling.line_times import Spot
from speedkit_jupyter.support.words import share

LEAST, MANY = 0.02, 16


class Synchronizations(Rule):
    """`.item()`, `print(loss)`, `if loss > 0` and their like.

    On a CPU they wait for nothing: there only many of them in one step count, for Python's sake.
    """

    name: ClassVar[str] = "synchronizations"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Each line."""
        for wait in seen.profile.waits():
            spot = Spot(wait.line.file, wait.line.number)
            waiting = min(wait.seconds / seen.step_s, 1.0) if seen.step_s else 0.0
            if waiting < LEAST or (seen.on_cpu and wait.times < MANY):
                continue
            taken = min(waiting + _asking(seen, spot), 1.0) if seen.on_cpu else waiting
            text = user_lines.source(*spot) or wait.line.call
            busy = 1.0 if seen.profile.costs is None else seen.profile.costs.busy or 0.0
            idle = taken if seen.on_cpu else min(taken, 1 - busy)
            yield Opportunity(
                self.name,
                f"ask for values less often: {seen.profile.place(spot)}",
                f"synchronizations: {wait.times:.3g} in a step at `{text}`, {share(taken)} of it",
                amdahl(max(idle, 0.0), 1.5, 20.0),
                "keep tensors (`loss.detach()`) and ask once, for all of them, every so many steps",
                "values are known later",
                spots=(spot,),
            )


def _asking(seen: Situation, spot: Spot) -> float:
    """Return the share of what the line does beside: its loop, and what it indexes."""
    own = seen.profile.lines.own.items()
    return sum(taken for (at, part), taken in own if at == spot and part in ("rest", "data"))
