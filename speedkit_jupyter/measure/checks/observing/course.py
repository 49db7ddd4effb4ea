"""The course of a few successive steps, cut into stretches at each optimizer step.

The first one, the baseline's, leads. Every other is set to its parameters at the beginning of each
stretch, so that rounding doesn't grow from one to the next (Adam's first step, say, is that of the
gradients' signs) and each stretch is compared like the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.observing.observation import Observation

if TYPE_CHECKING:
    import torch

# So many successive steps are run, or so many steps of its optimizers where one takes several.
STEPS = 3
# What a stretch is besides: the end of a step, with what it returned; what it left elsewhere.
END, LEFT = "end", "left"


@dataclass
class Course:
    """The stretches that were kept, by their number, and what each began with.

    `ends` are how many stretches there were at the end of each step.
    """

    stretches: dict[int, Observation] = field(default_factory=dict)
    starts: dict[int, list[torch.Tensor]] = field(default_factory=dict, repr=False)
    ends: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Of all stretches of steps that came to their end."""
        return self.ends[-1] if self.ends else 0


def goes_on(course: Course, lead: Course | None) -> bool:
    """Whether one more step is to be run.

    A fault may come with a state that is not the user's any more: of an optimizer, a cache, a
    counter.
    """
    if lead is not None:
        return len(course.ends) < len(lead.ends)
    if not course.ends:
        return True
    taken = max(stretch.place[1] for stretch in course.stretches.values())
    return len(course.ends) < (STEPS if taken < STEPS else 2)
