"""Faults in a part of a packed parameter, which is small beside the rest of its gradient.

Query, key and value in one projection, the gates of a recurrent layer, experts in one tensor, two
tables in one, heads beside one another: the step's results hardly change, and the norm of the
gradient hides what is wrong in a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _planted import BF16, EXACT, Made, Planted, Spoiled, in_force
from torch import nn
from torch.nn import functional

WIDTH, HEADS, TOKENS, BATCH, CLASSES = 32, 4, 12, 16, 10
WORDS, EXPERTS = 60, 6
Fault = Callable[[torch.Tensor], torch.Tensor]


def _nothing(value: torch.Tensor) -> torch.Tensor:
    return value


def gradient_times(factor: float) -> Fault:
    """The same, whose gradient is another."""
    return lambda one: Spoiled.apply(one, lambda gradient: gradient * factor)


class Packed(nn.Module):
    """(N, T, 32) to (N, 10). `fault` changes one thing, by its name, while the plan is in force."""

    def __init__(self, fault: str, change: Any) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.fault, self.change = fault, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        return self.head(self.norm(hidden + self.mixed(hidden))).mean(1)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def wrong(self, name: str, value: Any) -> Any:
        """This value; under the plan, and by the fault of this name, another one."""
        if name != self.fault or not in_force():
            return value
        return self.change(value) if callable(self.change) else self.change


class Attention(Packed):
    def __init__(self, fault: str, change: Any, keys: int = HEADS) -> None:
        super().__init__(fault, change)
        self.keys = keys
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * keys) * WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        each = WIDTH // HEADS
        sizes = [one * each for one in (HEADS, self.keys, self.keys)]
        q, k, v = (
            self.wrong(name, one).unflatten(-1, (-1, each)).transpose(1, 2)
            for name, one in zip("qkv", self.qkv(x).split(sizes, -1), strict=True)
        )
        q, k = self.turned(q, 0), self.turned(k, self.wrong("turn", 0))
        k, v = (one.repeat_interleave(HEADS // self.keys, 1) for one in (k, v))
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(self.wrong("mask", 0))
        scale = self.wrong("scale", each**-0.5)
        found = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        return self.out(self.wrong("heads", found).transpose(1, 2).flatten(2))

    def turned(self, x: torch.Tensor, by: int) -> torch.Tensor:
        """Rotary positions."""
        half = x.shape[-1] // 2
        angles = torch.arange(by, TOKENS + by)[:, None] * 100 ** (-torch.arange(half) / half)
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


class Gates(Packed):
    """A recurrent layer whose gates lie in one weight; of three, or of four as an LSTM's."""

    def __init__(self, fault: str, change: Any, count: int = 4) -> None:
        super().__init__(fault, change)
        self.count = count
        self.weight = nn.Parameter(torch.randn(count * WIDTH, WIDTH) * 0.15)
        self.again = nn.Parameter(torch.randn(count * WIDTH, WIDTH) * 0.15)
        self.bias = nn.Parameter(torch.zeros(count * WIDTH))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        state = cell = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        found = []
        for inputs in functional.linear(x, self.weight, self.bias).unbind(1):
            gates = (inputs + functional.linear(state, self.again)).chunk(self.count, -1)
            gates = [self.wrong(f"gate {index}", one) for index, one in enumerate(gates)]
            if self.count == 3:
                update, new = gates[1].sigmoid(), (gates[2] * gates[0].sigmoid()).tanh()
                state = update * state + (1 - update) * new
            else:
                cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh()
                state = gates[3].sigmoid() * cell.tanh()
            found.append(state)
        return torch.stack(found, 1)


class Experts(Packed):
    """Six of them in one tensor; some are chosen less than others."""

    def __init__(self, fault: str, change: Any) -> None:
        super().__init__(fault, change)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)
        self.register_buffer("share", torch.logspace(0, -1.5, EXPERTS))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("ntc,ecd->entd", x, self.weight).tanh()
        ones = [self.wrong(f"expert {index}", one) for index, one in enumerate(each)]
        return sum(share * one for share, one in zip(self.share, ones, strict=True))


class Tables(Packed):
    """Words and positions in one embedding."""

    def __init__(self, fault: str, change: Any) -> None:
        super().__init__(fault, change)
        self.table = nn.Embedding(WORDS + TOKENS, WIDTH)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        words = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) ** 2 % WORDS
        where = torch.arange(WORDS, WORDS + TOKENS)
        return self.table(words) + 0.05 * self.wrong("positions", self.table(where))


