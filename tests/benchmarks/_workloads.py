"""Small workloads of the usual kinds, for the benchmark programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Backward = Callable[[torch.Tensor], None]


@dataclass
class Workload:
    """A model, its optimizer (None for inference) and what one step does with a model.

    `step(model, optimizer, backward)` takes all that a framework wraps, so that it runs the same.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    step: Callable[..., object]


class Transformer(nn.Module):
    """A small encoder over tokens that classifies each position."""

    def __init__(self, width: int = 128, layers: int = 2, words: int = 500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Batch x length tokens to batch x length x words."""
        return self.head(self.encoder(self.embedding(tokens)))


class Cnn(nn.Module):
    """Convolutions with batch norm and a residual connection."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Batch x 3 x height x width images to batch x 10."""
        found = torch.relu(self.stem(images))
        return self.head(torch.relu(found + self.block(found)).mean((2, 3)))


class Resnet(nn.Module):
    """Residual blocks at two resolutions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = _normed(3, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(_normed(width, width), nn.ReLU(), _normed(width, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Batch x 3 x height x width images to batch x 10."""
        found = torch.relu(self.stem(images))
        for block in self.blocks:
            found = torch.relu(found + block(found))
        return self.head(found.mean((2, 3)))


def _normed(inputs: int, outputs: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Lstm(nn.Module):
    """A sequence to a class."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        """Batch x length x 32 to batch x 10."""
        return self.head(self.lstm(sequence)[0][:, -1])


def mlp(width: int, layers: int) -> nn.Module:
    """Linear layers with ReLU between."""
    parts: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(layers - 2):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


def training(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Workload:
    """Cross entropy against classes of each row of the last dimension, and AdamW."""
    loss_fn = nn.CrossEntropyLoss()

    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, backward: Backward = _backward
    ) -> None:
        loss = loss_fn(model(x).flatten(0, -2), y.flatten())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), step)


def inference(model: nn.Module, x: torch.Tensor) -> Workload:
    """The forward pass alone."""

    def step(
        model: nn.Module, optimizer: None = None, backward: Backward = _backward
    ) -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return Workload(model.eval(), None, step)


def _rollout() -> Workload:
    """A policy that acts 24 times in a made environment, then learns once from the return."""
    policy = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    world = torch.randn(4, 16) / 4
    start = torch.randn(16, 16)

    def step(
        model: nn.Module, optimizer: torch.optim.Optimizer, backward: Backward = _backward
    ) -> None:
        state, total, said = start, start.new_zeros(16), start.new_zeros(16)
        for _ in range(24):
            logits = model(state).float()
            action = logits.detach().argmax(-1)
            said = said + logits.log_softmax(-1).gather(1, action[:, None])[:, 0]
            state = torch.tanh(state + world[action])
            total = total + state[:, 0]
        loss = -(said * (total - total.mean())).mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return Workload(policy, torch.optim.AdamW(policy.parameters()), step)


def _tokens(batch: int = 8, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(500, (batch, length)), torch.randint(500, (batch, length))


def _classes(batch: int) -> torch.Tensor:
    return torch.randint(10, (batch,))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "transformer, training": lambda: training(Transformer(), *_tokens()),
    "transformer, inference": lambda: inference(Transformer(), _tokens()[0]),
    "CNN, inference": lambda: inference(Cnn(), torch.rand(16, 3, 32, 32)),
    "tiny MLP, training": lambda: training(mlp(64, 4), torch.rand(32, 64), _classes(32)),
    "large MLP, training": lambda: training(mlp(1024, 5), torch.rand(64, 64), _classes(64)),
    "large MLP, inference": lambda: inference(mlp(1024, 5), torch.rand(64, 64)),
    "LSTM, training": lambda: training(Lstm(), torch.rand(16, 50, 32), _classes(16)),
    "rollout, training": _rollout,
    "CNN, training": lambda: training(Cnn(), torch.rand(16, 3, 32, 32), _classes(16)),
    # Steps of 0.2 to 0.5 s on two cores.
    "long transformer, training": lambda: training(Transformer(256, 4), *_tokens(16, 128)),
    "long CNN, training": lambda: training(Resnet(), torch.rand(48, 3, 32, 32), _classes(48)),
    "long encoder, inference": lambda: inference(Transformer(384, 6), _tokens(32, 128)[0]),
}


def made(name: str) -> Workload:
    """A fresh workload with fixed random numbers."""
    torch.manual_seed(0)
    return WORKLOADS[name]()
