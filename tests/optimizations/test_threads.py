"""threads: intra-op threads."""

from __future__ import annotations

import torch

from speedkit_jupyter import SpeedConfig, apply_speedups


def test_a_number_is_obeyed_and_put_back(two_threads):
    found = torch.get_num_threads()
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(threads=found + 1))[1] as context:
        assert torch.get_num_threads() == found + 1
        assert "more than the" in context.plan["threads"].reason
    assert torch.get_num_threads() == found
