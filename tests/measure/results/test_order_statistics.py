"""The interval of a median is the one that scipy's quantile test gives."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from speedkit_jupyter.measure.results.statistics import order_statistic


@pytest.mark.parametrize("number", [1, 5, 8, 10, 37, 200])
@pytest.mark.parametrize("error", [0.05, 0.01, 0.0005])
def test_it_is_the_interval_of_the_quantile_test(number, error):
    values = np.arange(number) + 1.0
    test = stats.quantile_test(values, q=0, p=0.5)
    expected = tuple(test.confidence_interval(confidence_level=1 - error))
    rank = order_statistic(number, error)
    found = (values[rank - 1], values[-rank]) if rank else (np.nan, np.nan)
    assert found == pytest.approx(expected, nan_ok=True)
