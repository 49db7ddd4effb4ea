"""A measurement beside another thread that trains, clips and steps: that one is undisturbed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark, tune, verify
from speedkit_jupyter.measure.confinement import optimizer_hooks, patched

X = torch.rand(8, 16)


def network() -> nn.Sequential:
    """The same at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def clipped(model: nn.Module, optimizer: Any) -> None:
    """A step with clipped gradients."""
    model(X).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def by_grad(model: nn.Module, optimizer: Any) -> None:
    """A step whose gradients come from `torch.autograd.grad`."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(X).pow(2).mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def own_scaler(model: nn.Module, optimizer: Any) -> None:
    """A step with a GradScaler of its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(model(X).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


KINDS: dict[str, tuple[Callable[..., None], Callable[[Any], Any]]] = {
    "SGD": (clipped, lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9)),
    "fused AdamW": (clipped, lambda p: torch.optim.AdamW(p, 1e-3, fused=True)),
    "autograd.grad": (by_grad, lambda p: torch.optim.Adam(p, 1e-3)),
    "GradScaler": (own_scaler, lambda p: torch.optim.RMSprop(p, 1e-3)),
}


@contextmanager
def training(step: Callable[..., None], make: Callable[[Any], Any]) -> Iterator[None]:
    """Another thread trains meanwhile; at the end it has computed what it computes alone."""
    model = network()
    twin = copy.deepcopy(model)
    optimizer, stop, steps, errors = make(model.parameters()), threading.Event(), [0], []

    def train() -> None:
        try:
            while not stop.is_set():
                step(model, optimizer)
                steps[0] += 1
        except BaseException as error:  # that it ends at all is the fault looked for
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert steps[0] > 0
    alone = make(twin.parameters())
    for _ in range(steps[0]):
        step(twin, alone)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    """What the other thread does."""
    return KINDS[request.param]


def step_of_ours() -> Callable[[], None]:
    """A training step to be measured."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        clipped(model, optimizer)

    return step


def test_a_benchmark_leaves_another_threads_training_alone(kind):
    with training(*kind):
        found = benchmark(step_of_ours(), "baseline,bf16,fp16,fused_optimizer", budget_s=0.1)
    assert [one.failure for one in found.records] == [None] * 4
    # Its backward passes are no part of the accuracy check.
    assert {one.accuracy.verdict for one in found.records} <= {"exact", "rounding"}


def test_verification_leaves_another_threads_training_alone():
    with training(*KINDS["SGD"]):
        found = verify(step_of_ours(), "bf16", steps=3)
    assert len(found.baseline) == len(found.planned) == 3


@pytest.mark.usefixtures("changing_flags")
def test_tuning_leaves_another_threads_training_alone():
    with training(*KINDS["GradScaler"]):
        tune(step_of_ours(), budget_s=0.5, fresh=True)


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


def test_hooks_run_for_this_thread_and_for_the_optimizers_that_are_ours():
    mine, other = (torch.optim.SGD(network().parameters(), 0.1) for _ in range(2))
    seen: list[Any] = []

    def elsewhere(optimizer: Any) -> None:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    with optimizer_hooks(lambda one, *_: seen.append(one), ours=[mine]):
        other.step()  # a step may make an optimizer of its own
        elsewhere(mine)
        elsewhere(other)
    mine.step()
    assert seen == [other, mine]
