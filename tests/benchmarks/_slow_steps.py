"""Training loops as people write them, each slow for one reason, and the same without it.

Each function makes a fresh pair: the slow step and the quick one, both for the same work. What the
reason is stands in `_slow_causes.py`.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

Pair = tuple[Callable[[], object], Callable[[], object]]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def adam(model: nn.Module, **more: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, **more)


class Pictures(Dataset[Any]):
    """Pictures that are worked on one by one, each time a little otherwise."""

    def __init__(self, number: int = 256) -> None:
        self.pictures = np.random.default_rng(0).integers(0, 255, (number, 40, 40, 3), np.uint8)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index].astype(np.float32) / 255
        for _ in range(4):  # smoothed
            picture = (
                picture
                + np.roll(picture, 1, 0)
                + np.roll(picture, -1, 0)
                + np.roll(picture, 1, 1)
                + np.roll(picture, -1, 1)
            ) / 5
        if random.random() < 0.5:
            picture = picture[:, ::-1]
        picture = (picture - picture.mean((0, 1))) / (picture.std((0, 1)) + 1e-6)
        return torch.from_numpy(picture.transpose(2, 0, 1).copy()), index % 10


def epoch(net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> None:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()


def pictures_one_by_one() -> Pair:
    net, data = cnn(), Pictures()
    optimizer = adam(net)
    plain = DataLoader(data, batch_size=16)
    others = DataLoader(data, batch_size=16, num_workers=2, persistent_workers=True)
    return lambda: epoch(net, optimizer, plain), lambda: epoch(net, optimizer, others)


def rows_of_a_table() -> Pair:
    from torch.utils.data import BatchSampler, RandomSampler

    table = TensorDataset(torch.randn(4096, 32), torch.randint(0, 10, (4096,)))
    net = mlp(32, 64, 10)
    optimizer = adam(net)
    plain = DataLoader(table, batch_size=128, shuffle=True)
    whole = DataLoader(
        table, sampler=BatchSampler(RandomSampler(table), 128, False), batch_size=None
    )
    return lambda: epoch(net, optimizer, plain), lambda: epoch(net, optimizer, whole)


def short_epochs() -> Pair:
    net, data = cnn(8), Pictures(64)
    optimizer = adam(net)
    again = DataLoader(data, batch_size=16, num_workers=2)
    stays = DataLoader(data, batch_size=16, num_workers=2, persistent_workers=True)
    return lambda: epoch(net, optimizer, again), lambda: epoch(net, optimizer, stays)


class Reader(nn.Module):
    """A small encoder of words."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(500, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 128, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = words == 0
        hidden = self.layers(self.words(words), src_key_padding_mask=mask)
        weight = (~mask).unsqueeze(-1).float()
        return self.head((hidden * weight).sum(1) / weight.sum(1))


def sentences_of_one_length() -> Pair:
    torch.manual_seed(1)
    net = Reader()
    optimizer = adam(net)
    lengths = torch.randint(12, 40, (16,)).tolist()
    words = torch.zeros(16, 128, dtype=torch.long)
    for row, length in enumerate(lengths):
        words[row, :length] = torch.randint(1, 500, (length,))
    labels = torch.randint(0, 2, (16,))
    cut = words[:, : max(lengths)].contiguous()

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(batch), labels).backward()
        optimizer.step()

    return lambda: step(words), lambda: step(cut)


def two_at_a_time() -> Pair:
    net = mlp(64, 128, 128, 10)
    optimizer = adam(net)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))

    def train(rows: int) -> None:
        for begin in range(0, 64, rows):
            optimizer.zero_grad()
            F.cross_entropy(net(x[begin : begin + rows]), y[begin : begin + rows]).backward()
            optimizer.step()

    return lambda: train(2), lambda: train(16)


def counting_hits() -> Pair:
    net = mlp(64, 256, 10)
    optimizer = adam(net)
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))

    def slow() -> float:
        optimizer.zero_grad()
        out = net(x)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        hits = 0
        for row, label in zip(out, y, strict=True):
            if row.argmax().item() == label.item():
                hits += 1
        return hits / len(y)

    def quick() -> float:
        optimizer.zero_grad()
        out = net(x)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        return float((out.argmax(1) == y).float().mean())

    return slow, quick


def numbers_in_lists() -> Pair:
    rows = [[random.random() for _ in range(128)] for _ in range(256)]
    table = torch.tensor(rows)
    net = mlp(128, 256, 10)
    optimizer = adam(net)
    y = torch.randint(0, 10, (256,))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return lambda: from_list(step, rows), lambda: step(table)


