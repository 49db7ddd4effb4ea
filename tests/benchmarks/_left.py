"""Steps that do all right and leave something wrong behind: in parameters after the optimizer's
step, by another decay, in words, counts and modes. Each kind with the same step without a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _planted import BF16, CLASSES, FEATURES, Made, Planted, data, in_force
from _whole import cross, mlp, train
from torch import nn

FUSED = "fused_optimizer"
Wrong = Callable[[], bool]


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def scaled(model: nn.Module, bad: bool) -> None:
    if bad:
        model[2].weight.mul_(1.5)


def nudged(model: nn.Module, bad: bool) -> None:
    if bad:
        model[2].bias[0] += 0.01


def clipped(model: nn.Module, bad: bool) -> None:
    for one in model.parameters():
        one.clamp_(-0.1, 0.12 if bad else 0.1)


def decayed(model: nn.Module, bad: bool) -> None:
    for one in model.parameters():
        one.mul_(0.9 if bad else 0.99)


def normalized(model: nn.Module, bad: bool) -> None:
    model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True) * (1.02 if bad else 1))


PARAMETERS = {"scaled": scaled, "one element": nudged, "clipped": clipped, "decayed": decayed,
              "normalized": normalized}  # fmt: skip


def parameters(wrong: Wrong, change: Callable[[nn.Module, bool], None]) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        train(optimizer, cross(model, x, y))
        with torch.no_grad():
            change(model, is_on(wrong, optimizer))

    return step, model, optimizer


def target(wrong: Wrong) -> Any:
    """A second net follows the first one slowly, or not at all."""
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        train(optimizer, cross(model, x, y))
        if is_on(wrong, optimizer):
            return
        with torch.no_grad():
            for one, other in zip(slow.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)

    return step, [model, slow], optimizer


def decay(wrong: Wrong) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)

    def step() -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0 if is_on(wrong, optimizer) else 0.01
        train(optimizer, cross(model, x, y))

    return step, model, optimizer


RESULTS: dict[str, Callable[[bool], Any]] = {
    "text": lambda bad: f"epoch done, {3 if bad else 4} batches",
    "set": lambda bad: {"a", "x" if bad else "y"},
    "count": lambda bad: {"seen": 1001 if bad else 1000},
    "slots": lambda bad: Slots(1 if bad else 2),
    "function": lambda bad: lambda: bad,
}


def results(wrong: Wrong, result: Callable[[bool], Any]) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> Any:
        train(optimizer, cross(model, x, y))
        return result(is_on(wrong, optimizer))

    return step, model, optimizer


def mode(wrong: Wrong) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        train(optimizer, cross(model, x, y))
        model[1].train(not is_on(wrong, optimizer))

    return step, model, optimizer


def is_on(wrong: Wrong, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the faulty step runs under a plan: that of the optimizer can be seen in itself."""
    return wrong is not never and (in_force() or bool(optimizer.param_groups[0]["fused"]))


def never() -> bool:
    return False


PROGRAMS: dict[str, Callable[[Wrong], Any]] = {
    **{f"parameters {name}": partial(parameters, change=one) for name, one in PARAMETERS.items()},
    "target network": target,
    "weight decay": decay,
    **{f"another {name}": partial(results, result=one) for name, one in RESULTS.items()},
    "mode": mode,
}


def made(program: Callable[[Wrong], Any], faulty: bool, plan: str) -> Made:
    step, model, optimizer = program(in_force if faulty else never)
    return step, model, optimizer, plan


def _left() -> Iterator[Planted]:
    for plan in (BF16, FUSED):
        for name, program in PROGRAMS.items():
            if name != "weight decay":  # in single elements only
                yield Planted(f"left behind, {plan}", name, partial(made, program, True, plan),
                              partial(made, program, False, plan))  # fmt: skip


LEFT = tuple(_left())
