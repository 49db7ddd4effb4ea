"""Faults in a few rows of many, and whole numbers that are off by much: small beside all the rest.

The norm of a tensor hides them, and so does how many numbers differ. The honest steps beside them
have rows of tiny gradients, and whole numbers that rounding moves: classes, counts, hashes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _planted import BF16, Made, Planted, Spoiled, in_force
from torch import nn
from torch.nn import functional

CLASSES, BATCH = 10, 256
Fault = Callable[[torch.Tensor], torch.Tensor]
AXES = {"rows": 0, "columns": 1}


def few(factor: float, count: int, dimension: int = -1) -> Fault:
    """The first so many of a dimension times this."""

    def times(one: torch.Tensor) -> torch.Tensor:
        factors = torch.ones(one.shape[dimension])
        factors[3 : 3 + count] = factor
        shape = [1] * one.dim()
        shape[dimension] = -1
        return one * factors.view(shape).to(one.dtype)

    return times


class Wide(nn.Module):
    """(N, 64) to (N, 10), with layers of `width` units."""

    def __init__(self, width: int, spoil: Fault | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, 64)
        self.head, self.spoil = nn.Linear(64, CLASSES), spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.spoil is not None and in_force():
            hidden = Spoiled.apply(hidden, self.spoil)
        return self.head(self.second(hidden.relu()).relu())


class Convolved(nn.Module):
    """(N, 3, 12, 12) to (N, 10), with `width` channels."""

    def __init__(self, width: int, spoil: Fault | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3), nn.Conv2d(width, 16, 3)
        self.head, self.spoil = nn.Linear(16, CLASSES), spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.spoil is not None and in_force():
            hidden = Spoiled.apply(hidden, self.spoil)
        return self.head(self.second(hidden.relu()).relu().mean((2, 3)))


class Reading(nn.Module):
    """(N, 8) of 1000 words, some far rarer than others, to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 32), nn.Linear(32, CLASSES)
        self.mix, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mix(self.words(x)).relu()).mean(1))


def trained(model: nn.Module, x: torch.Tensor, kind: Any = None) -> Made:
    optimizer = (kind or partial(torch.optim.SGD, lr=0.01))(model.parameters())
    y = torch.randint(CLASSES, (len(x),))

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, model, optimizer, BF16


def in_backward(width: int, factor: float, count: int) -> Made:
    """Rows of a weight and elements of a bias at once, as an activation's gradient is wrong."""
    return trained(Wide(width, few(factor, count)), torch.randn(BATCH, 64))


def in_channels(width: int, factor: float, count: int) -> Made:
    return trained(Convolved(width, few(factor, count, 1)), torch.randn(16, 3, 12, 12))


def of_weight(width: int, factor: float, count: int, name: str, dimension: int) -> Made:
    """Of one parameter alone, along a dimension of it."""
    model = Wide(width)
    wrong = few(factor, count, dimension)
    model.get_parameter(name).register_hook(lambda one: wrong(one) if now[0] else one)
    now = [False]
    model.register_forward_hook(lambda *args: now.__setitem__(0, in_force()))
    return trained(model, torch.randn(BATCH, 64))


def of_output(width: int, factor: float, count: int, dimension: int) -> Made:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, width))
    x = torch.randn(BATCH, 64)
    wrong = few(factor, count, dimension)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return wrong(model(x)) if in_force() else model(x)

    return step, model, torch.optim.SGD(model.parameters(), 0.1), BF16


def of_update(width: int, factor: float, count: int, dimension: int, kind: Any) -> Made:
    """The optimizer moves some rows further; gradients are right."""
    now = [False]

    class Wrong(kind):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            before = model.first.weight.detach().clone()
            super().step(closure)
            if now[0]:
                with torch.no_grad():
                    way = model.first.weight - before
                    model.first.weight.copy_(before + few(factor, count, dimension)(way))

    model = Wide(width)
    model.register_forward_hook(lambda *args: now.__setitem__(0, in_force()))
    return trained(model, torch.randn(BATCH, 64), partial(Wrong, lr=0.01))


# Whole numbers.


class Scoring(nn.Module):
    """(N, 128) to probabilities (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
                                    nn.Linear(128, 1))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sigmoid().squeeze(1)


def bins(p: torch.Tensor) -> torch.Tensor:
    """A histogram around what an untrained net gives."""
    return torch.histc(p.float(), 12, 0.4, 0.6).long()


def positive(p: torch.Tensor) -> torch.Tensor:
    return (p.float() > 0.5).sum()


@dataclasses.dataclass
class Counted:
    right: int
    of: int


# What a step makes of its probabilities, right; the wrong ones are of those turned around.
RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "int": lambda p: int(positive(p)),
    "tensor": positive,
    "numpy integer": lambda p: positive(p).numpy()[()],
    "dict": lambda p: {"right": int(positive(p)), "of": len(p)},
    "dataclass": lambda p: Counted(int(positive(p)), len(p)),
    "tuple": lambda p: (int(positive(p)), len(p)),
    "pair of counts": lambda p: torch.stack([positive(p), positive(1 - p)]),
    "histogram": bins,
    "histogram as a list": lambda p: bins(p).tolist(),
    "length of a selection": lambda p: len(p[p.float() > 0.5]),
    "thousandths": lambda p: (p.float() * 1000).round().long(),
    "image": lambda p: (p.float() * 255).byte(),
    "mask": lambda p: p.float() > 0.5,
    "places of the best": lambda p: p.float().topk(8).indices,
    "order": lambda p: p.float().argsort(),
    "place of the best": lambda p: int(p.float().argmax()),
    "bucket": lambda p: hash(round(float(p.float().sum()), 3)) % 100_003,
    "checksum": lambda p: int((p.float() * 1e4).round().long().pow(3).sum() % 65_521),
    "bool": lambda p: bool(p.float().mean() > 0.5),
    "text": lambda p: f"{int(positive(p))} of {len(p)} are right",
}
FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned around": lambda p: 1 - p,
    "all the same": lambda p: torch.ones_like(p) * 0.57,
    "half of them": lambda p: torch.where(torch.arange(len(p)) % 2 == 0, p, 0.41),
}


def counting(result: str, fault: str, rows: int = 512) -> Made:
    """The net's own outputs are right; what is made of them is not."""
    model, x = Scoring(), torch.randn(rows, 128)

    def step() -> Any:
        with torch.no_grad():
            p = model(x)
        return RESULTS[result](FAULTS[fault](p) if fault and in_force() else p)

    return step, model, torch.optim.SGD(model.parameters(), 0.1), BF16


