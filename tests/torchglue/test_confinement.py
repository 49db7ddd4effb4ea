"""A measurement during another thread's training, and of a step that computes in a thread."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from second_thread import KINDS, clipped, network, training
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched

pytestmark = pytest.mark.usefixtures("made_time")


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_benchmark_leaves_another_threads_training_alone(kind):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    names = "baseline,bf16,fp16,fused_optimizer"
    with training(*KINDS[kind]):
        found = benchmark(lambda: clipped(model, optimizer), names, budget_s=0.1)
    assert [one.failure for one in found.records] == [None] * 4
    # Its backward passes are no part of the accuracy check.
    assert {one.accuracy.verdict for one in found.records} <= {"exact", "rounding"}


def test_a_patch_is_seen_in_its_own_thread_only():
    class Owner:
        name = staticmethod(lambda: "original")

    def asked_elsewhere() -> str:
        answers: list[str] = []
        thread = threading.Thread(target=lambda: answers.append(Owner.name()))
        thread.start()
        thread.join()
        return answers[0]

    with patched(Owner, "name", lambda original: lambda: f"not the {original()}"):
        assert Owner.name() == "not the original"
        assert asked_elsewhere() == "original"
    assert Owner.name() == asked_elsewhere() == "original"


def test_hooks_run_in_this_thread_and_in_autograds_for_the_optimizers_that_are_ours():
    mine, other = (torch.optim.SGD(network().parameters(), 0.1) for _ in range(2))
    seen: list[Any] = []

    def in_autograds(optimizer: Any) -> None:
        """In one that no Python code began, as far as `threading` knows."""
        done = threading.Event()
        _thread.start_new_thread(lambda: (optimizer.step(), done.set()), ())
        done.wait()

    def in_pythons(optimizer: Any) -> None:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    with optimizer_hooks(lambda one, *_: seen.append(one), ours=[mine]):
        other.step()  # a step may make an optimizer of its own
        for elsewhere in (in_autograds, in_pythons):
            elsewhere(mine)
            elsewhere(other)
    mine.step()
    assert seen == [other, mine]


X = torch.randn(4, 8)


def measured(inside: bool) -> Any:
    """A benchmark of a forward pass in a worker thread, with `ctx.autocast()` inside it or not."""
    model = nn.Linear(8, 8)
    with ThreadPoolExecutor(1) as pool:

        def work(ctx: Any) -> torch.Tensor:
            with ctx.autocast() if inside else nullcontext():
                return model(X)

        def step(ctx: Any) -> torch.Tensor:
            return pool.submit(work, ctx).result()

        return benchmark(step, "baseline,bf16,threads:1", model=model, budget_s=0.2)


def test_a_precision_has_to_reach_the_thread_that_computes(made_time):
    failures = [one.failure for one in measured(inside=False).records]
    assert failures[0] is failures[2] is None
    assert "computes in another thread" in failures[1]
    assert "ctx.autocast()" in failures[1]
    assert not any(one.failure for one in measured(inside=True).records)


def test_where_the_model_is_called_in_a_thread_only_nothing_is_checked(made_time, two_threads):
    model = nn.Linear(8, 8)

    def step() -> None:
        thread = threading.Thread(target=lambda: model(X))
        thread.start()
        thread.join()

    records = benchmark(step, "baseline,bf16,threads:1", model=model, budget_s=0.2).records
    assert "computes in another thread" in records[1].failure
    assert records[2].accuracy.verdict == "not checked"
    assert "another thread" in records[2].accuracy.reason
