"""Optimizers that hold what gets no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.25


class FrozenInOptimizer(Rule):
    """Frozen parameters that an optimizer goes over in each step."""

    name: ClassVar[str] = "frozen_in_optimizer"
    is_no_speed: ClassVar[bool] = True

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Each optimizer."""
        for optimizer in seen.optimizers if seen.watched.steps else ():
            held = [one for group in optimizer.param_groups for one in group["params"]]
            frozen = [one for one in held if not one.requires_grad]
            if len(frozen) < LEAST * len(held) or len(frozen) == len(held):
                continue
            stepped = [one for one in frozen if one.grad is not None]
            part = seen.share("optimizer") * len(frozen) / len(held)
            moved = (
                f"; {len(stepped)} of them have an old gradient, and are still moved by it"
                if stepped
                else ""
            )
            called = seen.name(optimizer, "the optimizer")
            yield Opportunity(
                self.name,
                f"give {called} only what is trained",
                f"{len(frozen)} of its {len(held)} parameters are frozen{moved}; optimizer: "
                f"{share(seen.share('optimizer'))} of the step",
                Gain(1.0, amdahl(part, 1e9).low if stepped else amdahl(part, 1.5).low),
                "Adam((p for p in model.parameters() if p.requires_grad), …)",
                "its state dict has other numbers for the parameters",
            )