def counting_in_training(result: str, fault: str) -> Made:
    model, x = Scoring(), torch.randn(512, 128)
    y = (torch.rand(512) > 0.5).float()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> Any:
        p = model(x)
        (p.float() - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        p = p.detach()
        return RESULTS[result](FAULTS[fault](p) if fault and in_force() else p)

    return step, model, optimizer, BF16


def classes(kind: str) -> Made:
    """What an untrained net thinks most likely, of classes that are nearly as good."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 200))
    x, y = torch.randn(128, 64), torch.randint(200, (128,))

    def step() -> Any:
        with torch.no_grad():
            out = model(x).float()
        best = out.argmax(1)
        return {
            "argmax": best, "list": best.tolist(), "one": int(best[0]),
            "top 5": out.topk(5).indices, "right": int((best == y).sum()),
            "counts": best.bincount(minlength=200), "order": out.argsort(1),
        }[kind]  # fmt: skip

    return step, model, torch.optim.SGD(model.parameters(), 0.1), BF16


def dead(share: float) -> Made:
    """Units that hardly any sample reaches, beside others that all do."""
    model = Wide(256)
    with torch.no_grad():
        model.first.bias[: int(share * 256)] -= 1.5
    return trained(model, torch.randn(BATCH, 64))


def reading(kind: Any = None) -> Made:
    rare = (torch.rand(64, 8) ** 6 * 1000).long()
    return trained(Reading(), rare, kind)


def cancelling() -> Made:
    """Samples in pairs whose labels pull apart: little of their gradients is left."""
    model, x = Wide(256), torch.randn(BATCH // 2, 64)
    x = torch.cat([x, x + 0.01 * torch.randn_like(x)])
    return trained(model, x)


def _rows() -> Iterator[Planted]:
    for width in (64, 1024):
        for factor in (1.2, 1.5, 2.0):
            for count in (1, 4, 8):
                what = f"{count} of {width} times {factor:g}"
                yield Planted("rows", f"gradient {what}",
                              partial(in_backward, width, factor, count))  # fmt: skip
    for factor in (1.5, 2.0, 0.0):
        for count in (1, 4):
            what = f"{count} times {factor:g}"
            channels = partial(in_channels, 32, factor, count)
            yield Planted("rows", f"gradient of channels, {what}", channels)
            for kind, axis in AXES.items():
                wrong = partial(of_weight, 256, factor, count, "second.weight", axis)
                yield Planted("rows", f"gradient of {kind}, {what}", wrong)
                wrong = partial(of_output, 64, factor, count, axis)
                yield Planted("rows", f"output of {kind}, {what}", wrong)
                for optimizer in (torch.optim.SGD, torch.optim.AdamW):
                    name = f"update of {kind} by {optimizer.__name__}, {what}"
                    wrong = partial(of_update, 256, factor, count, axis, optimizer)
                    yield Planted("rows", name, wrong)


def _counts() -> Iterator[Planted]:
    for result in RESULTS:
        for fault in FAULTS if result in ("int", "histogram", "image") else ("turned around",):
            name = f"{result}, {fault}"
            yield Planted("counts", name, partial(counting, result, fault))
            if result in ("int", "dict", "histogram", "text", "bool"):
                yield Planted("counts", f"{name}, training",
                              partial(counting_in_training, result, fault))  # fmt: skip


ROWS = (*_rows(), *_counts())
HONEST: dict[str, Callable[[], Made]] = {
    **{f"counts: {result}": partial(counting, result, "") for result in RESULTS},
    **{f"counts: {result}, training": partial(counting_in_training, result, "")
       for result in ("int", "histogram", "text")},
    **{f"classes: {kind}": partial(classes, kind)
       for kind in ("argmax", "list", "one", "top 5", "right", "counts", "order")},
    "rows: wide": partial(in_backward, 1024, 1.0, 1),
    "rows: channels": partial(in_channels, 32, 1.0, 1),
    "rows: dead units": partial(dead, 0.5), "rows: few live units": partial(dead, 0.97),
    "rows: rare words": reading,
    "rows: rare words, AdamW": partial(reading, partial(torch.optim.AdamW, lr=1e-3)),
    "rows: cancelling": cancelling,
}  # fmt: skip
