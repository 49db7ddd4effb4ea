"""Backward passes that keep a graph, or make one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share


class GraphsOfGraphs(Rule):
    """`create_graph=True` without second derivatives, `retain_graph=True` for one pass."""

    name: ClassVar[str] = "graphs_of_graphs"
    is_no_speed: ClassVar[bool] = True

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of all backward passes of a call."""
        passes = seen.watched.backwards
        if not passes or seen.watched.gradients_asked:
            return
        backward = seen.share("backward")
        one_each = len(passes) <= max(seen.watched.steps, 1)
        if all(one.creates_graph for one in passes) and one_each:
            yield Opportunity(
                self.name,
                "backward() without create_graph",
                f"each backward pass makes a graph of itself, and nothing asks for second "
                f"derivatives; forward and backward: {share(seen.computing)} of the step",
                Gain(amdahl(backward, 1.02).low, amdahl(seen.computing, 2.0).low),
                "loss.backward()",
                "no second derivatives",
                trial=partial(trials.graph_let_go, "create_graph"),
            )
        elif all(one.retains_graph for one in passes) and one_each:
            yield Opportunity(
                self.name,
                "backward() without retain_graph",
                "each graph is kept, and has one backward pass only; forward and backward: "
                f"{share(seen.computing)} of the step",
                Gain(0.99, amdahl(seen.computing, 1.15).low),
                "loss.backward()",
                "a second backward pass over the same graph raises",
                trial=partial(trials.graph_let_go, "retain_graph"),
            )
