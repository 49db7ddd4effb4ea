"""Words that steps give, decoded text say: which of them differ, and numbers written in them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.comparing.whole_numbers import Differing, differing
from speedkit_jupyter.measure.checks.reference.rounding import unit

if TYPE_CHECKING:
    from speedkit_jupyter.measure.checks.observing.observation import Observation

TOKENS = re.compile(r"-?\d+\.\d+(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+|\d+|[^\W\d_]+|[^\w\s]|_")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
# What has more digits does not fit into an int64.
MOST_DIGITS = 18
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
    observation: Observation, baseline: Observation, controls: Sequence[Observation], precision: str
) -> str:
    """What of the words rounding does not explain; empty where it explains all.

    A step that is given other whole numbers by rounding (its own tokens, say) goes elsewhere.
    """
    theirs = tokens(baseline)
    if not theirs or not _given_alike(observation, baseline):
        return ""
    count, off = differ(tokens(observation), theirs)
    pairs = [
        differ(tokens(control), theirs) for control in controls if _given_alike(control, baseline)
    ]
    most_known = max((number for number, _ in pairs), default=0)
    limit = _may_differ(most_known, len(theirs)) if most_known else _strictly(precision, theirs)
    if count > limit:
        return f"{count} of {len(theirs)} words differ, more than {precision} explains ({limit})"
    most = FACTOR * max((gap for _, gap in pairs), default=0.0) + ROUNDINGS * unit(precision)
    if off > most:
        return f"a written number is off by {off:.2g}, more than {precision} explains ({most:.2g})"
    return ""


def tokens(observation: Observation) -> list[str]:
    """Words, numbers and signs, in order."""
    pieces: list[str] = []
    for text in observation.words():
        pieces += TOKENS.findall(text)[: MOST_TOKENS - len(pieces)]
    return pieces


def differ(ones: Sequence[str], others: Sequence[str]) -> tuple[int, float]:
    """How many are others; and how far the numbers in the same places are off at most."""
    worst = 0.0
    if len(ones) == len(others):
        for word, expected in zip(ones, others, strict=True):
            if _is_rounded(word) and _is_rounded(expected):
                worst = max(worst, _off(word, expected))
    mine, theirs = (
        ["#" if _is_rounded(word) else word for word in words] for words in (ones, others)
    )
    if len(ones) == len(others) or max(len(ones), len(others)) > SOME:
        same = sum(word == expected for word, expected in zip(mine, theirs, strict=False))
    else:
        blocks = SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
    return max(len(ones), len(others)) - same, worst


def differing_in(observation: Observation, reference: Observation) -> list[Differing]:
    """How the whole numbers that are written in words differ, all together; none without any."""
    import torch

    mine, theirs = tokens(observation), tokens(reference)
    places = [index for index, word in enumerate(theirs) if _is_whole(word)]
    if not places:
        return []
    if len(mine) != len(theirs) or not all(_is_whole(mine[index]) for index in places):
        return [Differing(0, len(places))]
    pair = (torch.tensor([int(words[index]) for index in places]) for words in (mine, theirs))
    return differing(*([value] for value in pair))


def _is_whole(word: str) -> bool:
    return word.isdecimal() and len(word) <= MOST_DIGITS


def _is_rounded(word: str) -> bool:
    is_written_so = ("." in word or "e" in word.lower()) and bool(NUMBER.fullmatch(word))
    return is_written_so and math.isfinite(float(word))


def _off(word: str, expected: str) -> float:
    """Relative, and of the last digit that is written no more than one counts."""
    mine, theirs = float(word), float(expected)
    digits = len(expected.lower().partition("e")[0].partition(".")[2])
    # As text: of a checksum that reads like a number, 8e951, the power is larger than any float.
    last = float(f"1e{expected.lower().partition('e')[2] or 0}") * 10.0**-digits
    beyond = abs(mine - theirs) - 1.001 * last
    return beyond / max(abs(theirs), 1e-30) if beyond > 0 else 0.0


def _given_alike(observation: Observation, baseline: Observation) -> bool:
    if len(observation.calls) != len(baseline.calls):
        return False
    pairs = zip(observation.calls, baseline.calls, strict=True)
    return all(
        len(call.given) == len(expected.given)
        and all(a.shape == b.shape and bool((a == b).all())
                for a, b in zip(call.given, expected.given, strict=True))
        for call, expected in pairs
    )  # fmt: skip


def _strictly(precision: str, theirs: Sequence[str]) -> int:
    """How many may differ where rounding changes none in any control.

    Words may stand for the largest of some numbers: of many a few then lie closer together than
    the controls happen to show. A single one, and text with few, says what the step did.
    """
    return 0 if precision == "fp32" else int(OF_MANY * len(theirs))


def _may_differ(count: int, size: int) -> int:
    return int(2 * count + 3 * count**0.5 + 1 + 0.01 * size)
