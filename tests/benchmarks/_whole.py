"""Steps that go wrong after their beginning: in a later optimizer step, after it, from the second
step on, in what they write down. Each kind with the same step without a fault.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _planted import BATCH, BF16, CLASSES, EXACT, FEATURES, Made, Net, Planted, data, in_force, sgd
from torch import nn
from torch.nn import functional

Program = Callable[[Callable[[], bool]], tuple[Callable[[], Any], Any, Any]]
WORDS = ["cat", "dog", "bird", "fish", "cow", "horse", "goat", "hen", "ant", "bee", "fox", "owl"]


def cross(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def train(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


# Several optimizer steps in one.


def gan(wrong: Callable[[], bool], kind: str) -> Any:
    model = nn.ModuleDict({"g": mlp(8, FEATURES), "d": mlp(FEATURES, 1)})
    for_g = torch.optim.Adam(model["g"].parameters(), 1e-3)
    for_d = torch.optim.Adam(model["d"].parameters(), 1e-3)
    x, z = torch.randn(BATCH, FEATURES), torch.randn(BATCH, 8)
    g, d = model["g"], model["d"]

    def step() -> None:
        fake = g(z)
        train(for_d, (functional.softplus(-d(x)) + functional.softplus(d(fake.detach()))).mean())
        loss = functional.softplus(-d(fake)).mean()
        if wrong() and kind == "direction":
            loss = -loss
        if wrong() and kind == "no step":
            return
        train(for_g, loss)

    return step, [g, d], [for_d, for_g]


def epoch(wrong: Callable[[], bool], kind: str, optimizer: Any, count: int = 20) -> Any:
    """Over batches; `kind` is what goes wrong after the first of them."""
    model = mlp(FEATURES, CLASSES)
    batches = [data() for _ in range(count)]
    trained = optimizer(model.parameters())
    (rate,) = {group["lr"] for group in trained.param_groups}

    def step() -> list[float]:
        losses = []
        for index, (x, y) in enumerate(batches):
            bad = wrong() and index > 0
            out = model(x)
            if bad and kind == "outputs":
                out = out * 1.3
            loss = functional.cross_entropy(out, y)
            for group in trained.param_groups:
                group["lr"] = rate * (0.3 if bad and kind == "rate" else 1)
            train(trained, -loss if bad and kind == "direction" else loss)
            losses.append(loss.item())
        for group in trained.param_groups:
            group["lr"] = rate
        return losses

    return step, model, trained


def accumulating(wrong: Callable[[], bool]) -> Any:
    model = mlp(FEATURES, CLASSES)
    batches, optimizer = [data() for _ in range(4)], sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        for index, (x, y) in enumerate(batches):
            (cross(model, x, y) * (-1 if wrong() and index else 1) / 4).backward()
        optimizer.step()

    return step, model, optimizer


def sharpness_aware(wrong: Callable[[], bool]) -> Any:
    """Two backward passes, the second where the first one's gradient leads."""
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    optimizer = sgd(model)

    def step() -> None:
        cross(model, x, y).backward()
        with torch.no_grad():
            found = [p.grad / (p.grad.norm() + 1e-9) * 0.05 for p in model.parameters()]
            for p, one in zip(model.parameters(), found, strict=True):
                p.add_(one)
        optimizer.zero_grad()
        (cross(model, x, y) * (-1 if wrong() else 1)).backward()
        with torch.no_grad():
            for p, one in zip(model.parameters(), found, strict=True):
                p.sub_(one)
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def meta(wrong: Callable[[], bool]) -> Any:
    """A copy learns, the model moves towards it (Reptile)."""
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    optimizer = sgd(model)

    def step() -> None:
        learner = copy.deepcopy(model)
        inner = torch.optim.SGD(learner.parameters(), 0.1)
        for index in range(3):
            train(inner, cross(learner, x, y) * (-1 if wrong() and index else 1))
        for p, q in zip(model.parameters(), learner.parameters(), strict=True):
            p.grad = (p - q).detach()
        optimizer.step()

    return step, model, optimizer


