"""What `%unload_ext` ends: whatever starts something that stays registers the end of it."""

from __future__ import annotations

from collections.abc import Callable

# State at module level, on purpose: what runs belongs to the process.
_ENDS: dict[str, Callable[[], object]] = {}


def at_unload(end: Callable[[], object]) -> None:
    """Call the function when the extension is unloaded; once, however often it is registered."""
    _ENDS[f"{end.__module__}.{end.__qualname__}"] = end


def unload() -> None:
    """Call all that was registered, the first one first."""
    while _ENDS:
        _ENDS.pop(next(iter(_ENDS)))()
