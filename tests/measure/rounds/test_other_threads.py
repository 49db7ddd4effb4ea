"""Steps that compute in a thread of their own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from speedkit_jupyter import benchmark

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


def test_a_precision_that_does_not_reach_the_steps_thread_fails_with_what_to_do(made_time):
    failures = [one.failure for one in measured(inside=False).records]
    assert failures[0] is failures[2] is None
    assert "computes in another thread" in failures[1]
    assert "ctx.autocast()" in failures[1]


def test_with_autocast_inside_its_thread_a_step_is_measured(made_time):
    assert not any(one.failure for one in measured(inside=True).records)


def in_a_thread_of_its_own(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def measured_in_threads(work: Any, variants: str, model: nn.Module) -> Any:
    step = partial(in_a_thread_of_its_own, work)
    return benchmark(step, variants, model=model, budget_s=0.2)


def test_where_the_model_is_called_in_a_thread_only_nothing_is_checked(made_time):
    model = nn.Linear(8, 8)
    records = measured_in_threads(lambda: model(X), "baseline,bf16,threads:1", model).records
    assert "computes in another thread" in records[1].failure
    assert records[2].accuracy.verdict == "not checked"
    assert "another thread" in records[2].accuracy.reason
