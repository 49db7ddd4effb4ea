"""What is beyond the controls by a hair accuses nobody, and two numbers never print as one."""

from __future__ import annotations

import pytest

from speedkit_jupyter.measure.checks.comparing.deviation import Deviation
from speedkit_jupyter.measure.checks.comparing.errors import Errors
from speedkit_jupyter.measure.checks.comparing.tolerance import NARROW, Tolerance, told_apart


@pytest.mark.parametrize(
    ("value", "limit"), [(0.1234, 0.1233), (0.12, 0.11), (3.0, 2.9999999), (1e-9, 9.99e-10)]
)
def test_a_figure_and_its_limit_print_differently(value, limit):
    one, other = told_apart(value, limit)
    assert one != other
    assert float(one) > float(other)


@pytest.mark.parametrize(("times", "accused"), [(1.001, False), (1.05, False), (1.2, True)])
def test_after_all_controls_a_narrow_margin_is_no_accusation(times, accused):
    control = Errors(numbers=[Deviation(4096, 0.02)], names=["output"])
    limit = 3 * 0.02 + 2 * 2.0**-8  # of outputs in bf16
    seen = Errors(numbers=[Deviation(4096, times * limit)], names=["output"])
    assert Tolerance("bf16", [control]).beyond(seen)
    assert bool(Tolerance("bf16", [control], NARROW).beyond(seen)) is accused
