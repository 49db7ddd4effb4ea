"""A second thread that trains while something is measured, and what it has to have computed."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

X = torch.rand(8, 16)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def clipped(model: nn.Module, optimizer: Any) -> None:
    model(X).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def by_grad(model: nn.Module, optimizer: Any) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(X).pow(2).mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def own_scaler(model: nn.Module, optimizer: Any) -> None:
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
def repeated(work: Callable[[], object], between_s: float = 0.0) -> Iterator[list[int]]:
    """Another thread does this again and again meanwhile; gives how often, known at the end."""
    stop, times, errors = threading.Event(), [0], []

    def run() -> None:
        try:
            while not stop.is_set():
                work()
                times[0] += 1
                time.sleep(between_s)
        except BaseException as error:  # that it ends at all is the fault looked for
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not times[0] and thread.is_alive():  # on a busy machine it begins late
            time.sleep(0.001)
        yield times
    finally:
        stop.set()
        thread.join()
    assert not errors, errors


@contextmanager
def training(step: Callable[..., None], make: Callable[[Any], Any]) -> Iterator[None]:
    """Another thread trains meanwhile; at the end it has computed what it computes alone."""
    model = network()
    twin, optimizer = copy.deepcopy(model), make(model.parameters())
    with repeated(lambda: step(model, optimizer)) as steps:
        yield
    assert steps[0] > 0
    alone = make(twin.parameters())
    for _ in range(steps[0]):
        step(twin, alone)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
