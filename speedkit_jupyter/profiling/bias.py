"""What telling a split takes, which is no part of the step."""

from __future__ import annotations

import time

from speedkit_jupyter.profiling.instruments import counted, installed_within
from speedkit_jupyter.profiling.outside_modules import Outside
from speedkit_jupyter.profiling.split import Bias, Part, Split

# So many calls say it.
CALLS = 500


def measured() -> Bias:
    """Measured here: of a method that waits, and of a part without anything."""
    import torch

    value, now = torch.zeros(()), time.perf_counter
    plain, waited, passed, parted, between = (Split(now=now) for _ in range(5))
    weight, alone, forward = torch.zeros((), requires_grad=True), Split(now=now), Split(now=now)
    part: Part
    with plain.run():
        for _ in range(CALLS):
            value.item()
    for split, part in ((waited, "rest"), (passed, "data")):
        with installed_within(Outside(split)), split.run(), split.within(part):
            for _ in range(CALLS):
                value.item()
    outside = Outside(parted)
    nothing = counted("optimizer", outside, lambda: None)
    with outside.seen(), parted.run():
        for _ in range(CALLS):
            nothing()
    with Outside(between).seen(), between.run():
        for _ in range(CALLS):
            value.dim()
    with alone.run():
        for _ in range(CALLS):
            weight * weight
    with Outside(forward).seen(), forward.run():
        for _ in range(CALLS):
            weight * weight
    return Bias(
        max(waited.seconds["rest"] - plain.seconds["rest"], 0.0) / CALLS,
        parted.seconds["rest"] / CALLS,
        parted.seconds["optimizer"] / CALLS,
        between.seconds["rest"] / CALLS,
        max(passed.seconds["data"] - plain.seconds["rest"], 0.0) / CALLS,
        max(waited.seconds["synchronizations"] - plain.seconds["rest"], 0.0) / CALLS,
        max(forward.seconds["forward"] - alone.seconds["rest"], 0.0) / CALLS,
        forward.seconds["rest"] / CALLS,
    )
