"""Words that steps give, decoded text say: which of them differ, and numbers written in them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.rounding import unit

if TYPE_CHECKING:
    from speedkit_jupyter.measure.checks.observation import Observation

TOKENS = re.compile(r"-?\d+\.\d+(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+|\d+|[^\W\d_]+|[^\w\s]|_")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
# More tokens of one step are not compared; one by one in order where there are SOME.
MOST_TOKENS, SOME = 20_000, 2_000
# A written number may be off by so many times what those of the controls are, by so many roundings
# more, and by one in its last digit.
FACTOR, ROUNDINGS = 4.0, 32.0
# Of many words rounding may decide this share, though it decides none in a control.
OF_MANY = 0.03


def enough(baseline: Observation) -> bool:
    """Whether words alone tell rounding from errors."""
    count = len(tokens(baseline))
    return count > 2 * _may_differ(0, count)


def misspelt(
    seen: Observation, baseline: Observation, controls: Sequence[Observation], precision: str
) -> str:
    """What of the words rounding does not explain; empty where it explains all.

    A step that is given other whole numbers by rounding (its own tokens, say) goes elsewhere.
    """
    theirs = tokens(baseline)
    if not theirs or not _given_alike(seen, baseline):
        return ""
    count, off = differ(tokens(seen), theirs)
    known = [differ(tokens(one), theirs) for one in controls if _given_alike(one, baseline)]
    most_known = max((each for each, _ in known), default=0)
    limit = _may_differ(most_known, len(theirs)) if most_known else _strictly(precision, theirs)
    if count > limit:
        return f"{count} of {len(theirs)} words differ, more than {precision} explains ({limit})"
    most = FACTOR * max((each for _, each in known), default=0.0) + ROUNDINGS * unit(precision)
    if off > most:
        return f"a written number is off by {off:.2g}, more than {precision} explains ({most:.2g})"
    return ""


def tokens(seen: Observation) -> list[str]:
    """Words, numbers and signs, in order."""
    found: list[str] = []
    for one in seen.words():
        found += TOKENS.findall(one)[: MOST_TOKENS - len(found)]
    return found


def differ(ones: Sequence[str], others: Sequence[str]) -> tuple[int, float]:
    """How many are others; and how far the numbers in the same places are off at most."""
    worst = 0.0
    if len(ones) == len(others):
        for one, other in zip(ones, others, strict=True):
            if _is_rounded(one) and _is_rounded(other):
                worst = max(worst, _off(one, other))
    mine, theirs = (["#" if _is_rounded(one) else one for one in each] for each in (ones, others))
    if len(ones) == len(others) or max(len(ones), len(others)) > SOME:
        same = sum(one == other for one, other in zip(mine, theirs, strict=False))
    else:
        blocks = SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
    return max(len(ones), len(others)) - same, worst


def _is_rounded(word: str) -> bool:
    is_written_so = ("." in word or "e" in word.lower()) and bool(NUMBER.fullmatch(word))
    return is_written_so and math.isfinite(float(word))


def _off(one: str, other: str) -> float:
    """Relative, and of the last digit that is written no more than one counts."""
    mine, theirs = float(one), float(other)
    digits = len(other.lower().partition("e")[0].partition(".")[2])
    # As text: of a checksum that reads like a number, 8e951, the power is larger than any float.
    last = float(f"1e{other.lower().partition('e')[2] or 0}") * 10.0**-digits
    beyond = abs(mine - theirs) - 1.001 * last
    return beyond / max(abs(theirs), 1e-30) if beyond > 0 else 0.0


def _given_alike(seen: Observation, baseline: Observation) -> bool:
    if len(seen.calls) != len(baseline.calls):
        return False
    pairs = zip(seen.calls, baseline.calls, strict=True)
    return all(
        len(one.given) == len(other.given)
        and all(a.shape == b.shape and bool((a == b).all())
                for a, b in zip(one.given, other.given, strict=True))
        for one, other in pairs
    )  # fmt: skip


def _strictly(precision: str, theirs: Sequence[str]) -> int:
    """How many may differ where rounding changes none in any control.

    Words may stand for the largest of some numbers: of many a few then lie closer together than
    the controls happen to show. A single one, and text with few, says what the step did.
    """
    return 0 if precision == "fp32" else int(OF_MANY * len(theirs))


def _may_differ(count: int, size: int) -> int:
    return int(2 * count + 3 * count**0.5 + 1 + 0.01 * size)
