"""Training loops as people write them, each slow for one reason, and their corrected versions.

Each function makes a fresh pair of a slow step and a quick one, which do the same work.
"""

from __future__ import annotations

import copy
import gc
import io
import math
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _nets import mlp, normed, pooled, training
from sklearn import metrics
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

Pair = tuple[Callable[[], object], Callable[[], object]]


def cnn(width: int = 16) -> nn.Sequential:
    second = nn.Conv2d(width, 2 * width, 3, padding=1)
    layers = normed(3, width), nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU()
    return pooled(*layers, width=2 * width, classes=10)


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)


class Task:
    """Training step of a classifier, which returns the logits; `backward` omits the update."""

    def __init__(self, net: nn.Module, x: torch.Tensor, classes: int = 10, optimizer=None) -> None:
        self.net, self.x, self.optimizer = net, x, optimizer or adam(net)
        self.y = torch.randint(0, classes, (len(x),))

    def backward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        self.optimizer.zero_grad()
        out = self.net(self.x if x is None else x)
        F.cross_entropy(out, self.y).backward()
        return out

    def __call__(self, x: torch.Tensor | None = None) -> torch.Tensor:
        out = self.backward(x)
        self.optimizer.step()
        return out


class Pictures(Dataset[Any]):
    """Random pictures, each smoothed, flipped at random and normalized when it is read."""

    def __init__(self, number: int = 256, smoothed: int = 4) -> None:
        self.smoothed = smoothed
        self.pictures = np.random.default_rng(0).integers(0, 255, (number, 40, 40, 3), np.uint8)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pictures[index].astype(np.float32) / 255
        for _ in range(self.smoothed):
            shifted = [np.roll(picture, by, axis) for by in (1, -1) for axis in (0, 1)]
            picture = sum(shifted, picture) / 5
        if random.random() < 0.5:
            picture = picture[:, ::-1]
        picture = (picture - picture.mean((0, 1))) / (picture.std((0, 1)) + 1e-6)
        return torch.from_numpy(picture.transpose(2, 0, 1).copy()), index % 10


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss


def epochs(net: nn.Module, slow: DataLoader[Any], quick: DataLoader[Any]) -> Pair:
    optimizer = adam(net)

    def epoch(loader: DataLoader[Any]) -> None:
        for images, labels in loader:
            stepped(net, optimizer, images, labels)

    return lambda: epoch(slow), lambda: epoch(quick)


def pictures_one_by_one() -> Pair:
    plain = partial(DataLoader, Pictures(), batch_size=16)
    return epochs(cnn(), plain(), plain(num_workers=2, persistent_workers=True))


def rows_of_a_table() -> Pair:
    table = TensorDataset(torch.randn(4096, 32), torch.randint(0, 10, (4096,)))
    batches = BatchSampler(RandomSampler(table), 128, False)
    plain = DataLoader(table, batch_size=128, shuffle=True)
    return epochs(mlp(32, 64, 10), plain, DataLoader(table, sampler=batches, batch_size=None))


def short_epochs() -> Pair:
    again = partial(DataLoader, Pictures(64), batch_size=16, num_workers=2)
    return epochs(cnn(8), again(), again(persistent_workers=True))


