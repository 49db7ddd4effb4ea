"""What can't be put back stands in the result too: a panel has no other place to say it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.subject.step import StateWarning


def test_a_result_names_what_the_step_uses_and_nobody_can_put_back(tmp_path):
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    log = (tmp_path / "log").open("w")
    cached = functools.lru_cache(lambda number: number)

    def step():
        log.write(f"{cached(1)}")
        return model(x)

    with log, pytest.warns(StateWarning):
        found = benchmark(step, "baseline,threads:1", budget_s=0.05)
    assert any("written" in line for line in found.beyond)
    text = " ".join(repr(found).split())
    assert all(line[1:] in text for line in found.beyond)
    assert Comparison.from_dict(found.to_dict()).beyond == found.beyond


def test_where_all_is_put_back_nothing_is_named():
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    assert not benchmark(lambda: model(x), "baseline,threads:1", budget_s=0.05).beyond
