"""What a part of a plan is worth, and how long it would take to tell."""

from __future__ import annotations

import math

import pytest

from speedkit_jupyter.measure.results.statistics import Ratio
from speedkit_jupyter.tuning.parts import Part


@pytest.mark.parametrize(
    ("ratio", "least", "most"),
    [
        (Ratio(1.05, 1.01, 1.09, 40), 20, 40),  # is proven already
        (Ratio(1.02, 0.98, 1.06, 40), 150, 170),
        (Ratio(1.0, 0.98, 1.02, 40), 150, 170),  # its part has to bring 1 %
        (Ratio(1.0101, 0.98, 1.04, 40), 300, 400),
        (Ratio(1.2, 0.0, math.inf, 5), 10, 10),  # no interval yet
    ],
)
def test_how_many_rounds_would_make_a_part_clear_follows_its_interval(ratio, least, most):
    assert least <= Part("fused_optimizer", "fused_optimizer", ratio).rounds_needed() <= most


def test_a_part_that_was_not_measured_never_gets_clear():
    assert Part("bf16", "bf16", None).rounds_needed() == math.inf
