"""The result: opportunities, ranked, and the profile that they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.profiling.lines import Spot
from speedkit_jupyter.profiling.profile import Profile

# What gains less than this at best is not worth a line.
LEAST = 1.03


@dataclass(repr=False)
class Advice(Shown):
    """`opportunities`, what is expected to gain most first; `skipped` are rules that failed, and
    why. `subject` is what the advice is about.
    """

    profile: Profile
    opportunities: list[Opportunity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    subject: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each opportunity."""
        return [one.to_dict() for one in self.opportunities]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "opportunities": self.rows(),
            "skipped": dict(self.skipped),
            "profile": self.profile.to_dict(),
            "environment": dict(self.profile.environment),
            "command": self.profile.command,
        }


def ranked(found: Iterable[Opportunity], always: frozenset[str]) -> list[Opportunity]:
    """Return what is worth a line, the largest first; of the same lines the first one alone."""
    said = (one.allowed for one in _not_said_before(found))
    kept = [one for one in said if one.gain.high >= LEAST or one.rule in always]
    return sorted(kept, key=lambda one: -one.gain.saved)


def _not_said_before(found: Iterable[Opportunity]) -> Iterator[Opportunity]:
    said = set[Spot]()
    for one in found:
        if one.spots and set(one.spots) <= said:
            continue
        said |= set(one.spots)
        yield one
