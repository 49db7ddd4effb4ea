"""When rounds may end: the fewest pairs, the planned tests, and the error of each test.

Each verdict of a run holds with an error of at most ERROR, although the run may end at a test.
"""

from __future__ import annotations

import math

# Fewer pairs can't bound a median at the levels used here.
LEAST_PAIRS = 8
# For these few pairs, Student's interval is used if the interval and each pair are beyond 1.2 on
# the same side. In simulated runs of equal code (outliers of 2 to 10 times in up to half of all
# blocks, bursts, drift, Cauchy noise) at most 0.3 % were called faster, and 1.9 % if other work
# comes and goes with the blocks.
FAR_PAIRS = range(5, 16)
# Error probability of a whole run. Half is for the test at the end, which decides most small
# differences; the earlier tests share the other half.
ERROR, LAST_LOOK = 0.05, 0.5
# A run ends early once every verdict is clear and every interval is as narrow as this.
PRECISE = 0.03


def planned_looks(rounds: int, variants: int = 1) -> tuple[int, ...]:
    """Return the rounds after which to test, for a budget of `rounds`: 5, 9, 13, 19, 28 …

    The first test finds variants that are far ahead; the second has enough pairs for an interval
    of each variant.
    """
    looks = [LEAST_PAIRS]
    while (later := looks[-1] * 3 // 2) < rounds:
        looks.append(later)
    error = error_of_a_look(1 + len(looks), ended=False)
    more = least_pairs(bonferroni_share(error, variants)) - LEAST_PAIRS
    return (FAR_PAIRS[0], *(look + more for look in looks))


def error_of_a_look(looks: int, ended: bool) -> float:
    """Return the share of ERROR for the test at the end, or for each of the earlier `looks`.

    By Bonferroni's inequality the run's error is at most ERROR, although it stops at the first
    conclusive test.
    """
    is_last = ended or not looks
    return ERROR * LAST_LOOK if is_last else bonferroni_share(ERROR * (1 - LAST_LOOK), looks)


def bonferroni_share(error: float, comparisons: int) -> float:
    """Return the error of each of several comparisons, so that all hold together."""
    return error / max(comparisons, 1)


def least_pairs(error: float) -> int:
    """Return the fewest pairs that can bound a median at an error probability."""
    return max(LEAST_PAIRS, least_values(error))


def least_values(error: float = ERROR) -> int:
    """Return the fewest values whose extremes bound their median at an error probability."""
    return math.ceil(math.log2(2 / error))


def least_rounds(variants: int) -> int:
    """Return the fewest rounds that give each of several variants an interval at the end."""
    return least_pairs(bonferroni_share(ERROR * LAST_LOOK, variants))
