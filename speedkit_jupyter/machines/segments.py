"""torch's allocator on CUDA: segments of memory that grow, in place of ever more of fixed size."""

from __future__ import annotations

import re

NAME = "cuda.expandable_segments"
KEY = "expandable_segments"
_OPTION = re.compile(rf"(^|,)\s*{KEY}\s*:\s*(\w+)\s*")


def are_expandable() -> bool:
    """Whether those that come next are. Raises AttributeError where torch can't be asked."""
    import torch

    settings = _OPTION.findall(torch._C._accelerator_getAllocatorSettings())
    return bool(settings) and settings[-1][1] == "True"


def use(on: bool) -> None:
    """From the next segment on; the other settings of the allocator stay."""
    import torch

    if on == are_expandable():
        return
    write = torch._C._accelerator_setAllocatorSettings
    others = _OPTION.sub("", torch._C._accelerator_getAllocatorSettings()).lstrip(",")
    write(",".join(filter(None, (others, f"{KEY}:{on}"))))
    if not on:  # torch's own, which the settings need not say
        write(others)