class Reader(nn.Module):
    """Small transformer that classifies sentences; word 0 is padding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(500, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 128, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = words == 0
        hidden = self.layers(self.words(words), src_key_padding_mask=mask)
        weight = (~mask).unsqueeze(-1).float()
        return self.head((hidden * weight).sum(1) / weight.sum(1))


def sentences_of_one_length() -> Pair:
    torch.manual_seed(1)
    lengths = torch.randint(12, 40, (16,)).tolist()
    words = torch.zeros(16, 128, dtype=torch.long)
    for row, length in enumerate(lengths):
        words[row, :length] = torch.randint(1, 500, (length,))
    cut = words[:, : max(lengths)].contiguous()
    task = Task(Reader(), words, 2)
    return lambda: task(words), lambda: task(cut)


def counting_hits() -> Pair:
    task = Task(mlp(64, 256, 10), torch.randn(256, 64))

    def slow() -> float:
        hits = 0
        for row, label in zip(task(), task.y, strict=True):
            if row.argmax().item() == label.item():
                hits += 1
        return hits / len(task.y)

    return slow, lambda: float((task().argmax(1) == task.y).float().mean())


def numbers_in_lists() -> Pair:
    rows = [[random.random() for _ in range(128)] for _ in range(256)]
    task = Task(mlp(128, 256, 10), torch.tensor(rows))

    return lambda: task(torch.tensor(rows)), task


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

    def quick() -> float:
        return sum(stepped(net, optimizer, *batch).item() for batch in zip(x, y, strict=True))

    return slow, quick


def validating() -> Pair:
    net = cnn(16).eval()
    batches = [torch.randn(16, 3, 32, 32) for _ in range(4)]

    def slow() -> list[torch.Tensor]:
        return [net(images).argmax(1) for images in batches]

    return slow, torch.no_grad()(slow)


def looking_for_nan() -> Pair:
    task = Task(mlp(64, *[64] * 8, 10), torch.randn(32, 64))

    def slow() -> None:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")
            task()

    return slow, task


def frozen_body() -> Pair:
    body, head = mlp(256, 512, 512, 256), nn.Linear(256, 10)
    task = Task(nn.Sequential(body, head), torch.randn(64, 256), optimizer=adam(head))

    def quick() -> None:
        body.requires_grad_(False)
        task()
        body.requires_grad_(True)

    return lambda: task(), quick


def numbers_from_numpy() -> Pair:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(128, 256)))
    slow = Task(mlp(256, 512, 512, 10).double(), x)
    return lambda: slow(), Task(mlp(256, 512, 512, 10), x.float())


class Attention(nn.Module):
    """Self-attention, written out by hand or with torch's own function."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.mix, self.out, self.by_hand = nn.Linear(64, 192), nn.Linear(64, 64), by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.mix(x).chunk(3, -1)
        q, k, v = (one.view(batch, length, 4, 16).transpose(1, 2) for one in parts)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / math.sqrt(16)
            out = torch.softmax(scores, -1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(batch, length, 64))


def attention_from_a_paper() -> Pair:
    x = torch.randn(8, 256, 64)
    nets = Attention(True), Attention(False)

    def loss(net: nn.Module) -> torch.Tensor:
        return net(x).square().mean()

    slow, quick = (training(partial(loss, net), adam(net)) for net in nets)
    return slow, quick


def one_after_another() -> Pair:
    net = mlp(64, 256, 10).eval()
    samples = list(torch.randn(100, 64))

    @torch.no_grad()
    def slow() -> list[int]:
        return [int(net(sample.unsqueeze(0)).argmax()) for sample in samples]

    return slow, torch.no_grad()(lambda: net(torch.stack(samples)).argmax(1).tolist())


def norm_by_hand() -> Pair:
    task = Task(mlp(32, *[32] * 20, 10), torch.randn(32, 32))

    def slow() -> float:
        task.backward()
        total = 0.0
        for parameter in task.net.parameters():
            total += parameter.grad.detach().norm(2).item() ** 2
        task.optimizer.step()
        return total**0.5

    def quick() -> float:
        task()
        return float(nn.utils.get_total_norm([one.grad for one in task.net.parameters()]))

    return slow, quick


def averaged_weights() -> Pair:
    task = Task(mlp(32, *[32] * 20, 10), torch.randn(32, 32))
    shadow = copy.deepcopy(task.net).requires_grad_(False)

    def slow() -> None:
        task()
        with torch.no_grad():
            for average, weight in zip(shadow.parameters(), task.net.parameters(), strict=True):
                average.mul_(0.99).add_(weight, alpha=0.01)

    def quick() -> None:
        task()
        with torch.no_grad():
            torch._foreach_lerp_(list(shadow.parameters()), list(task.net.parameters()), 0.01)

    return slow, quick


