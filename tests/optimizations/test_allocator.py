"""allocator: growing segments on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations import allocator, named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.target import Target

CUDA = Facts(device="cuda:0", devices=("cuda:0",), parameters=1)
ENTRY = named("allocator")
can_be_asked = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="this torch can't say what its allocator's setting is",
)


def decided(machine: Any, facts: Facts = Facts(), **wishes: Any) -> Decision:  # noqa: B008
    return plan(SpeedConfig(**wishes), machine, facts)["allocator"]


def test_auto_leaves_it_and_a_search_tries_nothing(hardware):
    for machine, facts in (("cpu", Facts()), ("t4", CUDA)):
        decision = decided(hardware(machine), facts)
        assert (decision.active, decision.worth_measuring) == (False, None)
        assert ENTRY.candidates(hardware(machine), facts) == ()


@pytest.mark.parametrize(
    ("machine", "facts", "word", "why"),
    [
        ("cpu", Facts(), "expandable_segments", "about CUDA"),
        ("rtx4050_laptop_windows", CUDA, "expandable_segments", "on Linux, not NVIDIA GeForce"),
        ("mi300x", CUDA, "expandable_segments", "not AMD Instinct MI300X on Linux"),
        ("a100", replace(CUDA, flags={"num_threads": 1}), "expandable_segments", "can't say"),
    ],
)
def test_where_it_means_nothing_it_is_declined(hardware, machine, facts, word, why):
    wishes = {} if facts.device_type == "cuda" else {"device": facts.device}
    decision = decided(hardware(machine), facts, allocator=word, **wishes)
    assert decision.declined
    assert not decision.active
    assert why in decision.reason


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


def test_the_code_says_it_plainly(hardware):
    config = SpeedConfig(allocator="expandable_segments").alone()
    text = code(plan(config, hardware("t4"), CUDA))
    assert 'torch._C._accelerator_setAllocatorSettings("expandable_segments:True")' in text
    compile(text, "<code>", "exec")


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
