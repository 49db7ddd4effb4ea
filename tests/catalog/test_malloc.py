"""Test `malloc`, which keeps freed memory in the process while the plan is in force."""

import psutil
import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.facts.model import LARGE_BYTES
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.planning import plan
from speedkit_jupyter.torchglue import heap

ENTRY = named("malloc")
MUCH = Facts(fresh_bytes=200 << 20)
needs_glibc = pytest.mark.skipif(heap.library() is None, reason="for glibc's own malloc")


def faulted_bytes() -> int:
    before = heap.fresh_bytes()
    for _ in range(5):
        torch.empty(2 * LARGE_BYTES // 4).fill_(1)
    return heap.fresh_bytes() - before


@needs_glibc
def test_large_tensors_come_from_the_system_once_and_go_back_when_the_plan_is_restored():
    model = nn.Linear(2, 2)
    with heap.kept():
        pass
    heap.occupy_free_addresses()  # other tests leave free memory in the heap
    assert faulted_bytes() > 8 * LARGE_BYTES
    with apply_speedups(model, SpeedConfig(malloc=True).alone())[1] as context:
        assert context.plan["malloc"].active
        assert flags.snapshot()["malloc.keep"]
        # At first, small tensors may take the places of freed large ones, so the minimum counts.
        assert min(faulted_bytes() for _ in range(5)) < LARGE_BYTES
        held = psutil.Process().memory_info().rss
    assert not flags.snapshot()["malloc.keep"]
    assert psutil.Process().memory_info().rss < held - LARGE_BYTES


@needs_glibc
def test_what_was_kept_is_hidden_from_steps_of_plans_that_keep_nothing():
    with heap.kept():
        every = [torch.empty(LARGE_BYTES).fill_(1) for _ in range(4)]
        every.sort(key=torch.Tensor.data_ptr)
        del every[:2]  # leaves a hole below the other two
    heap.occupy_free_addresses()
    assert faulted_bytes() > 9 * LARGE_BYTES
    with heap.kept():
        assert min(faulted_bytes() for _ in range(5)) < LARGE_BYTES
    heap.give_back()
    heap.occupy_free_addresses()  # as the next measurement does
    assert faulted_bytes() > 9 * LARGE_BYTES
    del every
    heap.give_back()


def test_it_is_offered_where_a_step_gets_much_memory_anew():
    cpu = Hardware.from_json("cpu")
    decision = plan(SpeedConfig(), cpu, MUCH)["malloc"]
    assert (decision.active, decision.worth_measuring) == (False, True)
    assert "200 MiB" in decision.why
    assert ENTRY.candidates(cpu, MUCH) == (True,)
    assert ENTRY.candidates(cpu, Facts()) == ()


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_it_leaves_glibc_alone_that_the_environment_sets_up(monkeypatch, variable):
    monkeypatch.setenv(variable, "glibc.malloc.trim_threshold=1")
    heap.library.cache_clear()
    try:
        assert heap.library() is None
        decision = plan(SpeedConfig(malloc=True), Hardware.current(), Facts.read(nn.Linear(2, 2)))
        assert decision["malloc"].declined
        with heap.kept():
            assert not heap.is_kept()
    finally:
        heap.library.cache_clear()
