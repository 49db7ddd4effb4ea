"""Recurrent cells in a loop of Python's, where torch has the whole layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

LEAST_CALLS, LEAST = 8, 0.1
TIMES = (1.1, 8.0)


class RecurrentCells(Rule):
    """`nn.LSTMCell`, `GRUCell` or `RNNCell`, once for each moment."""

    name: ClassVar[str] = "recurrent_cells"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Each kind of cell."""
        from torch import nn

        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
            calls = seen.watched.times[kind] / seen.steps
            names = {
                seen.names.get(id(one), "")
                for model in seen.models
                for one in model.modules()
                if type(one) is kind
            }
            taken, _ = seen.modules(lambda name, names=names: name in names)  # type: ignore[misc]
            every, _ = seen.modules(lambda name: bool(name))
            # without a trace the cells count as all there is: so many calls mostly are
            taken = seen.computing * (taken / every if every else 1.0)
            if calls < LEAST_CALLS or taken < LEAST:
                continue
            layer = kind.__name__.removesuffix("Cell")
            yield Opportunity(
                self.name,
                f"nn.{layer} over the whole sequence in place of nn.{kind.__name__}",
                f"{calls:.0f} calls of nn.{kind.__name__} in a step, {share(taken)} of it",
                amdahl(taken, *TIMES),
                f"nn.{layer}(…, batch_first=True)(sequence), where no moment's input depends on "
                "the output of the one before",
                "its weights have other names: weight_ih becomes weight_ih_l0",
            )
