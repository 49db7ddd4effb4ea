"""The tolerance: how far a tensor may be off, as a multiple of what rounding costs this step."""

from __future__ import annotations

import math

from speedkit_jupyter.right.deviations import Deviation
from speedkit_jupyter.right.rounding import unit

# A tensor beyond its limit by less than DOUBT may be the net or the plan: the variant is not called
# wrong, and can't win. A later call without a control has LIKE times the limits of the last one
# before it that has the same tensors.
DOUBT, LIKE = 2.0, 3.0
# The limit of each kind of tensor: a multiple of its control's deviation, plus a share, plus a
# number of roundings for other kernels.
# A ReLU or a maximum that falls the other way by rounding moved gradients by 2e-2 in fp16; batch
# statistics of 8 samples moved by 4e-2. Parameters that move outside of a compared optimizer step
# may be Adam's, and rounding turns the first steps of Adam in some elements.
LIMITS = {
    "output": (3.0, 0.0, 2.0),
    "gradient": (8.0, 2e-2, 16.0),
    "gradients": (4.0, 1e-2, 4.0),  # all together
    "parameter": (4.0, 1e-2, 2.0),
    "moved": (4.0, 0.25, 2.0),
    "buffer": (8.0, 5e-2, 2.0),
}
# Scale and bias may be this many times the control's. A maximum that falls the other way shifts a
# whole bias's gradient: bias counts in outputs alone.
ALONG = 4.0
# float32 kernels add up in another order, which brings as many roundings as there are terms. (Of
# 30 nets' outputs none was off by more than 42; then came a small convolutional net with 120.)
TERMS = 512.0
# If rounding alone moves a tensor by its own size, nothing can be said about it.
UNDETERMINED = 1.0


def beyond_limit(
    found: Deviation, size: int, control: Deviation | None, kind: str, precision: str
) -> tuple[float, str]:
    """Return how many times its limit a tensor is off, and that in words; 0 where undetermined."""
    times, besides, roundings = LIMITS[kind]
    known = control or Deviation(*[8 * unit(precision)] * 3)  # typical, where no control could run
    if known.distance >= UNDETERMINED:
        return 0.0, ""
    # A control may have no scale or bias by chance, so its distance, spread over the elements,
    # counts too. In a row or a channel 64 elements count as one error: they share their rounding.
    spread = known.distance * min(1.0, math.sqrt(64 / max(size, 1)))
    # Scatter within a net that normalizes shortens the rest of the signal by 1 + scatter**2.
    spread += known.distance**2 / 2
    besides += roundings * unit(precision) * (TERMS if precision == "fp32" else 1.0)
    explained = [
        ("off", found.distance, times * known.distance),
        ("scaled", found.scale, ALONG * (known.scale + spread)),
        ("shifted", found.bias, ALONG * (known.bias + spread)),
    ]
    worst = (0.0, "")
    for word, value, most in explained if kind == "output" else explained[:2]:
        most += besides
        excess = math.inf if math.isnan(value) else value / most
        if excess > worst[0]:
            worst = excess, f"{word} by {value:.2g}, where {precision} explains {most:.2g}"
    return worst