def from_list(step: Callable[[torch.Tensor], None], rows: list[list[float]]) -> None:
    step(torch.tensor(rows))


def summed_losses() -> Pair:
    net = mlp(64, 256, 10)
    optimizer = adam(net)
    x, y = torch.randn(8, 64, 64), torch.randint(0, 10, (8, 64))

    def slow() -> object:
        running = 0.0
        for inputs, targets in zip(x, y, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            running += loss
        return running

    def quick() -> object:
        running = 0.0
        for inputs, targets in zip(x, y, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            running += loss.item()
        return running

    return slow, quick


def zeros() -> Pair:
    net = mlp(512, 2048, 2048, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    x, y = torch.randn(16, 512), torch.randint(0, 10, (16,))

    def step(to_none: bool) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return lambda: step(False), lambda: step(True)


def validating() -> Pair:
    net = cnn(16)
    net.eval()
    batches = [torch.randn(16, 3, 32, 32) for _ in range(4)]

    def slow() -> list[torch.Tensor]:
        return [net(images).argmax(1) for images in batches]

    def quick() -> list[torch.Tensor]:
        with torch.no_grad():
            return [net(images).argmax(1) for images in batches]

    return slow, quick


def looking_for_nan() -> Pair:
    net = mlp(64, *[64] * 8, 10)
    optimizer = adam(net)
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def slow() -> None:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")
            step()

    return slow, step


def frozen_body() -> Pair:
    body, head = mlp(256, 512, 512, 256), nn.Linear(256, 10)
    optimizer = adam(head)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))

    def slow() -> None:
        optimizer.zero_grad()
        F.cross_entropy(head(body(x)), y).backward()
        optimizer.step()

    def quick() -> None:
        body.requires_grad_(False)
        optimizer.zero_grad()
        F.cross_entropy(head(body(x)), y).backward()
        optimizer.step()
        body.requires_grad_(True)

    return slow, quick


def held_for_nothing() -> Pair:
    net = nn.ModuleDict({"body": mlp(128, 512, 512, 128), "head": nn.Linear(128, 10)})
    x, y = torch.randn(32, 128), torch.randint(0, 10, (32,))
    every = adam(net)
    F.cross_entropy(net["head"](net["body"](x)), y).backward()
    net["body"].requires_grad_(False)
    few = adam(net["head"])

    def step(optimizer: torch.optim.Optimizer) -> None:
        for parameter in net["head"].parameters():
            parameter.grad = None
        F.cross_entropy(net["head"](net["body"](x)), y).backward()
        optimizer.step()

    return lambda: step(every), lambda: step(few)


def graph_of_gradients() -> Pair:
    net = mlp(128, 512, 512, 10)
    optimizer = adam(net)
    x, y = torch.randn(64, 128), torch.randint(0, 10, (64,))

    def step(**more: bool) -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.cross_entropy(net(x), y).backward(**more)
        optimizer.step()

    return lambda: step(create_graph=True), lambda: step()


def asked_twice() -> Pair:
    net = cnn(16)
    optimizer = adam(net)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))

    def slow() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        accuracy = (net(x).argmax(1) == y).float().mean()
        loss.backward()
        optimizer.step()
        return float(accuracy)

    def quick() -> float:
        optimizer.zero_grad()
        out = net(x)
        accuracy = (out.argmax(1) == y).float().mean()
        F.cross_entropy(out, y).backward()
        optimizer.step()
        return float(accuracy)

    return slow, quick


def numbers_from_numpy() -> Pair:
    generator = np.random.default_rng(0)
    x, y = torch.from_numpy(generator.normal(size=(128, 256))), torch.randint(0, 10, (128,))
    wide, plain = mlp(256, 512, 512, 10).double(), mlp(256, 512, 512, 10)
    optimizers = adam(wide), adam(plain)
    half = x.float()

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return lambda: step(wide, optimizers[0], x), lambda: step(plain, optimizers[1], half)


class Stepwise(nn.Module):
    """Reads a sequence moment by moment."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(32, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        hidden = sequence.new_zeros(len(sequence), 64)
        memory = hidden
        for moment in sequence.unbind(1):
            hidden, memory = self.cell(moment, (hidden, memory))
        return self.head(hidden)


class AtOnce(nn.Module):
    """Reads it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, 4)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(sequence)[0][:, -1])


def moment_by_moment() -> Pair:
    x, y = torch.randn(32, 48, 32), torch.randint(0, 4, (32,))
    nets = Stepwise(), AtOnce()
    optimizers = adam(nets[0]), adam(nets[1])

    def step(number: int) -> None:
        optimizers[number].zero_grad()
        F.cross_entropy(nets[number](x), y).backward()
        optimizers[number].step()

    return lambda: step(0), lambda: step(1)


