"""Gradients of parameters that no optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    import torch

# Of a layer's backward pass the gradient of its weights is some half; in front of all that is
# trained nothing of it is needed.
HALF = 0.35
LEAST = 0.1
# So much of a forward pass goes into what is kept for the backward pass.
KEEPING = 0.25


class FrozenGradients(Rule):
    """They require gradients, which are computed and never used."""

    name: ClassVar[str] = "frozen_gradients"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of all models together, where an optimizer steps a part of them."""
        if not (seen.watched.backwards and seen.held and seen.watched.steps):
            return
        got = seen.watched.got_gradients
        idle = [one for one in seen.parameters if id(one) in got and id(one) not in seen.held]
        least, most = _shares(seen, idle)
        if most < LEAST:
            return
        backward = seen.share("backward") * most
        # under no_grad their forward pass keeps nothing for it
        spared = min(backward + KEEPING * seen.share("forward") * most, 0.95)
        needless = seen.share("backward") * least * HALF
        yield Opportunity(
            self.name,
            "compute no gradients of what is not trained",
            f"{len(idle)} parameters require gradients, and no optimizer holds them; their "
            f"backward pass, and what is kept for it, take up to {share(spared)} of the step",
            Gain(amdahl(needless, 1e9).low, amdahl(spared, 1e9).low),
            "backbone.requires_grad_(False), or the backbone under torch.no_grad()",
            "none, as long as nobody reads these gradients",
            trial=trials.without_gradients,
            unread=trials.not_stepped,
        )


def _shares(seen: Situation, idle: list[torch.nn.Parameter]) -> tuple[float, float]:
    """Of all backward passes, at least and at most: by the time of the modules, or where that is
    not known by how many parameters there are (a convolution's few take long) and how large.
    """
    names = set(_modules_of(seen, {id(one) for one in idle}))
    _, own = seen.modules(lambda name: name in names)
    _, every = seen.modules(lambda name: bool(name))
    if every:
        return own / every, own / every
    got = [one for one in seen.parameters if id(one) in seen.watched.got_gradients]
    by_size = sum(one.numel() for one in idle) / max(sum(one.numel() for one in got), 1)
    by_number = len(idle) / max(len(got), 1)
    return min(by_size, by_number), max(by_size, by_number)


def _modules_of(seen: Situation, idle: set[int]) -> Iterator[str]:
    """Names, as the user calls them, of modules whose own parameters are all among these."""
    for model in seen.models:
        for module in model.modules():
            own = {id(one) for one in module.parameters(recurse=False)}
            if own and own <= idle and (name := seen.names.get(id(module))):
                yield name
