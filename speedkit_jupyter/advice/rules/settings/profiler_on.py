"""A profiler or a tracer that was left on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation


class ProfilerOn(Rule):
    """torch's profiler, Python's, or a debugger's trace, at work in every step."""

    name: ClassVar[str] = "profiler_on"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """What is on while models are called."""
        on = []
        if "profiler" in seen.watched.flags:
            on.append("torch's profiler")
        if sys.getprofile() is not None:
            on.append("a profiler of Python (sys.setprofile)")
        if sys.gettrace() is not None and "coverage" not in sys.modules:
            on.append("a tracer or debugger (sys.settrace)")
        for what in on:
            yield Opportunity(
                self.name,
                f"turn {what} off",
                f"{what} is at work in every step",
                Gain(1.02, 2.0),
                "leave its `with` block, or stop it, once it has shown what you wanted",
                "nothing is recorded any more",
            )