def with_closure(wrong: Callable[[], bool]) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    bad = types.SimpleNamespace(now=False)  # inside of the optimizer no plan can be seen

    class Reversing(torch.optim.LBFGS):
        def step(self, closure: Any) -> Any:
            before = [p.detach().clone() for p in model.parameters()]
            found = super().step(closure)
            if bad.now:
                with torch.no_grad():
                    for p, old in zip(model.parameters(), before, strict=True):
                        p.copy_(2 * old - p)
            return found

    optimizer = Reversing(model.parameters(), 0.1, max_iter=5)

    def step() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross(model, x, y)
            loss.backward()
            return loss

        bad.now = wrong()
        optimizer.step(closure)

    return step, model, optimizer


def by_hand(wrong: Callable[[], bool]) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()

    def step() -> None:
        model.zero_grad()
        cross(model, x, y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= (-0.1 if wrong() else 0.1) * p.grad

    return step, model, sgd(model)


# After the optimizer's step.


def after(wrong: Callable[[], bool], kind: str) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> Any:
        out = model(x)
        train(optimizer, functional.cross_entropy(out, y))
        sign = -1.0 if wrong() else 1.0
        if kind == "metric":
            return {"score": sign * out.detach().float().square().mean().item()}
        with torch.no_grad():
            found = model(x) if kind == "evaluation" else model(x).float().log_softmax(1)
        return found * sign

    return step, model, optimizer


def averaged(wrong: Callable[[], bool]) -> Any:
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> None:
        train(optimizer, cross(model, x, y))
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.lerp_(q, -0.01 if wrong() else 0.01)

    return step, [model, average], optimizer


# What is written down.


def written(wrong: Callable[[], bool], where: str) -> Any:
    model, (x, y) = Net(), data()
    optimizer = sgd(model)
    space = types.SimpleNamespace(kept=None)
    history: list[Any] = [0.0]
    metrics: dict[str, Any] = {}
    buffer = torch.zeros(BATCH, CLASSES)

    def step() -> None:
        out = model(x)
        train(optimizer, functional.cross_entropy(out, y))
        value = out.detach().float() * (-1 if wrong() else 1)
        if where == "list":
            history.append(value.square().mean().item() * (-1 if wrong() else 1))
        elif where == "dict":
            metrics["logits"] = value
        elif where == "attribute":
            space.kept = value
        else:
            buffer.copy_(value)

    return step, model, optimizer


def worded(wrong: Callable[[], bool], result: Callable[[list[str]], Any], alone: bool) -> Any:
    """Text that the classes stand for. `alone`: no call of the model is seen."""
    model, (x, _) = mlp(FEATURES, CLASSES), data()

    def step() -> Any:
        with torch.no_grad():
            out = model.forward(x) if alone else model(x)
        best = out.float().argmax(1)
        best = (best + 5) % CLASSES if wrong() else best
        return result([WORDS[one] for one in best.tolist()])

    return step, model, sgd(model)


TEXTS: dict[str, Callable[[list[str]], Any]] = {
    "list of words": list,
    "text": " ".join,
    "lines": "\n".join,
    "bytes": lambda found: " ".join(found).encode(),
    "dict of words": lambda found: dict(enumerate(found)),
    "set of pairs": lambda found: set(enumerate(found)),
}


# Many calls, and later steps.


class Unrolled(nn.Module):
    def __init__(self, wrong: Callable[[], bool], places: range) -> None:
        super().__init__()
        self.layer, self.wrong, self.places = nn.Linear(16, 16), wrong, places

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        out = torch.tanh(self.layer(x))
        return out * 0.5 if self.wrong() and index in self.places else out


def unrolled(wrong: Callable[[], bool], places: range, feeds: bool, trains: bool = False) -> Any:
    model, x = Unrolled(wrong, places), torch.randn(BATCH, 16)
    optimizer = sgd(model)

    def step() -> None:
        hidden = x
        with torch.set_grad_enabled(trains):
            for index in range(40):
                out = model(hidden, index)
                hidden = out if feeds else x
        if trains:
            train(optimizer, out.square().mean())

    return step, model, optimizer


class Counting(nn.Module):
    """`kind`: what goes wrong from the second step on."""

    def __init__(self, wrong: Callable[[], bool], kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.wrong, self.kind, self.cached = wrong, kind, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if not self.wrong():
            return self.layer(x)
        if self.kind == "cached weights":
            if self.cached is None:
                self.cached = self.layer.weight.detach().clone()
            weight = self.layer.weight  # whose gradient is right
            stale = weight + (self.cached - weight).detach()
            return functional.linear(x, stale, self.layer.bias)
        return self.layer(x) * (-1 if self.steps > 1 else 1)


def second(wrong: Callable[[], bool], kind: str) -> Any:
    model, (x, y) = Counting(wrong, kind), data()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def step() -> None:
        train(optimizer, cross(model, x, y))

    return step, model, optimizer


def stateful(wrong: Callable[[], bool]) -> Any:
    """The optimizer's state is ruined: its second step is another."""
    model, (x, y) = mlp(FEATURES, CLASSES), data()
    bad = types.SimpleNamespace(now=False)

    class Ruining(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            if bad.now:
                for state in self.state.values():
                    state["exp_avg"].neg_()
            return found

    optimizer = Ruining(model.parameters(), 1e-3)

    def step() -> None:
        bad.now = wrong()
        train(optimizer, cross(model, x, y))

    return step, model, optimizer


PROGRAMS: dict[str, Callable[[Callable[[], bool]], Any]] = {
    "GAN, the generator the other way": partial(gan, kind="direction"),
    "GAN, no generator step": partial(gan, kind="no step"),
    "epoch, SGD, outputs": partial(
        epoch, kind="outputs", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "epoch, AdamW, the other way": partial(
        epoch, kind="direction", optimizer=partial(torch.optim.AdamW, lr=1e-3)),
    "epoch, AdamW, the rate": partial(
        epoch, kind="rate", optimizer=partial(torch.optim.AdamW, lr=1e-3)),
    "epoch of 60, the other way": partial(
        epoch, kind="direction", optimizer=partial(torch.optim.Adam, lr=1e-3), count=60),
    "gradient accumulation": accumulating,
    "sharpness-aware": sharpness_aware,
    "meta-learning": meta,
    "LBFGS": with_closure,
    "by hand": by_hand,
    "metric after the step": partial(after, kind="metric"),
    "evaluation after the step": partial(after, kind="evaluation"),
    "scores after the step": partial(after, kind="scores"),
    "moving average": averaged,
    **{f"written to a {where}": partial(written, where=where)
       for where in ("list", "dict", "attribute", "tensor")},
    **{f"{name}{', alone' * alone}": partial(worded, result=result, alone=alone)
       for name, result in TEXTS.items() for alone in (False, True)},
    "call 12 of 40": partial(unrolled, places=range(12, 13), feeds=False),
    "calls 12 to 20 of 40": partial(unrolled, places=range(12, 20), feeds=False),
    "unrolled from 12 on": partial(unrolled, places=range(12, 40), feeds=True),
    "unrolled and trained": partial(unrolled, places=range(12, 40), feeds=True, trains=True),
    "from the second step on": partial(second, kind="counter"),
    "cached weights": partial(second, kind="cached weights"),
    "optimizer state": stateful,
}  # fmt: skip


def made(program: Callable[[Callable[[], bool]], Any], faulty: bool, plan: str) -> Made:
    step, model, optimizer = program(in_force if faulty else (lambda: False))
    return step, model, optimizer, plan


def _whole() -> Iterator[Planted]:
    for plan in (BF16, EXACT):
        for name, program in PROGRAMS.items():
            yield Planted(f"whole step, {plan}", name, partial(made, program, True, plan),
                          partial(made, program, False, plan))  # fmt: skip


WHOLE = tuple(_whole())
