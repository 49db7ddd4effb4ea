"""Other processes that hold the cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

# The step computes for this share of its time, which is so many times its processor time.
LEAST_COMPUTING, TIMES = 0.3, 1.5
# (A small net on two cores that others kept busy: 100 times; usually 2 to 10.)
MOST = 20.0


class BusyMachine(Rule):
    """On a CPU: real time that is much longer than processor time, while cores are taken away.

    Threads that wait for one another lose most: one that has no core holds up all the others.
    """

    name: ClassVar[str] = "busy_machine"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of the plain calls."""
        import torch

        processor, computing = (
            seen.profile.processor,
            seen.share("forward", "backward", "optimizer"),
        )
        computing_s = computing * processor.real_s
        if not seen.on_cpu or not processor.is_crowded or computing < LEAST_COMPUTING:
            return
        if not processor.used_s or computing_s < TIMES * processor.used_s:
            return
        threads = torch.get_num_threads()
        yield Opportunity(
            self.name,
            "compute with one thread while others hold the cores"
            if threads > 1
            else "wait until the cores are free",
            f"a step takes {processor.times_as_long:.3g} times its processor time: other "
            "processes hold the cores; forward, backward and optimizer: "
            f"{share(computing)} of the step",
            amdahl(computing, 1.0, MOST),
            "`%speedkit apply --threads 1`, or stop what else runs"
            if threads > 1
            else "stop what else runs (`top` lists it)",
            "rounding; slower once the cores are free" if threads > 1 else "none",
            variant="threads:1" if threads > 1 else "",
            share=computing,
        )
