"""The models that each entry of the catalog is measured on: the usual kinds, small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _workloads import WORKLOADS, Backward, Workload, inference, training
from torch import nn
from torch.nn import functional

CLASSES, WORDS = 10, 2000


class Vit(nn.Module):
    """Patches of 8 x 8 that attend to one another: (N, 3, 64, 64) to (N, 10)."""

    def __init__(self, width: int = 192, depth: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.place = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList(Attending(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The mean of all patches, classified."""
        found = self.patches(images).flatten(2).mT + self.place
        for block in self.blocks:
            found = block(found)
        return self.head(self.norm(found).mean(1))


class Attending(nn.Module):
    """A block of a transformer, with torch's own attention: (N, T, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.second(x))


class Unet(nn.Module):
    """Down twice and up again, with shortcuts: (N, 3, H, W) to (N, H, W, 10)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = _twice(3, width), _twice(width, 2 * width)
        self.middle = _twice(2 * width, 4 * width)
        self.raise_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.raise_first = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join_second, self.join_first = _twice(4 * width, 2 * width), _twice(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """A class for each pixel."""
        first = self.first(images)
        second = self.second(functional.max_pool2d(first, 2))
        found = self.middle(functional.max_pool2d(second, 2))
        found = self.join_second(torch.cat([second, self.raise_second(found)], 1))
        found = self.join_first(torch.cat([first, self.raise_first(found)], 1))
        return self.head(found).movedim(1, -1)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for channels in (inputs, outputs):
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        parts += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*parts)


def _bert() -> Workload:
    """Fine-tuning as Hugging Face's own examples do it: the model makes its loss."""
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=WORDS, intermediate_size=1024, **sizes)
    model = transformers.BertForSequenceClassification(config).train()
    batch = {"input_ids": _words(8, 64), "labels": torch.randint(2, (8,))}

    def step(
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Backward = lambda loss: loss.backward(),
    ) -> None:
        backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    return Workload(model, torch.optim.AdamW(model.parameters(), lr=5e-5), step)


def _gpt2() -> Workload:
    """The logits of a batch of texts."""
    import transformers

    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=WORDS, **sizes)
    model, tokens = transformers.GPT2LMHeadModel(config).eval(), _words(4, 128)

    def step(
        model: nn.Module, optimizer: None = None, backward: Backward | None = None
    ) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, use_cache=False).logits

    return Workload(model, None, step)


def _words(batch: int, length: int) -> torch.Tensor:
    return torch.randint(WORDS, (batch, length))


def _images(batch: int) -> torch.Tensor:
    return torch.rand(batch, 3, 64, 64)


def _classes(*size: int) -> torch.Tensor:
    return torch.randint(CLASSES, size)


MODELS: dict[str, Callable[[], Workload]] = {
    "BERT, training": _bert,
    "GPT-2, inference": _gpt2,
    "CNN, training": WORKLOADS["CNN, training"],
    "LSTM, training": WORKLOADS["LSTM, training"],
    "U-Net, training": lambda: training(Unet(), _images(4), _classes(4, 64, 64)),
    "ViT, training": lambda: training(Vit(), _images(16), _classes(16)),
    "ViT, inference": lambda: inference(Vit(), _images(16)),
    "MLP, training": WORKLOADS["large MLP, training"],
    "rollout, training": WORKLOADS["rollout, training"],
}


def made(name: str, device: str) -> Workload:
    """A fresh one with fixed random numbers, model and data on this device."""
    torch.manual_seed(0)
    with torch.device(device):
        return MODELS[name]()
