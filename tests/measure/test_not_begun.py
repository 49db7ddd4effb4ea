"""A loader's iterator that has yet to draw its order is named before the step runs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark


@pytest.mark.parametrize(
    ("shuffle", "begun", "named"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_what_the_next_epochs_order_depends_on_is_said(made_time, shuffle, begun, named):
    loader = torch.utils.data.DataLoader(torch.rand(8, 2), batch_size=2, shuffle=shuffle)
    batches, model = iter(loader), nn.Linear(2, 1)
    if begun:
        next(batches)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        benchmark(lambda: model(next(batches)), "baseline,threads:1", budget_s=0.05)
    assert any("draw the order of its epoch" in str(one.message) for one in said) == named
