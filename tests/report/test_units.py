"""Numbers as people read them."""

from __future__ import annotations

import pytest

from speedkit_jupyter.report.units import with_unit


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1.234, "J", "1.23 J"),
        (0.0452, "J", "45.2 mJ"),
        (3100.0, "J", "3.1 kJ"),
        (2e-6, "J", "2 µJ"),
        (0.0, "", "0"),
        (0.3, "", "0.3"),
        (1234.0, "", "1230"),
    ],
)
def test_a_quantity_has_its_prefix_and_a_count_has_none(value, unit, words):
    assert with_unit(value, unit) == words