class Gated(Packed):
    """Gate and value of a feed-forward layer in one projection."""

    def __init__(self, fault: str, change: Any) -> None:
        super().__init__(fault, change)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.wide(x).chunk(2, -1)
        gate = self.wrong("gate", 0.1 * gate)
        return self.narrow(functional.silu(gate) * value)


class Channels(Packed):
    """A convolution in groups, of which the last ones count less."""

    def __init__(self, fault: str, change: Any) -> None:
        super().__init__(fault, change)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        groups = self.conv(x.transpose(1, 2)).chunk(4, 1)
        ones = [self.wrong(f"group {index}", one) for index, one in enumerate(groups)]
        return torch.cat([0.3**index * one for index, one in enumerate(ones)], 1).transpose(1, 2)


def first_head(factor: float) -> Fault:
    """What the first head attends to, times a factor: the gradient only."""

    def spoil(one: torch.Tensor) -> torch.Tensor:
        head, others = one.split([WIDTH // HEADS, one.shape[-1] - WIDTH // HEADS], -1)
        return torch.cat([gradient_times(factor)(head), others], -1)

    return spoil


def without_a_head(found: torch.Tensor) -> torch.Tensor:
    return torch.cat([found[:, :1] * 0, found[:, 1:]], 1)


Net = Callable[[str, Any], Packed]
GROUPED: Net = partial(Attention, keys=1)
FAULTS: dict[str, tuple[Net, str, Any]] = {
    "scale of attention": (Attention, "scale", 0.26),
    "scale of attention, 15 % off": (Attention, "scale", 0.3),
    "scale of attention, one key for all heads": (GROUPED, "scale", 0.26),
    "no causal mask": (Attention, "mask", TOKENS),
    "mask off by one": (Attention, "mask", 1),
    "a head missing": (Attention, "heads", without_a_head),
    "positions off by one": (Attention, "turn", 1),
    "query detached": (Attention, "q", torch.Tensor.detach),
    "key detached": (Attention, "k", torch.Tensor.detach),
    "key detached, one for all heads": (GROUPED, "k", torch.Tensor.detach),
    "gradient of the query doubled": (Attention, "q", gradient_times(2)),
    "gradient of the key of another sign": (Attention, "k", gradient_times(-1)),
    "gradient of the value 20 % short": (Attention, "v", gradient_times(0.8)),
    "query of one head detached": (Attention, "q", first_head(0)),
    "key of one head 30 % too large": (Attention, "k", first_head(1.3)),
    **{f"gate {one} of four detached": (Gates, f"gate {one}", torch.Tensor.detach)
       for one in range(4)},
    "forget gate 20 % short": (Gates, "gate 1", gradient_times(0.8)),
    "reset gate detached": (partial(Gates, count=3), "gate 0", torch.Tensor.detach),
    "reset gate 30 % too large": (partial(Gates, count=3), "gate 0", gradient_times(1.3)),
    **{f"expert {one} detached": (Experts, f"expert {one}", torch.Tensor.detach)
       for one in (0, 3, 5)},
    "the last expert 20 % too large": (Experts, "expert 5", gradient_times(1.2)),
    "positions' table detached": (Tables, "positions", torch.Tensor.detach),
    "positions' table half": (Tables, "positions", gradient_times(0.5)),
    "gate detached": (Gated, "gate", torch.Tensor.detach),
    "gate 20 % too large": (Gated, "gate", gradient_times(1.2)),
    "the last group detached": (Channels, "group 3", torch.Tensor.detach),
    "the last group 30 % short": (Channels, "group 3", gradient_times(0.7)),
}  # fmt: skip


def made(plan: str, net: Net, fault: str, change: Any) -> Made:
    model, x = net(fault, change), torch.randn(BATCH, TOKENS, WIDTH)
    labels = torch.randint(CLASSES, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step() -> None:
        functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, plan


def _kinds() -> Iterator[Planted]:
    for plan in (BF16, EXACT):
        for name, (net, fault, change) in FAULTS.items():
            yield Planted(f"packed, {plan}", name, partial(made, plan, net, fault, change))


PACKED = tuple(_kinds())
HONEST = {
    f"packed: {name}": partial(made, BF16, net, "none", None)
    for name, net in {
        "attention": Attention, "one key for all heads": GROUPED, "gates": Gates,
        "three gates": partial(Gates, count=3), "experts": Experts, "tables": Tables,
        "gated": Gated, "channels": Channels,
    }.items()
}  # fmt: skip
