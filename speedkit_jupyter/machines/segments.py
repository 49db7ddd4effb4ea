"""torch's allocator on CUDA: segments of memory that grow, in place of ever more of fixed size."""

from __future__ import annotations

import re

from speedkit_jupyter.support.torch_private import allocator_settings, set_allocator_settings

NAME = "cuda.expandable_segments"
KEY = "expandable_segments"
_OPTION = re.compile(rf"(^|,)\s*{KEY}\s*:\s*(\w+)\s*")


def are_expandable() -> bool:
    """Return whether those that come next are. Raises AttributeError where torch can't be asked."""
    settings = _OPTION.findall(allocator_settings())
    return bool(settings) and settings[-1][1] == "True"


def use(on: bool) -> None:
    """Set it from the next segment on; the other settings of the allocator stay."""
    if on == are_expandable():
        return
    others = _OPTION.sub("", allocator_settings()).lstrip(",")
    set_allocator_settings(",".join(filter(None, (others, f"{KEY}:{on}"))))
    if not on:  # torch's own, which the settings need not say
        set_allocator_settings(others)
