"""Small workloads of the usual kinds, for the benchmark programs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from _nets import Block, Recurrent, Residual, images, mlp, normed, pooled, untrained
from torch import nn
from torch.nn import functional

from speedkit_jupyter import benchmark, tune
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.search.outcome import Tuning

Backward = Callable[[torch.Tensor], None]
CLASSES, WORDS = 10, 2000


@dataclass
class Workload:
    """A model, its optimizer (None for inference) and one step with a model.

    `step(model, optimizer, backward)` takes these as arguments, because frameworks wrap them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    step: Callable[..., object]

    def run(self) -> object:
        return self.step(self.model, self.optimizer)

    def tuned(self, **more: Any) -> Tuning:
        return tune(self.run, model=self.model, optimizer=self.optimizer or (), **more)

    def compared(self, names: Iterable[str], budget_s: float) -> Comparison:
        """Compare baseline with these variants, with `budget_s` for each of them."""
        names = list(dict.fromkeys(["baseline", *names]))
        return benchmark(
            self.run, ",".join(names), model=self.model, optimizer=self.optimizer or (),
            budget_s=budget_s * max(len(names) - 1, 1),
        )  # fmt: skip


class Transformer(nn.Module):
    """An encoder over tokens that classifies each position: (N, T) to (N, T, words)."""

    def __init__(self, width: int = 128, layers: int = 2, words: int = 500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


class Vit(nn.Module):
    """Vision transformer with patches of 8 x 8: (N, 3, 64, 64) to (N, 10)."""

    def __init__(self, width: int = 192, depth: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.place = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.blocks(self.patches(x).flatten(2).mT + self.place)
        return self.head(self.norm(found).mean(1))


def resnet18() -> nn.Module:
    """Return a ResNet-18 of 11 M parameters for 32 x 32 pictures; its stem keeps their size."""
    sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    inner = (block for size in sizes for block in (Residual(*size), Residual(size[1])))
    return pooled(normed(3, 64), nn.ReLU(), *inner, width=512, classes=CLASSES)


def gpt(width: int = 512, layers: int = 8, words: int = 5000) -> nn.Module:
    """Return a causal transformer, (N, T) to (N, T, words), by default of 30 M parameters."""
    blocks = (Block(width, 8, causal=True) for _ in range(layers))
    head = nn.LayerNorm(width), nn.Linear(width, words)
    return nn.Sequential(nn.Embedding(words, width), *blocks, *head)


class Unet(nn.Module):
    """U-Net with two levels: (N, 3, H, W) to (N, H, W, 10)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = _twice(3, width), _twice(width, 2 * width)
        self.middle = _twice(2 * width, 4 * width)
        self.raise_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.raise_first = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join_second, self.join_first = _twice(4 * width, 2 * width), _twice(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        found = self.middle(functional.max_pool2d(second, 2))
        found = self.join_second(torch.cat([second, self.raise_second(found)], 1))
        found = self.join_first(torch.cat([first, self.raise_first(found)], 1))
        return self.head(found).movedim(1, -1)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(normed(inputs, outputs), nn.ReLU(), normed(outputs, outputs), nn.ReLU())


def resnet(width: int = 32, blocks: int = 1) -> nn.Module:
    """Return residual blocks after a stem: (N, 3, H, W) to (N, 10)."""
    inner = (Residual(width) for _ in range(blocks))
    return pooled(normed(3, width), nn.ReLU(), *inner, width=width, classes=CLASSES)


def training(model: nn.Module, loss_of: Callable[..., torch.Tensor], lr: float = 1e-4) -> Workload:
    """Return a training step with AdamW; `loss_of` takes the model, plain or wrapped."""

    def step(model: nn.Module, optimizer: Any, backward: Backward = torch.Tensor.backward) -> None:
        backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()

    return Workload(model, torch.optim.AdamW(model.parameters(), lr), step)


def classifying(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Workload:
    """Return a training step with cross entropy over the last dimension and the classes `y`."""
    loss_fn = nn.CrossEntropyLoss()
    return training(model, lambda model: loss_fn(model(x).flatten(0, -2), y.flatten()))


def inference(
    model: nn.Module, x: torch.Tensor, call: Callable[..., torch.Tensor] = lambda model, x: model(x)
) -> Workload:

    @torch.no_grad()
    def step(model: nn.Module, optimizer: None = None, backward: object = None) -> torch.Tensor:
        return call(model, x)

    return Workload(model.eval(), None, step)


def _rollout() -> Workload:
    """Return a training step of a policy: 24 actions in a made-up environment, then an update."""
    world, start = torch.randn(4, 16) / 4, torch.randn(16, 16)

    def loss_of(model: nn.Module) -> torch.Tensor:
        state, total, said = start, start.new_zeros(16), start.new_zeros(16)
        for _ in range(24):
            logits = model(state).float()
            action = logits.detach().argmax(-1)
            said = said + logits.log_softmax(-1).gather(1, action[:, None])[:, 0]
            state = torch.tanh(state + world[action])
            total = total + state[:, 0]
        return -(said * (total - total.mean())).mean()

    policy = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    return training(policy, loss_of, lr=1e-3)


def _bert() -> Workload:
    """Return a fine-tuning step as in Hugging Face's examples: the model computes its loss."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"vocab_size": WORDS, "intermediate_size": 1024}
    model = untrained("Bert", "BertForSequenceClassification", sizes).train()
    batch = {"input_ids": _words(8, 64), "labels": torch.randint(2, (8,))}
    return training(model, lambda model: model(**batch).loss, lr=5e-5)


def _gpt2() -> Workload:
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    model = untrained("GPT2", "GPT2LMHeadModel", {"vocab_size": WORDS, **sizes})
    return inference(model, _words(4, 128), lambda model, x: model(x, use_cache=False).logits)


def _words(batch: int, length: int, words: int = WORDS) -> torch.Tensor:
    return torch.randint(words, (batch, length))


def classes(*size: int) -> torch.Tensor:
    return torch.randint(CLASSES, size)


def _pictures(count: int, size: int) -> torch.Tensor:
    return images(count, 3, size).sigmoid()


def _mlp(width: int, layers: int) -> nn.Module:
    return mlp(64, *[width] * (layers - 1), CLASSES)


def _tokens(width: int, layers: int, batch: int, length: int) -> Workload:
    x, y = _words(batch, length, 500), _words(batch, length, 500)
    return classifying(Transformer(width, layers), x, y)


def _lstm() -> Workload:
    model = Recurrent(nn.LSTM, 32, 128, CLASSES, 1)
    return classifying(model, torch.rand(16, 50, 32), classes(16))


def _of_rows(width: int, layers: int, batch: int) -> Workload:
    return classifying(_mlp(width, layers), torch.rand(batch, 64), classes(batch))


def linear(width: int, batch: int) -> Workload:
    return classifying(mlp(*[width] * 4), torch.rand(batch, width), classes(batch))


# For oracle.py, live.py and advise.py; "long" workloads have steps of 0.2 to 0.5 s on two cores.
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "transformer, training": lambda: _tokens(128, 2, 8, 64),
    "transformer, inference": lambda: inference(Transformer(), _words(8, 64, 500)),
    "CNN, inference": lambda: inference(resnet(), _pictures(16, 32)),
    "tiny MLP, training": lambda: _of_rows(64, 4, 32),
    "large MLP, training": lambda: _of_rows(1024, 5, 64),
    "large MLP, inference": lambda: inference(_mlp(1024, 5), torch.rand(64, 64)),
    "LSTM, training": _lstm,
    "rollout, training": _rollout,
    "CNN, training": lambda: classifying(resnet(), _pictures(16, 32), classes(16)),
    "long transformer, training": lambda: _tokens(256, 4, 16, 128),
    "long CNN, training": lambda: classifying(resnet(64, 3), _pictures(48, 32), classes(48)),
    "long encoder, inference": lambda: inference(Transformer(384, 6), _words(32, 128, 500)),
    "Linear(2048) × 3, training": lambda: linear(2048, 128),
    "Linear(4096) × 3, training": lambda: linear(4096, 16),
    "GPT of 30 M, training": lambda: classifying(gpt(), _words(2, 64), _words(2, 64)),
    "ResNet-18, training": lambda: classifying(resnet18(), _pictures(4, 32), classes(4)),
}
# For catalog.py.
MODELS: dict[str, Callable[[], Workload]] = {
    "BERT, training": _bert,
    "GPT-2, inference": _gpt2,
    "CNN, training": WORKLOADS["CNN, training"],
    "LSTM, training": _lstm,
    "U-Net, training": lambda: classifying(Unet(), _pictures(4, 64), classes(4, 64, 64)),
    "ViT, training": lambda: classifying(Vit(), _pictures(16, 64), classes(16)),
    "ViT, inference": lambda: inference(Vit(), _pictures(16, 64)),
    "MLP, training": WORKLOADS["large MLP, training"],
    "rollout, training": _rollout,
}


def models_at_hand() -> list[str]:
    """Return the names of MODELS whose library is installed; print the names left out."""
    missing = () if find_spec("transformers") else ("BERT, training", "GPT-2, inference")
    if missing:
        print(f"left out, they need `pip install transformers`: {', '.join(missing)}")
    return [name for name in MODELS if name not in missing]


def made(name: str, device: str = "cpu") -> Workload:
    """Return a fresh workload with a fixed seed, its model and data on this device."""
    torch.manual_seed(0)
    with torch.device(device):
        return {**WORKLOADS, **MODELS}[name]()
