"""The same forward pass made twice: for the loss, and for the accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST = 0.03


class SameForwardTwice(Rule):
    """A model called again on the very same tensors, with the very same weights."""

    name: ClassVar[str] = "same_forward_twice"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Once for each model."""
        calls, told = seen.watched.of_models(), set[int]()
        for number, call in enumerate(calls):
            again = [one for one in calls[:number] if one.is_same_as(call)]
            if not again or not call.inputs or id(call.module) in told or _draws(call.module):
                continue
            told.add(id(call.module))
            twice = sum(any(one.is_same_as(two) for two in calls[:at])
                        for at, one in enumerate(calls))  # fmt: skip
            taken = seen.share("forward") * twice / len(calls)
            if taken < LEAST:
                continue
            # the second one's backward pass, if it has any, goes too
            graphs = call.has_graph and len(seen.watched.backwards) >= len(calls)
            most = taken + (seen.share("backward") * twice / len(calls) if graphs else 0.0)
            low, high = amdahl(taken, 3.0).low, amdahl(min(most, 0.9), 50.0).low
            called = seen.name(call.module, "the model")
            yield Opportunity(
                self.name,
                f"keep the output of {called}, and use it twice",
                f"{called} is called again with the same input: about {share(most)} of the step",
                Gain(min(low, high), high),
                f"out = {called}(x) once; `out.detach()` for what needs no gradient",
            )


def _draws(module: object) -> bool:
    """Whether two passes differ on purpose: with dropout in training."""
    from torch import nn

    assert isinstance(module, nn.Module)
    return any(
        isinstance(one, nn.modules.dropout._DropoutNd) and one.training and one.p > 0
        for one in module.modules()
    )
