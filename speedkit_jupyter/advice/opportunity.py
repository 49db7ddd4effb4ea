"""One thing that would make a step faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.profiling.line_times import Spot
from speedkit_jupyter.profiling.split import Part

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Subject:
    """The objects that a remedy changes. Looked up when it is tried, so that nothing that only says
    what could be done keeps a model alive.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loaders: Sequence[DataLoader[Any]] = ()

    @property
    def held(self) -> set[int]:
        """Ids of what optimizers step."""
        return {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all models, each once."""
        found = {id(one): one for model in self.models for one in model.parameters()}
        return list(found.values())


# What is in force while the step runs as the remedy has it; made anew for each block of steps.
Trial = Callable[[Subject], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Opportunity:
    """What was seen (`evidence`), what to write instead (`remedy`), what it may cost (`risk`).

    `gain` is that of the whole step, of which it concerns a `share`. What can be tried at once has
    a word of the catalog (`variant`), or a `trial`, which takes the gradients of what `unread`
    gives away; `line` is what else tries it. `spots` are the lines and `part` the part of the step
    that it is about, of which nothing more general need be said.
    """

    rule: str
    title: str
    evidence: str
    gain: Gain
    remedy: str
    risk: str = "none: the results are the same"
    variant: str = ""
    trial: Trial | None = field(default=None, repr=False)
    unread: Callable[[Subject], list[torch.nn.Parameter]] | None = field(default=None, repr=False)
    line: str = ""
    spots: tuple[Spot, ...] = ()
    part: Part | None = None
    share: float = 1.0

    @property
    def allowed(self) -> Opportunity:
        """Return the same, with no more gain than if its share of the step took no time."""
        return replace(self, gain=self.gain.within(amdahl(self.share, math.inf).high))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rule": self.rule,
            "title": self.title,
            "evidence": self.evidence,
            "gain": {"low": self.gain.low, "high": self.gain.high},
            "remedy": self.remedy,
            "risk": self.risk,
            "line": self.line,
        }
