"""Small nets of every family, each as (model, forward, loss), for tests of the accuracy check."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# A step, the model and optimizers that it trains, and the plans to try.
Made = tuple[Callable[[], Any], nn.Module, Optimizers, Sequence[str]]
Net = tuple[nn.Module, Callable[[], Any], Callable[[Any], torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A step to check; if `is_planted`, it computes something wrong under its plans."""

    name: str
    make: Callable[[], Made]
    is_planted: bool = False

    def __str__(self) -> str:
        return self.name


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for pair in itertools.pairwise(sizes):
        layers += [nn.Linear(*pair), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def normed(inputs: int, outputs: int, kernel: int = 3, **more: int) -> nn.Sequential:
    """Return a convolution, padded by half its kernel, and batch norm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **more)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Block of a ResNet-18: maps (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""

    def __init__(self, inputs: int, outputs: int = 0, stride: int = 1) -> None:
        super().__init__()
        outputs = outputs or inputs
        first = normed(inputs, outputs, stride=stride)
        self.inner = nn.Sequential(first, nn.ReLU(), normed(outputs, outputs))
        is_same = inputs == outputs and stride == 1
        self.short = nn.Identity() if is_same else normed(inputs, outputs, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.inner(x) + self.short(x))


class Recurrent(nn.Module):
    """Classifier of a recurrent layer's last output: (N, T, inputs) to (N, classes)."""

    def __init__(self, kind: Any, inputs=12, width=24, classes=6, layers=2) -> None:
        super().__init__()
        self.layer = kind(inputs, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Block(nn.Module):
    """A block of a transformer, with torch's own attention: (N, T, width) to the same shape."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.wide = nn.Sequential(*wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mix(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.wide(self.second(x))


class Hourglass(nn.Module):
    """Net that halves and doubles H and W by convolutions, with a shortcut: keeps (N, 2, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(2, 12, 4, 2, 1), nn.Conv2d(12, 12, 3, padding=1)
        self.norm, self.up = nn.GroupNorm(3, 12), nn.ConvTranspose2d(12, 2, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(functional.silu(self.norm(self.mid(functional.silu(self.down(x))))))


def inverted(width: int) -> nn.Sequential:
    """Return a MobileNet block: a widening, a depthwise and a narrowing convolution."""
    wide = 4 * width
    return nn.Sequential(
        normed(width, wide, 1), nn.ReLU6(), normed(wide, wide, groups=wide), nn.ReLU6(),
        normed(wide, width, 1),
    )  # fmt: skip


def classified(model: nn.Module, x: torch.Tensor, classes: int) -> Net:
    """Return a net whose loss is cross entropy over the last dimension, against random labels."""
    with torch.no_grad():
        shape = model.eval()(x).shape[:-1]
    labels = torch.randint(classes, shape).flatten()
    loss = lambda out: functional.cross_entropy(out.flatten(0, -2), labels)  # noqa: E731
    return model, lambda: model(x), loss


def fitted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Net:
    return model, lambda: model(x), lambda out: functional.mse_loss(out, y)


def pooled(*layers: nn.Module, width: int, classes: int = 6) -> nn.Sequential:
    """Return these layers, followed by average pooling and a linear classifier."""
    head = nn.Linear(width, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def training(loss: Callable[[], torch.Tensor], optimizer: Any) -> Callable[[], None]:

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def images(count: int = 8, channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.randn(count, channels, size, size)


OWN: dict[str, Callable[[], Net]] = {
    "linear": lambda: fitted(nn.Linear(8, 1), torch.randn(12, 8), torch.randn(12, 1)),
    "mlp relu": lambda: classified(
        mlp(24, 80, 80, 6), torch.randn(48, 24), 6),
    "mlp gelu norm": lambda: classified(
        nn.Sequential(nn.Linear(24, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 6)),
        torch.randn(40, 24), 6),
    "mlp batchnorm": lambda: classified(
        nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Linear(64, 6)),
        torch.randn(40, 24), 6),
    "deep tanh": lambda: classified(
        nn.Sequential(*(part for _ in range(10) for part in (nn.Linear(40, 40), nn.Tanh())),
                      nn.Linear(40, 6)), torch.randn(32, 40), 6),
    "autoencoder": lambda: fitted(
        nn.Sequential(nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 48), nn.Sigmoid()),
        (data := torch.rand(24, 48)), data),
    "cnn": lambda: classified(
        pooled(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3), nn.ReLU(),
               width=24), images(), 6),
    "cnn batchnorm": lambda: classified(
        pooled(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.LeakyReLU(), nn.Conv2d(12, 24, 3, 2),
               nn.BatchNorm2d(24), nn.ReLU(), width=24), images(), 6),
    "residual": lambda: classified(
        pooled(nn.Conv2d(3, 16, 3, padding=1), *(Residual(16) for _ in range(5)), width=16),
        images(), 6),
    "inverted residuals": lambda: classified(
        pooled(nn.Conv2d(3, 8, 3, 2, 1), *(inverted(8) for _ in range(6)), width=8), images(6), 6),
    "hourglass": lambda: fitted(Hourglass(), images(4, 2), images(4, 2)),
    "conv1d": lambda: classified(
        nn.Sequential(nn.Conv1d(2, 8, 5), nn.InstanceNorm1d(8, affine=True), nn.ELU(), nn.PReLU(),
                      nn.Flatten(), nn.Linear(8 * 36, 6)), torch.randn(6, 2, 40), 6),
    "conv3d": lambda: classified(
        nn.Sequential(nn.Conv3d(1, 6, 3), nn.BatchNorm3d(6), nn.ReLU(), nn.AdaptiveMaxPool3d(2),
                      nn.Flatten(), nn.Linear(48, 6)), torch.randn(6, 1, 8, 8, 8), 6),
    "lstm": lambda: classified(Recurrent(nn.LSTM), torch.randn(8, 15, 12), 6),
    "gru": lambda: classified(Recurrent(nn.GRU), torch.randn(8, 15, 12), 6),
    "rnn": lambda: classified(Recurrent(nn.RNN), torch.randn(8, 15, 12), 6),
    "attention": lambda: classified(
        nn.Sequential(nn.Embedding(40, 24), Block(24, 3, True), nn.Linear(24, 40)),
        torch.randint(40, (4, 14)), 40),
    "encoder": lambda: classified(
        nn.Sequential(nn.TransformerEncoder(
            nn.TransformerEncoderLayer(24, 3, 48, 0.0, batch_first=True), 2,
            enable_nested_tensor=False), nn.Linear(24, 6)),
        torch.randn(4, 10, 24), 6),
}  # fmt: skip

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 40}  # fmt: skip
TEXT = {**SMALL, "vocab_size": 80, "max_position_embeddings": 40}
SIGHT = {**SMALL, "image_size": 24, "patch_size": 6}
GPT = {"vocab_size": 80, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 40}
# Each entry has the config's class without "Config", the model's class, options, kind of batch.
FROM_CONFIGS: dict[str, tuple[str, str, dict, str]] = {
    "roberta": ("Roberta", "RobertaForSequenceClassification", TEXT, "labelled"),
    "gpt2": ("GPT2", "GPT2LMHeadModel", GPT, "text"),
    "mistral": ("Mistral", "MistralForCausalLM", {**TEXT, "num_key_value_heads": 1}, "text"),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", {**TEXT, "num_key_value_heads": 2}, "text"),
    "t5": ("T5", "T5ForConditionalGeneration",
           {"vocab_size": 80, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2,
            "num_heads": 2, "decoder_start_token_id": 0}, "text"),
    "mamba": ("Mamba", "MambaForCausalLM",
              {"vocab_size": 80, "hidden_size": 24, "state_size": 4, "num_hidden_layers": 2},
              "text"),
    "vit": ("ViT", "ViTForImageClassification", SIGHT, "sight"),
    "convnext": ("ConvNext", "ConvNextForImageClassification",
                 {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1]}, "large sight"),
    "mobilenet v2": ("MobileNetV2", "MobileNetV2ForImageClassification",
                     {"image_size": 24, "depth_multiplier": 0.25}, "sight"),
    "efficientnet": ("EfficientNet", "EfficientNetForImageClassification",
                     {"image_size": 24, "width_coefficient": 0.25, "depth_coefficient": 0.3,
                      "hidden_dim": 320}, "large sight"),
}  # fmt: skip


def untrained(config: str, kind: str, values: dict[str, Any]) -> Any:
    """Return a model of the library `transformers` with random weights, without a download."""
    import transformers

    transformers.logging.set_verbosity_error()
    return getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**values))


def from_config(name: str) -> Net:
    config, kind, values, given = FROM_CONFIGS[name]
    model = untrained(config, kind, values)
    tokens, labels = torch.randint(3, 77, (4, 12)), torch.tensor([0, 1, 1, 0])
    batch = {
        "text": {"input_ids": tokens, "labels": tokens},
        "labelled": {"input_ids": tokens, "labels": labels},
        "sight": {"pixel_values": images(4, 3, 24), "labels": labels},
        "large sight": {"pixel_values": images(4, 3, 64), "labels": labels},
    }[given]
    return model, lambda: model(**batch), lambda out: out.loss


NAMES = (*OWN, *FROM_CONFIGS)


def net(name: str, seed: int = 0) -> Net:
    """Return a net by name; the same seed gives the same net."""
    torch.manual_seed(seed)
    return OWN[name]() if name in OWN else from_config(name)
