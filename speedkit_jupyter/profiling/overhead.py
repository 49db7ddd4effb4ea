"""What telling a split takes, and how long the parts of a step take without it.

It is measured alone, where everything that it needs lies in the processor's caches. Beside a step
it takes some times as long, and what comes after it takes longer, too: how much in all, the plain
calls say; how much of it within each part, the calls that were told of that part as a whole.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from speedkit_jupyter.profiling.instruments import counted, installed_within
from speedkit_jupyter.profiling.recorder import Recorder
from speedkit_jupyter.profiling.split import PARTS, Overhead, Part, Piece, Split

CALLS = 500
# Telling takes up to this many times as long beside a step as alone, and once more.
MOST_TIMES = 5.0
# But of what a part seems to take, this share is its own (as loops timed by hand show).
LEAST_LEFT = 0.25
# Where telling makes a call this many times as long, others tell of the parts as a whole alone.
COSTLY = 1.25


def measured() -> Overhead:
    """Measure what telling takes here: of a method that waits, and of a part without anything."""
    import torch

    value, weight = torch.zeros(()), torch.zeros((), requires_grad=True)
    names = ("plain", "waited", "passed", "parted", "between", "alone", "forward")
    split = {name: Split(now=time.perf_counter) for name in names}
    part: Part
    with split["plain"].run():
        for _ in range(CALLS):
            value.item()
    for name, part in (("waited", "rest"), ("passed", "data")):
        recorder = Recorder(split[name])
        with installed_within(recorder), recorder.split.run(), recorder.split.within(part):
            for _ in range(CALLS):
                value.item()
    recorder = Recorder(split["parted"])
    nothing = counted("optimizer", recorder, lambda: None)
    with recorder.functions(), recorder.split.run():
        for _ in range(CALLS):
            nothing()
    with Recorder(split["between"]).functions(), split["between"].run():
        for _ in range(CALLS):
            value.dim()
    with split["alone"].run():
        for _ in range(CALLS):
            weight * weight
    with Recorder(split["forward"]).functions(), split["forward"].run():
        for _ in range(CALLS):
            weight * weight
    plain_s, seconds = split["plain"].seconds["rest"], {n: one.seconds for n, one in split.items()}
    each = Overhead(
        before=seconds["waited"]["rest"] - plain_s,
        around=seconds["parted"]["rest"],
        inside=seconds["parted"]["optimizer"],
        between=seconds["between"]["rest"],
        passing=seconds["passed"]["data"] - plain_s,
        waiting=seconds["waited"]["synchronizations"] - plain_s,
        within=seconds["forward"]["forward"] - seconds["alone"]["rest"],
        beside=seconds["forward"]["rest"],
    )
    return Overhead(*(max(spent_s, 0.0) / CALLS for spent_s in each))


def told_over_plain(splits: Sequence[Split], plain_s: Sequence[float]) -> float | None:
    """Return how many times as long a call takes that is told of; None without plain calls."""
    if not (plain_s and splits):
        return None
    return median(sum(split.pieces.values()) for split in splits) / median(plain_s)


def corrected(
    splits: Sequence[Split], whole: Sequence[Split], plain_s: Sequence[float]
) -> dict[Part, float]:
    """Return the seconds of each part in all of `splits`, without what telling took; `whole` are
    those of calls that were told of the parts as a whole, `plain_s` the seconds of plain calls.
    """
    pieces, off = _summed(splits)
    if plain_s and splits:
        if whole:
            parts = _by_part(_less(*_summed(whole), _longer_s(whole, plain_s)))
            pieces = _within(pieces, off, parts, len(splits) / len(whole))
        else:
            pieces = _less(pieces, off, _longer_s(splits, plain_s))
    return _by_part(pieces)


def _within(
    pieces: Mapping[Piece, float],
    off: Mapping[Piece, float],
    wholes: Mapping[Part, float],
    times: float,
) -> dict[Piece, float]:
    """Return the pieces of each part, scaled to `times` as long together as the whole part."""
    found: dict[Piece, float] = {}
    for part, seconds in wholes.items():
        whole_s = times * seconds
        within = {piece: spent_s for piece, spent_s in pieces.items() if piece[0] == part}
        some = _less(within, off, sum(within.values()) - whole_s)
        scale = whole_s / (sum(some.values()) or 1.0)
        found |= {piece: scale * spent_s for piece, spent_s in some.items()}
    return found


def _longer_s(splits: Sequence[Split], plain_s: Sequence[float]) -> float:
    """Return how many seconds longer than plain calls all took, after what was taken off."""
    return len(splits) * (median(split.total_s for split in splits) - median(plain_s))


def _summed(splits: Iterable[Split]) -> tuple[dict[Piece, float], dict[Piece, float]]:
    """Return seconds of pieces, without what is ours, and what was taken off."""
    seconds, off = defaultdict[Piece, float](float), defaultdict[Piece, float](float)
    for split in splits:
        for kept, counts in ((seconds, split.pieces), (off, split.taken_off)):
            for piece, spent_s in counts.items():
                if piece[1] != "ours":
                    kept[piece] += spent_s
    return seconds, off


def _less(
    seconds: Mapping[Piece, float], off: Mapping[Piece, float], longer_s: float
) -> dict[Piece, float]:
    """Take off what telling took beyond what was taken off already: `longer_s` in all; below 0, too
    much was.
    """
    off_s = sum(off.get(piece, 0.0) for piece in seconds)
    times = min(max(longer_s / off_s, -1.0), MOST_TIMES) if off_s else 0.0
    return {
        piece: max(spent_s - times * off.get(piece, 0.0), LEAST_LEFT * spent_s)
        for piece, spent_s in seconds.items()
    }


def _by_part(pieces: Mapping[Piece, float]) -> dict[Part, float]:
    found: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for (_, part), seconds in pieces.items():
        found[part] += seconds
    return found
