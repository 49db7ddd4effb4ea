"""threads: intra-op threads."""

from __future__ import annotations

import torch

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan


def test_auto_cuts_what_a_container_can_not_use(hardware):
    decision = plan(SpeedConfig(), hardware("cpu"), Facts(flags={"num_threads": 64}))["threads"]
    assert (decision.value, decision.active) == (2, True)
    assert "64 threads" in decision.reason


def test_auto_leaves_fewer_threads_alone(hardware):
    decision = plan(SpeedConfig(), hardware("cpu"), Facts(flags={"num_threads": 1}))["threads"]
    assert not decision.active


def test_a_number_is_obeyed_and_put_back():
    found = torch.get_num_threads()
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(threads=found + 1))[1] as context:
        assert torch.get_num_threads() == found + 1
        assert "more than the" in context.plan["threads"].reason
    assert torch.get_num_threads() == found
