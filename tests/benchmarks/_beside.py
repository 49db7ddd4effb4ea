"""Faults that are small beside something larger: what pooling would hide.

Each net here gives more than one thing (outputs, gradients, buffers, parameters that move), and
one of them, or a part of one, is wrong while a plan is in force.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _planted import BF16, EXACT, Made, Planted, in_force
from torch import nn
from torch.nn import functional

Tensors = dict[str, torch.Tensor]
WORDS, WIDTH, BATCH, TOKENS, SIDE = 200, 24, 12, 10, 8
DECAY = 0.9


class Several(nn.Module):
    """Tokens (N, T) and images (N, 3, H, W) to a dict of results of very different sizes.

    `spoils` are what changes under the plan: `outputs`, `gradients` (by the parameter's name) and
    `buffers`, each a function in place of which nothing is done.
    """

    def __init__(self, **spoils: dict[str, Callable[[Any], Any]]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv, self.batch_norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.head, self.small = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, 12)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.register_buffer("counts", torch.zeros(16, dtype=torch.int64))
        self.register_buffer("usage", torch.zeros(WORDS, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WORDS, dtype=torch.bool))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("small_average", torch.full((WIDTH,), 1e-3))
        self.register_buffer("lowest", torch.tensor(0.0))
        self.register_buffer("steps", torch.tensor(7.0))
        self.register_buffer("pointer", torch.tensor([5]))
        self.register_buffer("queue", 100 * torch.randn(64, WIDTH))
        self.register_buffer("table", torch.randn(TOKENS, WIDTH), persistent=False)
        self.spoils = spoils
        for name, parameter in self.named_parameters():
            if spoil := spoils.get("gradients", {}).get(name):
                parameter.register_hook(partial(_if_in_force, spoil, self))
        self.now = False

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> Tensors:
        self.now = in_force()
        pixels = self.batch_norm(self.conv(x))
        hidden = self.norm(self.embedding(tokens) + 0.1 * self.table) + self.mix(
            pixels.mean((2, 3)))[:, None]  # fmt: skip
        logits, small = self.head(hidden), 1e-3 * self.small(hidden.mean(1))
        scales = torch.logspace(3, -3, 12)
        found = {
            "logits": 100 * logits / self.temperature,
            "small": small,
            "pixels": pixels,
            "scales": small * scales,
            "probabilities": (8 * logits).softmax(-1),
            "penalty": 1e-4 * small.square().sum() + 1e-3,
        }
        if self.training:
            self._remember(tokens, hidden.detach())
        spoils = self.spoils.get("outputs", {})
        if self.now:
            found = {name: spoils.get(name, _same)(one) for name, one in found.items()}
        return found

    @torch.no_grad()
    def _remember(self, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """Buffers as nets have them: counts, moving averages, a queue and its pointer."""
        mean = hidden.mean((0, 1)).to(self.average.dtype)
        self.counts += torch.bincount(tokens.flatten() % 16, minlength=16)
        self.usage += torch.bincount(tokens.flatten(), minlength=WORDS)
        self.seen |= self.usage > 0
        self.average.mul_(DECAY).add_(mean, alpha=1 - DECAY)
        self.small_average.mul_(DECAY).add_(1e-3 * mean, alpha=1 - DECAY)
        self.lowest.copy_(torch.minimum(self.lowest, hidden.min().to(self.lowest.dtype)))
        self.steps += 1
        start = int(self.pointer)
        self.queue[start : start + BATCH] = 100 * hidden.mean(1).to(self.queue.dtype)
        self.pointer.add_(BATCH).remainder_(len(self.queue) - BATCH)
        if in_force():
            for name, spoil in self.spoils.get("buffers", {}).items():
                spoil(self.get_buffer(name).data)  # backward needs it, and may not notice


def _same(value: Any) -> Any:
    return value


def _if_in_force(spoil: Callable[[Any], Any], model: Several, gradient: torch.Tensor) -> Any:
    return spoil(gradient) if model.now else gradient


def at(*index: Any, factor: float = 0.0, plus: float = 0.0) -> Callable[[torch.Tensor], Any]:
    """What lies at this index times a factor."""

    def spoil(one: torch.Tensor) -> torch.Tensor:
        wrong = one.clone()
        wrong[index] = wrong[index] * factor + plus
        return wrong

    return spoil


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda one: one * factor


LAST = -1
OUTPUTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a small result doubled": ("small", times(2)),
    "a small result zero": ("small", times(0)),
    "a small result 5 % too large": ("small", times(1.05)),
    "a penalty 10 % too large": ("penalty", times(1.1)),
    "last sample zero": ("logits", at(LAST)),
    "last sample of a small result": ("small", at(LAST)),
    "last token zero": ("logits", at(slice(None), LAST)),
    "last token of one sample": ("logits", at(3, LAST)),
    "one channel zero": ("pixels", at(slice(None), 5)),
    "one channel 10 % too large": ("pixels", at(slice(None), 5, factor=1.1)),
    "one edge of images": ("pixels", at(..., LAST)),
    "upper edge of images": ("pixels", at(slice(None), slice(None), 0)),
    "edge off by 20 %": ("pixels", at(..., LAST, factor=1.2)),
    "one corner": ("pixels", at(..., LAST, LAST, factor=0.0)),
    "one pixel": ("pixels", at(4, 7, 3, 3, factor=0.0, plus=2.0)),
    "edge shifted by one": ("pixels", lambda one: torch.cat([one[..., :-1], one[..., -2:-1]], -1)),
    "images shifted by one": ("pixels", lambda one: one.roll(1, -1)),
    "smallest column doubled": ("scales", at(..., LAST, factor=2.0)),
    "smallest column zero": ("scales", at(..., LAST)),
    "middle column another sign": ("scales", at(..., 6, factor=-1.0)),
    "small columns all 1.5 times": ("scales", at(..., slice(4, None), factor=1.5)),
    "few signs": ("logits", lambda one: torch.where(
        torch.arange(one.numel()).view(one.shape) % 401 == 0, -one, one)),
    "few zeros, as nan_to_num": ("logits", lambda one: torch.where(
        torch.arange(one.numel()).view(one.shape) % 997 == 0, torch.zeros_like(one), one)),
    "largest probability cut": ("probabilities", lambda one: one.clamp(max=0.5)),
    "samples exchanged": ("small", lambda one: one[[1, 0, *range(2, len(one))]]),
    "last two tokens exchanged": ("logits", lambda one: one[
        :, [*range(TOKENS - 2), TOKENS - 1, TOKENS - 2]]),
}  # fmt: skip

GRADIENTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "scale of a norm halved": ("norm.weight", times(0.5)),
    "shift of a norm another sign": ("norm.bias", times(-1)),
    "a bias zero": ("mix.bias", times(0)),
    "a bias doubled": ("head.bias", times(2)),
    "a small bias zero": ("small.bias", times(0)),
    "a small bias 1.5 times": ("small.bias", times(1.5)),
    "a small weight doubled": ("small.weight", times(2)),
    "a single number 1.5 times": ("temperature", times(1.5)),
    "a single number another sign": ("temperature", times(-1)),
    "one row of an embedding": ("embedding.weight", lambda one: one * (
        one.abs().sum(1, keepdim=True) < one.abs().sum(1).max())),
    "one channel of a convolution": ("conv.weight", at(5)),
    "one tap of a kernel": ("conv.weight", at(..., 0, 0)),
    "few signs": ("norm.weight", at(slice(None, None, 6), factor=-1.0)),
    "one element another sign": ("norm.bias", lambda one: torch.where(
        one.abs() == one.abs().max(), -one, one)),
    "rows in another order": ("mix.weight", lambda one: one.roll(1, 0)),
    "scale of BatchNorm doubled": ("batch_norm.weight", times(2)),
}  # fmt: skip

BUFFERS: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "a histogram, one bin": ("counts", lambda one: one[3].add_(1)),
    "a histogram, zero": ("counts", lambda one: one.zero_()),
    "a histogram, twice": ("counts", lambda one: one.mul_(2)),
    "a histogram, in another order": ("counts", lambda one: one.copy_(one.flip(0))),
    "usage of a codebook": ("usage", lambda one: one.copy_(one.roll(1))),
    "usage, one code": ("usage", lambda one: one[7].add_(40)),
    "a mask inverted": ("seen", lambda one: one.logical_not_()),
    "a mask, one more": ("seen", lambda one: one[one.long().argmin()].fill_(True)),
    "a pointer": ("pointer", lambda one: one.add_(1)),
    "a moving average not moved": ("average", lambda one: one.zero_()),
    "a moving average of another decay": ("average", lambda one: one.mul_(3)),
    "a small moving average zero": ("small_average", lambda one: one.zero_()),
    "a small moving average doubled": ("small_average", lambda one: one.mul_(2)),
    "a moving average, one element": ("average", lambda one: one[2].add_(1)),
    "running mean": ("batch_norm.running_mean", lambda one: one.mul_(2)),
    "running variance": ("batch_norm.running_var", lambda one: one.add_(0.3)),
    "running variance not moved": ("batch_norm.running_var", lambda one: one.fill_(1)),
    "running variance, one channel": ("batch_norm.running_var", lambda one: one[4].mul_(3)),
    "batches tracked": ("batch_norm.num_batches_tracked", lambda one: one.add_(1)),
    "an observer's lowest": ("lowest", lambda one: one.zero_()),
    "a count in float": ("steps", lambda one: one.add_(1)),
    "a queue, what is new": ("queue", lambda one: one[5:17].zero_()),
    "a queue, one row": ("queue", lambda one: one[8].mul_(-1)),
    "a table that never changes": ("table", lambda one: one[-1].zero_()),
    "not a number": ("small_average", lambda one: one[0].fill_(float("nan"))),
}  # fmt: skip


def made(plan: str, kind: str, name: str, spoil: Callable[[Any], Any], trains: bool = True) -> Made:
    """A training step, or with `trains=False` inference; with one fault."""
    model = Several(**{kind: {name: spoil}})
    tokens, x = torch.randint(WORDS - 5, (BATCH, TOKENS)), torch.randn(BATCH, 3, SIDE, SIDE)
    labels, few = torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(12, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model.train(trains)

    def step() -> Any:
        if not trains:
            with torch.no_grad():
                return model(tokens, x)
        found = model(tokens, x)
        loss = functional.cross_entropy(found["logits"].flatten(0, 1), labels.flatten())
        (loss + functional.cross_entropy(found["small"], few) + found["penalty"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return None

    return step, model, optimizer, plan


# The optimizer's step, for one parameter among many.


def stays(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda parameters, before: parameters[name].copy_(before[name])


def goes(name: str, factor: float) -> Callable[[dict[str, Any], Tensors], None]:
    def spoil(parameters: dict[str, Any], before: Tensors) -> None:
        parameters[name].copy_(before[name] + factor * (parameters[name] - before[name]))

    return spoil


def shrinks(name: str, factor: float) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda parameters, before: parameters[name].mul_(factor)


def exchanged(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def spoil(parameters: dict[str, Any], before: Tensors) -> None:
        way = parameters[name] - before[name]
        parameters[name].copy_(before[name] + way.roll(1, 0))

    return spoil


def some_elements(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def spoil(parameters: dict[str, Any], before: Tensors) -> None:
        parameters[name][::6] = before[name][::6]

    return spoil


UPDATES: dict[str, Callable[[dict[str, Any], Tensors], None]] = {
    "a single number stays": stays("temperature"),
    "a single number twice as far": goes("temperature", 2),
    "a small bias stays": stays("small.bias"),
    "a bias stays": stays("mix.bias"),
    "a scale the other way": goes("norm.weight", -1),
    "a small weight twice as far": goes("small.weight", 2),
    "rows exchanged": exchanged("mix.weight"),
    "weight decay of a layer": shrinks("head.weight", 0.9),
    "weight decay of a small layer": shrinks("small.weight", 0.9),
    "every sixth row stays": some_elements("head.weight"),
    "every sixth element of a bias stays": some_elements("norm.bias"),
}


def moved(name: str, plan: str, kind: type[torch.optim.Optimizer]) -> Made:
    step, model, _, _ = made(plan, "none", "", _same)
    wrong = types.SimpleNamespace(model=model)

    class Misstepping(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> None:
            named = dict(wrong.model.named_parameters())
            before = {name: one.detach().clone() for name, one in named.items()}
            super().step(closure)
            if wrong.model.now:
                with torch.no_grad():
                    UPDATES[name](named, before)

    optimizer = Misstepping(model.parameters(), 1e-2)
    inner = step.__closure__ or ()
    for cell in inner:
        if isinstance(cell.cell_contents, torch.optim.Optimizer):
            cell.cell_contents = optimizer
    return step, model, optimizer, plan


def second_moment(plan: str, factor: float, some: bool) -> Made:
    """Adam with state, which takes another second moment while the plan is in force."""
    step, model, _, _ = made(plan, "none", "", _same)

    class Missing(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:
            if model.now:
                for one in self.state.values():
                    square = one["exp_avg_sq"].view(-1)
                    square[:: 3 if some else 1].mul_(factor)
            super().step(closure)

    optimizer = Missing(model.parameters(), 1e-3)
    for cell in step.__closure__ or ():
        if isinstance(cell.cell_contents, torch.optim.Optimizer):
            cell.cell_contents = optimizer
    for _ in range(3):
        step()
    return step, model, optimizer, plan


def _kinds() -> Iterator[Planted]:
    for plan in (BF16, EXACT):
        for name, fault in OUTPUTS.items():
            for trains in (True, False):
                mode = "training" if trains else "inference"
                yield Planted(f"beside, {mode}, {plan}", name,
                              partial(made, plan, "outputs", *fault, trains))  # fmt: skip
        for kind, faults in (("gradients", GRADIENTS), ("buffers", BUFFERS)):
            for name, fault in faults.items():
                yield Planted(f"{kind}, {plan}", name, partial(made, plan, kind, *fault))
        for name in UPDATES:
            for optimizer in (torch.optim.SGD, torch.optim.Adam):
                group = f"updates of {optimizer.__name__}, {plan}"
                yield Planted(group, name, partial(moved, name, plan, optimizer))
        for factor, some in ((9.0, False), (9.0, True), (0.01, True)):
            told = f"second moment times {factor:g}{' in a third' if some else ''}"
            yield Planted(f"state, {plan}", told, partial(second_moment, plan, factor, some))


BESIDE = tuple(_kinds())
HONEST = {
    f"results of several sizes, {'training' if trains else 'inference'}": partial(
        made, BF16, "none", "", _same, trains
    )
    for trains in (True, False)
}
