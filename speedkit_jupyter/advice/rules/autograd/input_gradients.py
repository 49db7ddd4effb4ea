"""Gradients of a step's inputs that nobody reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.code import dotted
from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share


class InputGradients(Rule):
    """`x.requires_grad` on a batch, and no line that says `x.grad`."""

    name: ClassVar[str] = "input_gradients"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of what models are given."""
        from torch import nn

        if not seen.watched.backwards or seen.watched.gradients_asked or _reads_gradients(seen):
            return
        for call in seen.watched.of_models():
            leaves = [one for one in call.inputs if one.requires_grad and one.is_leaf]
            if not any(not isinstance(one, nn.Parameter) for one in leaves):
                continue
            if any(id(one) in seen.held for one in leaves):
                continue
            backward = seen.share("backward")
            yield Opportunity(
                self.name,
                f"no gradient of the input of {seen.name(call.module, 'the model')}",
                f"its input requires a gradient, which no line reads; backward: {share(backward)} "
                "of the step",
                Gain(1.0, amdahl(backward * 0.4, 1e9).low),
                "leave requires_grad_() of the batch out",
                "none, as long as nobody reads it",
            )
            return


def _reads_gradients(seen: Situation) -> bool:
    read = (node for _, node in seen.code.nodes(ast.Attribute) if node.attr == "grad")
    return any(not dotted(node).startswith("torch.autograd") for node in read)
