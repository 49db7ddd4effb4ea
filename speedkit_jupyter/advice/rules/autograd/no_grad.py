"""Predictions that keep a graph nobody asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

# How exactly a few calls of a model tell what a graph costs.
ROUGHLY = 0.12


class NoGrad(Rule):
    """A model is called with gradients on, and no backward pass follows."""

    name: ClassVar[str] = "no_grad"
    is_no_speed: ClassVar[bool] = True

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """It is called with a graph and without one, in turn."""
        import torch

        calls = [call for call in seen.watched.of_models() if call.has_graph]
        if seen.trains or seen.watched.steps or not calls:
            return
        call = calls[0]
        called = seen.name(call.module, "the model")

        def once() -> None:
            call.module(*call.args, **call.kwargs)

        def without() -> None:
            with torch.no_grad():
                once()

        seen.settle()
        ratio = seen.ratio(once, without) or 1.0
        seen.settle()
        part = seen.share("forward")
        yield Opportunity(
            self.name,
            f"call {called} under torch.no_grad()",
            f"{called} computes with gradients on and no backward pass follows; the forward pass "
            f"({share(part)} of the step) takes {ratio:.2f} times as long as without",
            Gain(
                max(amdahl(part, max(ratio * (1 - ROUGHLY), 0.95)).low, 0.95),
                max(amdahl(part, ratio * (1 + ROUGHLY)).low, 1.0),
            ),
            "with torch.no_grad(): (or torch.inference_mode()) around it: less memory, too",
            trial=_without,
        )


@contextmanager
def _without(_: Subject) -> Iterator[None]:
    import torch

    with torch.no_grad():
        yield
