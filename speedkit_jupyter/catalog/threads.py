"""The switch `threads`: the number of torch's intra-op threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware

# A search tries one thread only for shorter steps or smaller models. With LARGE_MODEL parameters
# and steps of LONG_S seconds, one thread took 1.6 times as long as two.
LONG_S, LARGE_MODEL = 0.02, 1_000_000


class Threads(Optimization):
    """Limit threads to the usable cores: containers show all cores, and extra threads only wait."""

    name = "threads"
    effect = Effect.ROUNDING  # the number of threads changes the order of summation
    rivals = True
    flag, none = "num_threads", "auto"
    free = "NUMBER"
    line = "torch.set_num_threads({value})"
    summary = "intra-op threads within cgroup quota and affinity"
    helps = "containers that show more cores than they may use; tiny models, faster in one thread"
    risk = "another order of summation"
    page = "https://docs.pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html"
    Options = Annotated[
        Literal["auto"] | Annotated[int, Field(strict=True, gt=0, le=4096)],
        Field(description="auto, or a number from 1 to 4096"),
    ]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        usable = hardware.cpu.usable_cores
        now = facts.flags.get("num_threads", usable)
        if request.value != "auto":
            if request.value == now:
                return request.leave(now, f"torch already uses {now}")
            over = f"more than the {usable} usable cores" if request.value > usable else ""
            return request.obey(request.value, f"torch used {now}", hint=over)
        if now > usable:
            return request.apply(
                usable, f"torch uses {now} threads, but quota and affinity leave {usable} cores"
            )
        threads = f"{now} thread{' fits' if now == 1 else 's fit'}"
        return request.leave(now, f"{threads} the {usable} usable core{'s' * (usable > 1)}")

    def process_flags(self) -> Mapping[str, flags.Flag]:
        values = (1, 3, 5)
        return {"num_threads": flags.Flag(torch.get_num_threads, torch.set_num_threads, values)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        if facts.device_type != "cpu":  # with a GPU, the CPU only launches kernels
            return ()
        usable = hardware.cpu.usable_cores
        least = min(2 if facts.step_s >= LONG_S and facts.parameters >= LARGE_MODEL else 1, usable)
        return tuple(dict.fromkeys(n for n in (usable, usable // 2, 1) if n >= least))
