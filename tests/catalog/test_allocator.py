"""allocator: growing segments on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups
from speedkit_jupyter.catalog import allocator, named
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.machines import flags

CUDA = Facts(device="cuda:0", devices=("cuda:0",), parameters=1)
ENTRY = named("allocator")
can_be_asked = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="this torch can't say what its allocator's setting is",
)


@can_be_asked
@pytest.mark.parametrize(
    "users",
    [
        "",
        "max_split_size_mb:64",
        "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8",
        "expandable_segments:True,max_split_size_mb:64",
        "max_split_size_mb:64,expandable_segments:False",
    ],
)
def test_the_users_other_settings_stay_and_come_back(users):
    write, read = (
        getattr(torch._C, f"_accelerator_{one}AllocatorSettings") for one in ("set", "get")
    )
    write(users)
    had, target = allocator.are_expandable(), Target(nn.Linear(2, 2))
    decision = Decision("allocator", "expandable_segments", "as asked", active=True)
    try:
        with ENTRY.applied(decision, target):
            assert allocator.are_expandable()
            for part in users.split(",expandable")[0].split("expandable_segments:True,"):
                assert part in read()
        assert allocator.are_expandable() is had
        if had or "expandable" not in users:
            assert read() == users
    finally:
        write("expandable_segments:False")
        write("")


@can_be_asked
@pytest.mark.gpu
def test_segments_grow_and_the_setting_comes_back():
    before = flags.snapshot()
    model = nn.Linear(256, 256).cuda()
    config = SpeedConfig(allocator="expandable_segments").alone()
    with apply_speedups(model, config)[1] as context:
        assert context.plan["allocator"].active
        kept = [torch.empty(64 << 20, device="cuda") for _ in range(2)]
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        assert settings["expandable_segments"]
        del kept
    assert flags.snapshot() == before
    assert not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
