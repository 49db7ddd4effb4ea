"""What stands on torch's insides: it is there in this torch, and where it is not, that is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

from speedkit_jupyter import SpeedConfig, apply_speedups, benchmark, plan
from speedkit_jupyter.machines import flags


@pytest.mark.parametrize(
    ("entry", "asked", "owner", "name"),
    [
        ("sdpa", "math", torch.backends.cuda, "cudnn_sdp_enabled"),
        ("gemm", "onednn", torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    ],
)
def test_what_stands_on_something_that_torch_has_moved_is_declined_and_the_rest_works(
    monkeypatch: pytest.MonkeyPatch, entry: str, asked: str, owner: Any, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    decision = plan(SpeedConfig(**{entry: asked}))[entry]
    assert decision.declined
    assert not decision.active
    assert name in decision.rule
    model = nn.Linear(4, 4)
    before = flags.snapshot()
    _, context = apply_speedups(model, SpeedConfig(**{entry: asked, "precision": "bf16"}))
    assert context.plan["precision"].active
    context.restore()
    assert flags.snapshot() == before


def test_clipping_that_torch_has_moved_fails_fp16_alone_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(clip_grad, "_group_tensors_by_device_and_dtype")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    comparison = benchmark(step, "baseline,fp16,bf16", budget_s=0.2)
    verdicts = {record.name: comparison.verdict(record) for record in comparison.records}
    assert verdicts["fp16"] == "failed"
    assert "_group_tensors_by_device_and_dtype" in (comparison.records[1].failure or "")
    assert verdicts["bf16"] != "failed"


def test_an_own_mistake_is_not_taken_for_what_torch_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from speedkit_jupyter.optimizations.sdpa import Sdpa

    monkeypatch.setattr(Sdpa, "decide", lambda self, *_: self.no_such_thing)
    with pytest.raises(AttributeError, match="no_such_thing"):
        plan()
