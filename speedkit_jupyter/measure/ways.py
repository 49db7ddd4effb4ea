"""Whether the parameters went where the baseline's did, by whatever moved them: an average, say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.magnitudes import norm

if TYPE_CHECKING:
    from speedkit_jupyter.measure.observation import Observation

# So many times what the controls are off, and this share of the way more; without a control what
# goes the other way is wrong.
FACTOR, BESIDES, UNKNOWN = 4.0, 0.1, 1.5


def astray(seen: Observation, baseline: Observation, controls: Sequence[Observation]) -> str:
    """How far off they went, where rounding does not explain it; empty where it does."""
    others = [one for one in controls if one is not baseline]
    # All begin in the same place: where no gradient leads them, each alone is nothing but that.
    single = range(0 if baseline.has_gradients() else len(baseline.way))
    for which in (slice(None), *(slice(one, one + 1) for one in single)):
        found = _off(seen, baseline, which)
        known = [_off(one, baseline, which) for one in others]
        there = [one for one in known if one is not None and math.isfinite(one)]
        if found is None or (known and not there):
            continue
        limit = FACTOR * max(there) + BESIDES if there else UNKNOWN
        if not found <= limit:
            return (
                f"the parameters went {found:.2g} of their way off, more than rounding does "
                f"({limit:.2g})"
            )
    return ""


def _off(seen: Observation, baseline: Observation, which: slice) -> float | None:
    """As a share of the way; None where the parameters did not move, or others did."""
    if [one.shape for one in seen.way] != [one.shape for one in baseline.way]:
        return None
    way = math.hypot(*map(norm, baseline.way[which]))
    pairs = zip(seen.way[which], baseline.way[which], strict=True)
    return math.hypot(*(norm(one - other) for one, other in pairs)) / way if way else None