def tidy() -> Pair:
    task = Task(mlp(64, 256, 10), torch.randn(64, 64))

    def slow() -> None:
        task()
        gc.collect()

    return slow, task


def saved_each_time() -> Pair:
    task = Task(mlp(256, 512, 512, 10), torch.randn(64, 256))

    def slow() -> object:
        task()
        best = copy.deepcopy(task.net.state_dict())
        torch.save(best, io.BytesIO())
        return best

    return slow, task


def report_each_time() -> Pair:
    task, log = Task(mlp(64, 128, 10), torch.randn(64, 64)), io.StringIO()

    def slow() -> None:
        out = task()
        weights = {name: one.detach() for name, one in task.net.named_parameters()}
        print(f"mean {out.mean():.4f}", weights, file=log)

    return slow, task


def scores_by_a_library() -> Pair:
    task = Task(mlp(64, 256, 10), torch.randn(256, 64))

    def slow() -> float:
        out = task().detach().argmax(1)
        return float(metrics.f1_score(task.y.numpy(), out.numpy(), average="macro"))

    return slow, task


def weights_moved_by_hand() -> Pair:
    net = mlp(32, *[32] * 20, 10)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    task = Task(net, torch.randn(32, 32), optimizer=sgd)

    def slow() -> None:
        task.backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= 0.01 * weight.grad

    return slow, task


# The author of the next two loops had not seen the rules of `advise`.


def tabular_churn() -> Pair:
    """Return epochs of an MLP on a table; the slow one computes the AUC after every batch."""
    x = torch.randn(6400, 20)
    y = (x[:, 0] + torch.randn(6400) > 0).float()

    def made(each_batch: bool) -> Callable[[], object]:
        model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(x, y), batch_size=200)

        def epoch() -> float:
            scores, truths, auc = [], [], 0.0
            for i, (rows, labels) in enumerate(loader, start=1):
                optimizer.zero_grad()
                logits = model(rows)
                F.binary_cross_entropy_with_logits(logits, labels).backward()
                optimizer.step()
                scores.extend(logits.tolist())
                truths.extend(labels.tolist())
                if each_batch or i == len(loader):
                    auc = float(metrics.roc_auc_score(truths, scores))
            return auc

        return epoch

    return made(True), made(False)


def segment_slices() -> Pair:
    """Return steps that segment a scan by slices; the slow one appends each mask with `cat`."""
    scan = torch.randn(48, 1, 128, 128)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1)
    model = nn.Sequential(*layers).eval()

    @torch.no_grad()
    def slow() -> torch.Tensor:
        masks = torch.empty(0, 12, 128, 128)
        for piece in scan.split(1):
            masks = torch.cat([masks, model(piece).softmax(1)])
        return masks

    pieces = scan.split(1)
    return slow, torch.no_grad()(lambda: torch.cat([model(one).softmax(1) for one in pieces]))


# The rules of `advise` that explain why each loop is slow; finding one of them is enough.
CAUSES = {
    "pictures_one_by_one": ("workers",),
    "rows_of_a_table": ("in_memory",),
    "short_epochs": ("worker_start",),
    "sentences_of_one_length": ("padding",),
    "counting_hits": ("synchronizations", "slow_lines"),
    "numbers_in_lists": ("tensor_of_list",),
    "summed_losses": ("graph_kept",),
    "validating": ("no_grad",),
    "looking_for_nan": ("anomaly_mode",),
    "frozen_body": ("frozen_gradients",),
    "numbers_from_numpy": ("double_precision",),
    "attention_from_a_paper": ("attention_by_hand",),
    "one_after_another": ("one_by_one",),
    "norm_by_hand": ("parameter_loops",),
    "averaged_weights": ("parameter_loops",),
    "tidy": ("cleaning",),
    "saved_each_time": ("copied_state",),
    "report_each_time": ("writing",),
    "scores_by_a_library": ("slow_lines",),
    "weights_moved_by_hand": ("parameter_loops",),
    "tabular_churn": ("slow_lines",),
    "segment_slices": ("growing_copies",),
}
