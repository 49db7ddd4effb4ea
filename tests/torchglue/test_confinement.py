"""Measure while another thread trains, and measure steps that compute in a worker thread."""

import _thread
import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched

X = torch.rand(4, 8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def clipped(model, optimizer):
    model(X).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def by_grad(model, optimizer):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(X).pow(2).mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def own_scaler(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(X).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


KINDS = {
    "SGD": (clipped, lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)),
    "fused AdamW": (clipped, lambda p: torch.optim.AdamW(p, 1e-3, fused=True)),
    "autograd.grad": (by_grad, lambda p: torch.optim.Adam(p, 1e-3)),
    "GradScaler": (own_scaler, lambda p: torch.optim.RMSprop(p, 1e-3)),
}


@contextmanager
def training(step, make):
    """Train in another thread; check at the end that training alone gives the same parameters."""
    model = network()
    twin, optimizer = copy.deepcopy(model), make(model.parameters())
    stop, steps = threading.Event(), 0

    def train():
        nonlocal steps
        while not stop.is_set():
            step(model, optimizer)
            steps += 1

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(train)
        try:
            while not steps and not other.done():  # the thread may start late
                time.sleep(0.001)
            yield
        finally:
            stop.set()
    other.result()  # raises the thread's error
    alone = make(twin.parameters())
    for _ in range(steps):
        step(twin, alone)
    assert steps > 0
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


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
    # The accuracy check ignores the other thread's backward passes.
    assert {one.accuracy.verdict for one in found.records} <= {"exact", "rounding"}


def test_a_patch_is_seen_in_its_own_thread_only():
    class Owner:
        name = staticmethod(lambda: "original")

    with patched(Owner, "name", lambda original: lambda: f"not the {original()}"):
        assert Owner.name() == "not the original"
        assert in_a_thread(lambda: Owner.name()) == "original"
    assert Owner.name() == in_a_thread(lambda: Owner.name()) == "original"


def test_hooks_run_in_this_thread_and_in_autograds_for_the_optimizers_that_are_ours():
    mine, other = (torch.optim.SGD(network().parameters(), 0.1) for _ in range(2))
    seen: list[Any] = []

    def in_autograds(optimizer: Any) -> None:
        """Step in a thread that `threading` did not start, like autograd's threads."""
        done = threading.Event()
        _thread.start_new_thread(lambda: (optimizer.step(), done.set()), ())
        done.wait()

    with optimizer_hooks(lambda one, *_: seen.append(one), ours=[mine]):
        other.step()  # in this thread any optimizer is seen: a step may make one
        for optimizer in (mine, other):
            in_autograds(optimizer)
            in_a_thread(optimizer.step)
    mine.step()
    assert seen == [other, mine]


def measured(inside: bool) -> Any:
    """Benchmark a forward pass in a worker thread, under `ctx.autocast()` only if `inside`."""
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
        in_a_thread(lambda: model(X))

    records = benchmark(step, "baseline,bf16,threads:1", model=model, budget_s=0.2).records
    assert "computes in another thread" in records[1].failure
    assert records[2].accuracy.verdict == "not checked"
    assert "another thread" in records[2].accuracy.reason
