"""What would make a step faster: opportunities with their expected gain, ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.profile.profile import Profile
from speedkit_jupyter.extras.profile.split import Part
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.support.source_lines import Spot
from speedkit_jupyter.support.units import ratio

EXACT = "none: the results are the same"
# No remedy is expected to remove more of a step than this; what gains less than LEAST at best is
# not worth a line.
MOST, LEAST = 0.995, 1.05


class Gain(NamedTuple):
    """The expected speed-up of the whole step: old time over new time, from `low` to `high`."""

    low: float
    high: float

    @property
    def saved(self) -> float:
        """Return the share of the time that is expected to go, 0 to 1: opportunities' order."""
        return 1 - (1 / self.low + 1 / self.high) / 2

    def within(self, most: float) -> Gain:
        """Return the part of the range that is not above `most`."""
        return Gain(min(self.low, most), min(self.high, most))

    def __str__(self) -> str:
        return f"{ratio(self.low)} to {ratio(self.high)}"


def amdahl(share: float, least: float, most: float = math.inf) -> Gain:
    """Return the gain where a part with this share gets `least` to `most` times as fast.

    (G. M. Amdahl: Validity of the single processor approach, AFIPS 1967.)
    """
    share = min(max(share, 0.0), MOST)
    return Gain(1 / (1 - share + share / least), 1 / (1 - share + share / most))


def without(share: float) -> float:
    """Return the speed-up of the step where a part with this share goes."""
    return amdahl(share, math.inf).low


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
    risk: str = EXACT
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
        return replace(self, gain=self.gain.within(without(self.share)))

    def to_dict(self) -> dict[str, Any]:
        words = ("rule", "title", "evidence", "remedy", "risk")
        return {"gain": self.gain._asdict(), **{word: getattr(self, word) for word in words}}


@dataclass(repr=False)
class Advice(Shown):
    """`opportunities`, what is expected to gain most first; `skipped` are rules that failed, and
    why. `subject` is what the advice is about.
    """

    REPORTS = f"{__package__}.report"

    profile: Profile
    opportunities: list[Opportunity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    subject: str = ""

    def rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.opportunities]

    def to_dict(self) -> dict[str, Any]:
        return {
            "opportunities": self.rows(),
            "skipped": dict(self.skipped),
            "profile": self.profile.to_dict(),
            "environment": dict(self.profile.environment),
            "command": self.profile.command,
        }


def ranked(found: Iterable[Opportunity], always: frozenset[str]) -> list[Opportunity]:
    """Return what is worth a line, the largest first, and the rules `always` in any case; of the
    same lines the first one alone.
    """
    said, kept = set[Spot](), list[Opportunity]()
    for one in (each.allowed for each in found):
        is_new = not one.spots or not set(one.spots) <= said
        said |= set(one.spots)
        if is_new and (one.gain.high >= LEAST or one.rule in always):
            kept.append(one)
    return sorted(kept, key=lambda one: -one.gain.saved)
