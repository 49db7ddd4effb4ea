"""One thing that would make a step faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.profiling.lines import Spot
from speedkit_jupyter.profiling.split import Part

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Subject:
    """The objects that a remedy changes. They are looked up when it is tried: an opportunity keeps
    no model alive.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loaders: Sequence[DataLoader[Any]] = ()

    @property
    def held(self) -> set[int]:
        """Return the ids of what optimizers step."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {id(one) for group in groups for one in group["params"]}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Return those of all models, each once."""
        return list({id(one): one for model in self.models for one in model.parameters()}.values())


# Makes what is in force while the step runs as the remedy has it; made anew for each block.
Trial = Callable[[Subject], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Opportunity:
    """What was seen (`evidence`), what to write instead (`remedy`), what it may cost (`risk`).

    `gain` is that of the whole step, of which it concerns a `share`. What can be tried at once has
    a word of the catalog (`variant`), or a `trial`, which takes the gradients of what `unread`
    gives away. `spots` are the lines and `part` the part of the step that it is about, of which
    nothing more general need be said.
    """

    title: str
    evidence: str
    gain: Gain
    remedy: str
    risk: str = "none: the results are the same"
    rule: str = ""
    variant: str = ""
    trial: Trial | None = field(default=None, repr=False)
    unread: Callable[[Subject], list[torch.nn.Parameter]] | None = field(default=None, repr=False)
    spots: tuple[Spot, ...] = ()
    part: Part | None = None
    share: float = 1.0

    @property
    def allowed(self) -> Opportunity:
        """Return the same, with no more gain than if its share of the step took no time."""
        return replace(self, gain=self.gain.within(amdahl(self.share, math.inf).high))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "rule": self.rule,
            "title": self.title,
            "evidence": self.evidence,
            "gain": self.gain._asdict(),
            "remedy": self.remedy,
            "risk": self.risk,
        }
