"""A search measures the attention kernels on the step's own calls, and tries what is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import Facts, tune
from speedkit_jupyter.measure.checks import attention_kernels
from speedkit_jupyter.tuning.outcome import Tuning

pytestmark = pytest.mark.usefixtures("trusted")


class Attending(nn.Module):
    """One call of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.inner(x)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.fixture
def step(monkeypatch, machine) -> Any:
    machine("cpu")
    monkeypatch.setattr(attention_kernels, "BLOCK_S", 1e-4)  # of the tests' own clock
    torch.manual_seed(0)
    model, x = Attending(), torch.rand(2, 2, 16, 8)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step, model


def tried(found: Tuning) -> set[Any]:
    every = (record.plan for stage in found.stages for record in stage.comparison.records)
    return {plan["sdpa"] for plan in every if "sdpa" in plan}


def test_the_table_is_in_the_result_and_what_is_no_faster_is_not_tried(step):
    found = tune(step[0], budget_s=3.0, fresh=True)
    (row,) = found.facts.attention
    assert (row.own, row.calls, row.call.is_causal) == ("flash", 1, True)
    assert {one.kernel for one in row.kernels} == {"flash", "math"}
    assert Facts.read(step[1]).attention == found.facts.attention
    assert tried(found) == set()


@pytest.mark.slow
def test_what_is_faster_there_is_tried(step, monkeypatch, made_time):
    real = attention_kernels._Job._run

    def run(job: Any) -> None:
        if torch.backends.cuda.flash_sdp_enabled():
            made_time.sleep(1e-5)
        real(job)

    monkeypatch.setattr(attention_kernels._Job, "_run", run)
    found = tune(step[0], budget_s=3.0, fresh=True)
    assert tried(found) == {"math"}
    told = found.plan["sdpa"].reason if found.helped else ""
    assert not told or "times as fast" in told


def test_what_is_to_stay_as_it_is_is_not_measured(step):
    assert tune(step[0], budget_s=0.5, fresh=True, keep="sdpa").facts.attention == ()
