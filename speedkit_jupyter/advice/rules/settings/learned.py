"""A plan that tuning has proven for this model, and that is not in force."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.tuning import learning


class Learned(Rule):
    """What was measured on this machine needs no guess."""

    name: ClassVar[str] = "learned"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """For all models of the step together."""
        learned = seen.learned
        if learned is None or not learned.plan["values"] or seen.in_force:
            return
        plan = learned.plan
        low, speedup = plan["low"] or 1.0, plan["speedup"] or 1.0
        yield Opportunity(
            self.name,
            f"the plan that tuning found: {plan['name']}",
            learning.why(learned),
            Gain(min(low, speedup), plan["high"] or max(speedup, low)),
            "%speedkit apply",
            "as it was judged when it was found",
            variant=plan["name"],
        )
