"""What can't be put back, in words: said before a step runs, and after it if it changed."""

from __future__ import annotations

from collections.abc import Iterable

from speedkit_jupyter.measure.undo.handlers.iterators import Files
from speedkit_jupyter.measure.undo.iterators import Replays
from speedkit_jupyter.measure.undo.snapshot import Snapshot

# A line has no more names than this.
MOST_NAMES = 5


def before(state: Snapshot, replays: Replays) -> list[str]:
    """Return a line for each reason why something that the step reaches can't be put back."""
    walk = state.walk
    files: list[str] = []
    unknown: list[str] = []
    for instance in walk.found.values():
        for handler in walk.handlers(instance):
            if handler.is_unrestorable(instance):
                name = walk.name(instance)
                if type(handler) is Files:
                    files.append(f"the file {name}")
                else:
                    unknown.append(f"{name} ({type(instance).__name__})")
    lines = [
        _line(
            replays.given_again,
            "drawn from: an object in its place gives the same again to callers of next(), and a "
            "later epoch's order may be another than without the measurement",
        ),
        _line(files, "written to: that can't be put back"),
        _line(replays.drawn, "drawn from: only an iterator in a variable of its own is replayed"),
        _line([*unknown, *walk.elsewhere], "can't be copied, nor put back", "", ""),
        _line(state.too_large(), "too large to copy: what the step writes there stays"),
        *(f"{name} {why}, and can't be put back" for name, why in state.failed.items()),
    ]
    if walk.cut:
        lines.append(
            f"more than {len(walk.found):,} objects are reached: what lies behind "
            f"{walk.name(walk.cut[0])} can't be put back"
        )
    return [line for line in lines if line]


def after(state: Snapshot, replays: Replays) -> list[str]:
    """Return lines for what was changed all the same, and for what failed to be put back."""
    lines = [
        _line(replays.driven(), "driven by send(), throw() or close(), for real", "was", "were"),
    ]
    lines += [f"{name} {why}" for name, why in state.failed.items() if "put back" in why]
    return [line for line in lines if line]


def _line(names: Iterable[str], text: str, one: str = "is", several: str = "are") -> str:
    labels = list(dict.fromkeys(names))
    if not labels:
        return ""
    more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
    names = ", ".join(labels[:MOST_NAMES]) + more
    return " ".join(filter(None, [names, several if labels[1:] else one, text]))
