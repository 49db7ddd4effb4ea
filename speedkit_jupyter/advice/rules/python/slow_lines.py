"""Lines of plain Python that take much of a step, whatever they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.profiling import user_lines
from speedkit_jupyter.profiling.line_times import Spot
from speedkit_jupyter.profiling.split import Part
from speedkit_jupyter.support.words import share

LEAST, LEAST_OF_DATA = 0.15, 0.15
# What a line of Python is worth when it is written otherwise: nobody knows, and so little of it at
# the least; at best it goes.
TIMES = 1.3
# Of a line's time so much is Python's: tensors that are large enough have no need of advice.
PYTHON = 0.3
# Lines so near each other are one matter.
NEAR = 3


class SlowLines(Rule):
    """What is left once all other rules have spoken: it comes last."""

    name: ClassVar[str] = "slow_lines"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of the rest and of data, together where they lie together."""
        said = {spot for one in seen.said for spot in one.spots}
        for part, least in _parts(seen):
            lines = [line for line in seen.profile.lines.costliest(part) if line[0] not in said]
            for spots, taken in _together(lines):
                python = sum(seen.profile.lines.python.get(spot, 0.0) for spot in spots)
                if taken < least or python < PYTHON * taken:
                    continue
                costliest = spots[0]
                text = user_lines.source(costliest.file, costliest.number)
                what = "Python" if part == "rest" else "loading"
                yield Opportunity(
                    self.name,
                    f"write {seen.profile.place(costliest)} without Python's loop, or leave it out",
                    f"{what}: {share(taken)} of the step at `{text}`",
                    amdahl(taken, TIMES),
                    "operations on whole tensors, every tenth step only, or once at the end",
                    "depends on what you write",
                    spots=tuple(spots),
                )


def _parts(seen: Situation) -> Iterator[tuple[Part, float]]:
    """With the least share of a step that is worth a word."""
    yield "rest", LEAST
    if not any(one.part == "data" for one in seen.said):
        yield "data", LEAST_OF_DATA


def _together(lines: list[tuple[Spot, float]]) -> Iterator[tuple[list[Spot], float]]:
    """Lines near the costliest one, with it; then of what is left, and so on."""
    left = list(lines)
    while left:
        first = left[0][0]
        near = [one for one in left if _is_near(first, one[0])]
        left = [one for one in left if not _is_near(first, one[0])]
        yield [spot for spot, _ in near], sum(taken for _, taken in near)


def _is_near(first: Spot, other: Spot) -> bool:
    return first.file == other.file and abs(first.number - other.number) <= NEAR
