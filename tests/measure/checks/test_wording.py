"""Words that a step gives, and the numbers written in them."""

from __future__ import annotations

import hashlib

import pytest
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.checks.comparing.wording import TOKENS, differ


@pytest.mark.parametrize(
    ("one", "other", "count", "off"),
    [
        ("loss 0.50", "loss 0.51", 0, 0.0),  # by one in the last digit
        ("loss 0.50", "loss 0.60", 0, 0.15),
        ("8e951", "8e951", 0, 0.0),
        ("8e951", "7e951", 1, 0.0),  # no number that there is
        ("0e999", "1.5", 0, 0.9),
        ("1e" + "9" * 5000, "1e" + "9" * 5000, 0, 0.0),
        ("1e-" + "9" * 5000, "2.0", 0, 0.9),
    ],
)
def test_numbers_are_compared_as_such_and_the_rest_as_words(one, other, count, off):
    found = differ(TOKENS.findall(one), TOKENS.findall(other))
    assert found[0] == count
    assert found[1] >= off * 0.9
    assert found[1] <= max(off * 1.2, 1e-12)


def test_a_step_that_returns_checksums_is_measured(made_time):
    model, numbers = nn.Linear(2, 2), iter(range(10**6))

    def step() -> str:
        model.zero_grad()
        model.weight.sum().backward()
        made_time.sleep(0.001)
        return "8e951 " + hashlib.sha256(str(next(numbers)).encode()).hexdigest()

    assert benchmark(step, "baseline,channels_last", model=model, budget_s=0.2).baseline.times_s