class Attention(nn.Module):
    """Written out, or by torch's own function."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.mix, self.out, self.by_hand = nn.Linear(64, 192), nn.Linear(64, 64), by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one.view(batch, length, 4, 16).transpose(1, 2) for one in self.mix(x).chunk(3, -1)
        )
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / math.sqrt(16)
            out = torch.softmax(scores, -1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(batch, length, 64))


def attention_from_a_paper() -> Pair:
    x = torch.randn(8, 256, 64)
    nets = Attention(True), Attention(False)
    optimizers = adam(nets[0]), adam(nets[1])

    def step(number: int) -> None:
        optimizers[number].zero_grad()
        nets[number](x).square().mean().backward()
        optimizers[number].step()

    return lambda: step(0), lambda: step(1)


def one_after_another() -> Pair:
    net = mlp(64, 256, 10)
    net.eval()
    samples = list(torch.randn(100, 64))

    @torch.no_grad()
    def slow() -> list[int]:
        return [int(net(sample.unsqueeze(0)).argmax()) for sample in samples]

    @torch.no_grad()
    def quick() -> list[int]:
        return net(torch.stack(samples)).argmax(1).tolist()

    return slow, quick


def norm_by_hand() -> Pair:
    net = mlp(32, *[32] * 20, 10)
    optimizer = adam(net)
    x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))

    def slow() -> float:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        total = 0.0
        for parameter in net.parameters():
            total += parameter.grad.detach().norm(2).item() ** 2
        optimizer.step()
        return total**0.5

    def quick() -> float:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        total = nn.utils.get_total_norm([one.grad for one in net.parameters()], foreach=True)
        optimizer.step()
        return float(total)

    return slow, quick


def averaged_weights() -> Pair:
    net = mlp(32, *[32] * 20, 10)
    shadow = copy.deepcopy(net).requires_grad_(False)
    optimizer = adam(net)
    x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))

    def train() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def slow() -> None:
        train()
        with torch.no_grad():
            for average, weight in zip(shadow.parameters(), net.parameters(), strict=True):
                average.mul_(0.99).add_(weight, alpha=0.01)

    def quick() -> None:
        train()
        with torch.no_grad():
            torch._foreach_lerp_(list(shadow.parameters()), list(net.parameters()), 0.01)

    return slow, quick


def plain_optimizer() -> Pair:
    net = mlp(32, *[64] * 24, 10)
    x, y = torch.randn(16, 32), torch.randint(0, 10, (16,))
    slow = torch.optim.AdamW(net.parameters(), foreach=False)
    quick = torch.optim.AdamW(net.parameters(), fused=True)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return lambda: step(slow), lambda: step(quick)


def tidy() -> Pair:
    net = mlp(64, 256, 10)
    optimizer = adam(net)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))

    def quick() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def slow() -> None:
        quick()
        gc.collect()

    return slow, quick


def saved_each_time() -> Pair:
    net = mlp(256, 512, 512, 10)
    optimizer = adam(net)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))

    def quick() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def slow() -> object:
        quick()
        best = copy.deepcopy(net.state_dict())
        torch.save(best, io.BytesIO())
        return best

    return slow, quick


def report_each_time() -> Pair:
    net = mlp(64, 128, 10)
    optimizer = adam(net)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    log = io.StringIO()

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def slow() -> None:
        loss = train()
        print(f"loss {loss:.4f}", {name: one.detach() for name, one in net.named_parameters()},
              file=log)  # fmt: skip

    return slow, train


def scores_by_a_library() -> Pair:
    from sklearn.metrics import f1_score

    net = mlp(64, 256, 10)
    optimizer = adam(net)
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        out = net(x)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        return out

    def slow() -> float:
        out = train()
        return float(f1_score(y.numpy(), out.detach().argmax(1).numpy(), average="macro"))

    return slow, train


def watched_input() -> Pair:
    net = cnn(8)
    optimizer = adam(net)
    x, y = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))

    def step(needs: bool) -> None:
        images = x.detach().requires_grad_(needs)
        optimizer.zero_grad()
        F.cross_entropy(net(images), y).backward()
        optimizer.step()

    return lambda: step(True), lambda: step(False)


def weights_moved_by_hand() -> Pair:
    net = mlp(32, *[32] * 20, 10)
    x, y = torch.randn(32, 32), torch.randint(0, 10, (32,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

    def slow() -> None:
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.01 * weight.grad
                weight.grad = None

    def quick() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return slow, quick
