"""Check ratios, intervals and verdicts on made-up times, without a clock."""

import math

import numpy as np
import pytest
from scipy import stats

from speedkit_jupyter.rounds import statistics
from speedkit_jupyter.rounds.timing import Timing


@pytest.mark.parametrize(
    ("times_s", "waited_s"),
    [([2.0] * 4, 0.0), ([1.19] * 7, 0.0), ([2.0] * 6 + [1.1], 0.0), ([1.3, 9.0] * 3, 0.0),
     ([2.0] * 7, 0.1), ([2.7] * 6 + [0.8], 0.0), ([1.5] * 4 + [2.0] * 3, 0.0)],
    ids=["too few", "near", "one near", "scattered", "one disturbed", "one behind", "two states"],
)  # fmt: skip
def test_too_few_pairs_bound_nothing(times_s, waited_s):
    waits = [[0.0] * (len(times_s) - 1) + [waited_s], [0.0] * len(times_s)]
    ratio = statistics.paired_ratio(times_s, [1.0] * len(times_s), waited_s=waits)
    assert (ratio.low, ratio.high, ratio.verdict) == (0.0, float("inf"), "too noisy")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2])
def test_the_interval_of_few_pairs_holds_the_median_also_where_some_are_in_another_state(share):
    order, held = np.random.default_rng(0), 0
    true = 1.5 * math.exp(0.03 * stats.norm.ppf(0.5 / (1 - share)))
    for _ in range(1000):
        pairs = order.integers(5, 16)
        states = np.where(order.random(pairs) < share, 2.0, 1.5)
        states *= np.exp(order.normal(0, 0.03, pairs))
        ratio = statistics.paired_ratio(states, np.ones(pairs))
        assert ratio.low <= ratio.median <= ratio.high
        held += ratio.low <= true <= ratio.high
    assert held >= 940


@pytest.mark.parametrize("disturbed", [0.05, 0.2, 0.5])
def test_a_far_lead_is_seen_among_equals_in_fewer_than_one_of_a_hundred(disturbed):
    order, cried = np.random.default_rng(0), 0
    for _ in range(2000):
        times_s = np.exp(order.normal(0, 0.02, (2, 5)))
        times_s *= np.where(order.random((2, 5)) < disturbed, order.uniform(2, 10, (2, 5)), 1)
        cried += statistics.paired_ratio(*times_s, statistics.ERROR / 8).verdict != "too noisy"
    assert cried < 20


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1.01, 1.2, "faster"), (1.5, 4.4, "faster"), (0.8, 0.99, "slower"), (0.995, 1.005, "same"),
     *((low, high, "too noisy") for low, high in ((0.9, 1.1), (1.5, 4.6), (0.001, 26.0),
                                                  (0.0, math.inf)))],
)  # fmt: skip
def test_the_verdict_is_that_of_an_interval_within_a_factor_of_three(low, high, word):
    assert statistics.Ratio(1.5, low, high, 100).verdict == word


@pytest.mark.parametrize("waits", [(0.0, 0.0), (0.9, 0.9), (0.9, 0.1), (0.3, 0.6)])
def test_an_interval_lies_within_what_was_measured_and_tells_no_more_than_the_times_do(waits):
    order = np.random.default_rng(0)
    for pairs in (5, 9, 30):
        times = order.uniform(1, 1.2, (2, pairs)) * [[1.9], [1.0]]
        waited_s = [
            share * order.uniform(0.5, 1, pairs) * one
            for share, one in zip(waits, times, strict=True)
        ]
        ratio, measured = statistics.paired_ratio(*times, waited_s=waited_s), times[0] / times[1]
        if ratio.is_bounded:
            assert measured.min() <= ratio.low <= ratio.high <= measured.max()
        if waits == (0.9, 0.1):  # without waiting time, the first variant may be faster
            assert ratio.verdict == "too noisy"


@pytest.mark.parametrize("error", [0.05, 0.025, 0.001])
def test_the_least_pairs_are_enough_and_one_less_is_not(error):
    rng = np.random.default_rng(0)
    least = statistics.least_pairs(error)
    times = rng.uniform(1, 1.5, (2, least))
    assert statistics.paired_ratio(*times, error).high < float("inf")
    if least > 8:
        assert statistics.paired_ratio(*times[:, 1:], error).high == float("inf")


def test_the_interval_of_a_cell_that_waited_lies_within_its_runs():
    runs = [3.28, 2.86, 3.41, 3.3, 3.25, 3.31, 2.9, 3.29]
    assert Timing(1, runs, waited_runs=[2.0] * 8).interval_s == (2.86, 3.41)
    assert Timing(1, [*runs[:-1], 9.9], waited_runs=[2.0] * 8).interval_s is None


@pytest.mark.parametrize("number", [1, 5, 8, 10, 37, 200])
@pytest.mark.parametrize("error", [0.05, 0.01, 0.0005])
def test_it_is_the_interval_of_the_quantile_test(number, error):
    values = np.arange(number) + 1.0
    test = stats.quantile_test(values, q=0, p=0.5)
    expected = tuple(test.confidence_interval(confidence_level=1 - error))
    rank = statistics.order_statistic(number, error)
    found = (values[rank - 1], values[-rank]) if rank else (np.nan, np.nan)
    assert found == pytest.approx(expected, nan_ok=True)
