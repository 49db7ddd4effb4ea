"""How long the parts of a step take where nobody tells how long they take.

What telling takes was measured alone, where everything that it needs lies in the processor's caches
(`bias.py`). Beside a step it takes some times as long, and what comes after it takes longer, too:
how much in all, the plain calls say; how much of it within each part, the calls that were told of
that part as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from speedkit_jupyter.profiling.split import PARTS, Part, Piece, Split

# Telling takes up to so many times as long beside a step as alone, and once more.
MOST_TIMES = 5.0
# But of what a part seems to take, so much is its own (as loops timed by hand show).
LEAST_LEFT = 0.25
# Where telling makes a call so many times as long, others tell of the parts as a whole alone.
COSTLY = 1.25


def told_over_plain(splits: Sequence[Split], plain_s: Sequence[float]) -> float | None:
    """How many times as long a call takes that is told of; None where none was made untold."""
    if not (plain_s and splits):
        return None
    told_s = median(split.total_s + split.seconds["ours"] for split in splits)
    return told_s / median(plain_s)


def is_costly(times: float | None) -> bool:
    """Whether that is so long that it may hide how long the parts are."""
    return (times or 1.0) > COSTLY


def as_if_untold(
    splits: Sequence[Split], whole: Sequence[Split], plain_s: Sequence[float]
) -> dict[Part, float]:
    """Seconds of each part in all of `splits`; `whole` are those of calls that were told of the
    parts as a whole, `plain_s` the seconds of calls that nobody told of.
    """
    pieces, off = _summed(splits)
    if not (plain_s and splits):
        return _by_part(pieces)
    if not whole:
        return _by_part(_less(pieces, off, _longer_s(splits, plain_s)))
    wholes = _by_part(_less(*_summed(whole), _longer_s(whole, plain_s)))
    return _by_part(_within(pieces, off, wholes, len(splits) / len(whole)))


def _within(
    pieces: Mapping[Piece, float],
    off: Mapping[Piece, float],
    wholes: Mapping[Part, float],
    times: float,
) -> dict[Piece, float]:
    """The pieces of each part, which take so many times as long together as the whole does."""
    found: dict[Piece, float] = {}
    for part, seconds in wholes.items():
        whole_s = times * seconds
        within = {piece: spent_s for piece, spent_s in pieces.items() if piece[0] == part}
        some = _less(within, off, sum(within.values()) - whole_s)
        scale = whole_s / (sum(some.values()) or 1.0)
        found |= {piece: scale * spent_s for piece, spent_s in some.items()}
    return found


def _longer_s(splits: Sequence[Split], plain_s: Sequence[float]) -> float:
    """How many seconds longer than plain calls they took, in all, after what was taken off."""
    return len(splits) * (median(split.total_s for split in splits) - median(plain_s))


def _summed(splits: Iterable[Split]) -> tuple[dict[Piece, float], dict[Piece, float]]:
    """Seconds of pieces, but for what is ours, and what was taken off."""
    seconds, off = defaultdict[Piece, float](float), defaultdict[Piece, float](float)
    for split in splits:
        for kept, counted in ((seconds, split.pieces), (off, split.taken_off)):
            for piece, spent_s in counted.items():
                if piece[1] != "ours":
                    kept[piece] += spent_s
    return seconds, off


def _less(
    seconds: Mapping[Piece, float], off: Mapping[Piece, float], longer_s: float
) -> dict[Piece, float]:
    """Without what telling took beyond what was taken off already, `longer_s` in all; where that is
    below 0, too much was.
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
