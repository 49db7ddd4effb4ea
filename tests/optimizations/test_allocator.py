"""allocator: growing segments on CUDA, glibc's thresholds on a Linux CPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, apply_speedups, code, plan
from speedkit_jupyter.machines import flags, malloc, segments
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.target import Target

CUDA = Facts(device="cuda:0", devices=("cuda:0",), parameters=1)
ENTRY = named("allocator")
THRESHOLDS = SpeedConfig(allocator="thresholds").alone()
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
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


def test_on_a_cpu_the_reason_says_what_does_not_come_back(hardware):
    decision = decided(hardware("cpu"), allocator="thresholds")
    assert (decision.value, decision.active) == ("thresholds", True)
    assert "glibc adjusts its thresholds no more in this process" in decision.reason


@pytest.mark.parametrize(
    ("machine", "facts", "word", "why"),
    [
        ("cpu", Facts(), "expandable_segments", "about CUDA"),
        ("cpu", Facts(flags={malloc.NAME: "environment"}), "thresholds", "the environment has set"),
        ("apple_m2_mps", Facts(device="mps"), "thresholds", "not about mps"),
        ("apple_m2_mps", Facts(), "thresholds", "glibc's malloc is not that of Darwin"),
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


def test_on_cuda_the_word_for_a_cpu_becomes_that_for_cuda(hardware):
    for word in ("expandable_segments", "thresholds"):
        decision = decided(hardware("t4"), CUDA, allocator=word)
        assert (decision.value, decision.active) == ("expandable_segments", True)
        assert decision.declined == (word == "thresholds")


# --- glibc's ---


@on_linux
def test_thresholds_are_raised_and_put_back():
    before = flags.snapshot()
    with apply_speedups(nn.Linear(2, 2), THRESHOLDS)[1] as context:
        assert context.changes() == (("malloc.thresholds", "glibc", "raised"),)
    assert flags.snapshot() == before


FAULTS = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages (PR_SET_THP_DISABLE): else counts vary
from torch import nn
from speedkit_jupyter import SpeedConfig, apply_speedups
torch.set_num_threads(1)
x = torch.randn(4, 1 << 20)
def step(n=4):  # 16 MiB for each result, two of them at a time
    for _ in range(3):
        ((x + 1) * 2).sum()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n):
        ((x + 1) * 2).sum()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // n
untouched = step()
context = apply_speedups(nn.Linear(2, 2), SpeedConfig(allocator="thresholds").alone())[1]
raised = step()
context.restore()
print(untouched, raised, step())
"""


@on_linux
@pytest.mark.thorough
def test_a_step_asks_the_system_for_fewer_pages_and_afterwards_not_for_more_than_before():
    counts = [0, 0, 0]  # of some processes: in one of them memory may lie as it happens to
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
        )
        pages = map(int, done.stdout.split())
        counts = [count + more for count, more in zip(counts, pages, strict=True)]
    untouched, raised, after = counts
    assert raised < untouched
    assert after <= untouched


@on_linux
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overlapping_plans_go_back_in_any_order(order):
    contexts = [apply_speedups(nn.Linear(2, 2), THRESHOLDS)[1] for _ in range(2)]
    contexts[order[0]].restore()
    assert malloc.thresholds() == "raised"
    contexts[order[1]].restore()
    assert malloc.thresholds() == "glibc"


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"])
def test_what_the_environment_has_set_is_seen_and_left(monkeypatch, name):
    monkeypatch.setattr(malloc, "_now", [])
    monkeypatch.setenv(name, "glibc.malloc.mmap_threshold=65536")
    assert malloc.thresholds() == "environment"
    with apply_speedups(nn.Linear(2, 2), THRESHOLDS)[1] as context:
        assert context.plan["allocator"].declined


def test_another_malloc_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    with pytest.raises(SpeedKitError, match="thresholds can't be set here: malloc is not glibc's"):
        apply_speedups(nn.Linear(2, 2), THRESHOLDS)
    assert malloc.thresholds() == "glibc"


# --- torch's ---


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
    had, target = segments.are_expandable(), Target(nn.Linear(2, 2))
    decision = Decision("allocator", "expandable_segments", "as asked", active=True)
    try:
        with ENTRY.applied(decision, target):
            assert segments.are_expandable()
            for part in users.split(",expandable")[0].split("expandable_segments:True,"):
                assert part in read()
        assert segments.are_expandable() is had
        if had or "expandable" not in users:
            assert read() == users
    finally:
        write("expandable_segments:False")
        write("")


@pytest.mark.parametrize(
    ("machine", "facts", "line"),
    [
        ("cpu", Facts(), "malloc(-3, 32 << 20)"),
        ("t4", CUDA, 'torch._C._accelerator_setAllocatorSettings("expandable_segments:True")'),
    ],
)
def test_the_code_says_it_plainly(hardware, machine, facts, line):
    found = plan(THRESHOLDS, hardware(machine), facts)
    text = code(found)
    assert line in text
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
