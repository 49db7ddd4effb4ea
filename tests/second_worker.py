"""A second thread at work on what a measured step reaches and does not use, and what is left of it.

Each kind is how the step reaches it. The thread's work is counted and done once more alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from second_thread import X, network, repeated
from torch import nn

# So long between two steps of the other thread, at which any measurement's own work fits in.
BETWEEN_S = 0.002


def trained(model: nn.Module, optimizer: Any) -> None:
    """One step of training, whichever model."""
    model(X).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass
class Shared:
    """`step` is measured; `work` is what the other thread does with `theirs`, again and again.

    `left` shows it as plain values; `ours` is what the step changes, and what has to come back.
    """

    step: Callable[[], Any]
    work: Callable[[Any], Any]
    theirs: Any
    ours: Any
    names: str
    left: Callable[[Any], Any] = lambda theirs: theirs


@dataclass
class Pair:
    """As a trainer holds them."""

    a: nn.Module
    b: nn.Module
    of_a: Any
    of_b: Any
    seen: int = 0
    steps: int = 0
    log: list[int] = field(default_factory=list)


def _pair() -> Pair:
    a, b = network(), network()
    of_a = torch.optim.AdamW(a.parameters(), 1e-3)
    return Pair(a, b, of_a, torch.optim.AdamW(b.parameters(), 1e-3))


def _trains(theirs: Any) -> None:
    trained(*theirs)


def _weights(theirs: Any) -> list[torch.Tensor]:
    return [*theirs[0].parameters()]


def _training(pair: Pair, step: Callable[[], Any], names: str) -> Shared:
    return Shared(step, _trains, (pair.b, pair.of_b), (pair.a, pair.of_a), names, _weights)


def in_a_dict() -> Shared:
    """`models['b']`."""
    pair = _pair()
    models = {"a": pair.a, "b": pair.b}
    optimizers = {"a": pair.of_a, "b": pair.of_b}
    return _training(pair, lambda: trained(models["a"], optimizers["a"]), "models['b']")


def in_a_list() -> Shared:
    """`both[1]`."""
    pair = _pair()
    both = [(pair.a, pair.of_a), (pair.b, pair.of_b)]
    return _training(pair, lambda: trained(*both[0]), "both[1][0]")


def in_an_object() -> Shared:
    """`trainer.b`, and numbers of the same object that each of them counts."""
    trainer = _pair()

    def step() -> None:
        trained(trainer.a, trainer.of_a)
        trainer.steps += 1

    def work(theirs: Pair) -> None:
        trained(theirs.b, theirs.of_b)
        theirs.seen += 1

    def left(theirs: Pair) -> Any:
        return [*theirs.b.parameters(), theirs.seen, theirs.steps]

    return Shared(step, work, trainer, (trainer.a, trainer.of_a), "trainer.seen", left)


PAIR = _pair()


def as_global() -> Shared:
    """A name of a module that a called function reads."""
    global PAIR
    PAIR = _pair()
    return _training(PAIR, _step_of_a_global, "PAIR.b")


def _step_of_a_global() -> None:
    trained(PAIR.a, PAIR.of_a)


def in_a_module_dict() -> Shared:
    """Parts of one model."""
    pair = _pair()
    nets = nn.ModuleDict({"a": pair.a, "b": pair.b})
    optimizers = {"a": pair.of_a, "b": pair.of_b}
    return _training(pair, lambda: trained(nets["a"], optimizers["a"]), "optimizers['b']")


def with_momentum_and_buffers() -> Shared:
    """Batch statistics, gradients that stay, modes that change, a schedule."""
    pair = _pair()
    pair.b = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    pair.of_b = torch.optim.SGD(pair.b.parameters(), 1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(pair.of_b, 0.9999)
    everything = {"a": pair.a, "b": pair.b, "of": [pair.of_a, pair.of_b], "schedule": schedule}

    def work(theirs: Any) -> None:
        model, optimizer, its_schedule = theirs
        model.eval()(X)
        model.train()(X).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        its_schedule.step()

    def left(theirs: Any) -> Any:
        return [*theirs[0].state_dict().values(), theirs[2].last_epoch]

    def step() -> None:
        trained(everything["a"], everything["of"][0])

    theirs, ours = (pair.b, pair.of_b, schedule), (pair.a, pair.of_a)
    return Shared(step, work, theirs, ours, "everything['b']", left)


def an_average() -> Shared:
    """A copy of weights, which only the thread writes."""
    pair = _pair()
    kept = {"model": pair.a, "average": copy.deepcopy(pair.a).requires_grad_(False)}
    target = [torch.full_like(p, 2.0) for p in pair.a.parameters()]

    def work(average: Any) -> None:
        for one, other in zip(average.parameters(), target, strict=True):
            one.lerp_(other, 0.01)

    def step() -> None:
        trained(kept["model"], pair.of_a)

    def left(average: Any) -> Any:
        return [*average.parameters()]

    ours = (pair.a, pair.of_a)
    return Shared(step, work, kept["average"], ours, "kept['average']", left)


def an_array() -> Shared:
    """numpy's."""
    pair = _pair()
    kept = {"sums": np.zeros(8), "model": pair.a}

    def work(sums: Any) -> None:
        sums += 1.0

    def step() -> None:
        trained(kept["model"], pair.of_a)

    return Shared(step, work, kept["sums"], (pair.a, pair.of_a), "kept['sums']", list)


def a_list() -> Shared:
    """It grows."""
    pair = _pair()

    def step() -> None:
        trained(pair.a, pair.of_a)

    def work(log: list[int]) -> None:
        log.append(len(log))

    return Shared(step, work, pair.log, (pair.a, pair.of_a), "pair.log")


def keys_of_one_dict() -> Shared:
    """Each of them writes keys of its own."""
    pair = _pair()
    found: dict[str, Any] = {"ours": 0.0, "theirs": 0}

    def step() -> None:
        trained(pair.a, pair.of_a)
        found["ours"] += 1.0
        found["new"] = 1

    def work(theirs: dict[str, Any]) -> None:
        theirs["theirs"] += 1
        theirs.setdefault(f"number {theirs['theirs'] % 3}", 1)

    return Shared(step, work, found, (pair.a, pair.of_a), "found['theirs']", lambda theirs: theirs)


SHARED = {
    "a dict": in_a_dict,
    "a list": in_a_list,
    "an object": in_an_object,
    "a global": as_global,
    "a ModuleDict": in_a_module_dict,
    "buffers and a schedule": with_momentum_and_buffers,
    "an average": an_average,
    "an array": an_array,
    "a growing list": a_list,
    "keys of one dict": keys_of_one_dict,
}


def _plain(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return [(key, value) for key, value in values.items()]
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def _ours(model: nn.Module, optimizer: Any) -> list[Any]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return _plain([*model.state_dict().values(), *states, len(optimizer.state)])


@contextmanager
def working(shared: Shared) -> Iterator[None]:
    """The thread works meanwhile: in the end it has done what it does alone, and the step's own
    is what it was.
    """
    alone, ours = copy.deepcopy(shared.theirs), _ours(*shared.ours)
    with repeated(lambda: shared.work(shared.theirs), BETWEEN_S) as times:
        yield
    assert times[0] > 10
    for _ in range(times[0]):
        shared.work(alone)
    assert _same(_plain(shared.left(shared.theirs)), _plain(shared.left(alone)))
    assert _same(_ours(*shared.ours), ours)
