"""Nets that amplify rounding, or whose signal dies: untrained, deep, narrow, few samples.

Each is (model, forward, loss); what rounding does to them must not be called wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from _nets import Net, classified, fitted, images, inverted, pooled
from torch import nn
from torch.nn import functional

SEEDS = range(5)


class Excited(nn.Module):
    """Squeeze and excitation: channels scaled by what is in all of them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(functional.silu(self.down(x.mean((2, 3), keepdim=True)))))


class Added(nn.Module):
    """The input beside what these layers make of it."""

    def __init__(self, *layers: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.inner, self.factor = nn.Sequential(*layers), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * self.inner(x)


class Joined(nn.Module):
    """The input and what these layers make of it, side by side: a dense block's part."""

    def __init__(self, channels: int, more: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(),
                                   nn.Conv2d(channels, more, 3, padding=1, bias=False))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.inner(x)], 1)


class Shuffled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.channel_shuffle(x, 2)


class Gated(nn.Module):
    """(N, T, C): tokens mixed by a linear layer, times a gate."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(channels), nn.Linear(channels, 2 * channels)
        self.mix, self.narrow = nn.Linear(tokens, tokens), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, v = functional.gelu(self.wide(self.norm(x))).chunk(2, -1)
        return x + self.narrow(u * self.mix(v.transpose(1, 2)).transpose(1, 2))


def normal(inputs: int, outputs: int, size: int = 3, act: type[nn.Module] = nn.SiLU,
           **more: Any) -> nn.Sequential:  # fmt: skip
    """Convolution, batch normalization, activation."""
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **more)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), act())


def excited(width: int) -> Added:
    """The block of an EfficientNet."""
    wide = 4 * width
    return Added(normal(width, wide, 1), normal(wide, wide, 3, groups=wide), Excited(wide),
                 nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))  # fmt: skip


def small(model: nn.Module, deviation: float = 0.02) -> nn.Module:
    """Weights as small as the library `transformers` draws them: signals die in deep nets."""
    for one in model.modules():
        if isinstance(one, (nn.Conv2d, nn.Linear)):
            nn.init.normal_(one.weight, std=deviation)
            if one.bias is not None:
                nn.init.zeros_(one.bias)
    return model


def deep(count: int, make: Callable[[], nn.Module], *before: nn.Module, width: int) -> nn.Module:
    return pooled(*before, *(make() for _ in range(count)), width=width)


def mlp(depth: int, width: int, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module],
        samples: int) -> Net:  # fmt: skip
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), norm(width), act())]
    net = nn.Sequential(*layers, nn.Linear(width, 6))
    return classified(net, torch.randn(samples, width), 6)


def images_to_classes(model: nn.Module, count: int = 4, size: int = 16) -> Net:
    return classified(model, images(count, 3, size), 6)


def balanced(width: int) -> Net:
    """As many labels of each kind: the classifier's gradient cancels to noise."""
    model = small(deep(6, lambda: excited(width), normal(3, width), width=width))
    x, labels = images(6), torch.arange(6)
    return model, lambda: model(x), lambda out: functional.cross_entropy(out, labels)


def constant() -> Net:
    """Inputs all alike: batch normalization divides noise by noise."""
    model = pooled(normal(3, 8), normal(8, 8), width=8)
    return classified(model, torch.ones(4, 3, 12, 12), 6)


def offset(scale: float) -> Net:
    """Inputs far from zero, of little scatter: what is left after the mean is taken is rounded."""
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 6))
    return classified(model, 5 + scale * torch.randn(24, 20), 6)


def adversaries() -> Net:
    normed = nn.utils.parametrizations.spectral_norm
    layers = [Added(normed(nn.Linear(24, 24)), nn.LeakyReLU(0.2)) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(24, 1))
    return fitted(model, torch.randn(8, 24), torch.randn(8, 1))


NETS: dict[str, Callable[[], Net]] = {
    "efficientnet": lambda: images_to_classes(deep(6, lambda: excited(8), normal(3, 8), width=8)),
    "efficientnet, small weights": lambda: images_to_classes(
        small(deep(6, lambda: excited(8), normal(3, 8), width=8))),
    "efficientnet, balanced": lambda: balanced(8),
    "efficientnet, plain, small": lambda: images_to_classes(
        small(deep(8, lambda: nn.Sequential(*excited(8).inner), normal(3, 8), width=8))),
    "excited without norm": lambda: images_to_classes(
        small(deep(12, lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), Excited(8)),
                   nn.Conv2d(3, 8, 3), width=8))),
    "mobilenet, 2 images": lambda: images_to_classes(
        deep(8, lambda: inverted(8), normal(3, 8, act=nn.ReLU6), width=8), 2, 8),
    "mobilenet, hard swish": lambda: images_to_classes(
        deep(6, lambda: nn.Sequential(normal(8, 8, groups=8, act=nn.Hardswish),
                                      normal(8, 8, 1, act=nn.Hardswish)), normal(3, 8), width=8)),
    "depthwise alone": lambda: images_to_classes(
        deep(10, lambda: normal(8, 8, groups=8, act=nn.ReLU), normal(3, 8), width=8)),
    "shufflenet": lambda: images_to_classes(
        deep(6, lambda: nn.Sequential(normal(8, 8, 1, groups=2), Shuffled(),
                                      normal(8, 8, 3, groups=8)), normal(3, 8), width=8)),
    "densenet": lambda: images_to_classes(
        pooled(nn.Conv2d(3, 8, 3), *(Joined(8 + 4 * i, 4) for i in range(8)), width=40)),
    "resnet, before": lambda: images_to_classes(
        deep(8, lambda: Added(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
                              nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
             nn.Conv2d(3, 8, 3), width=8)),
    "vgg with norm": lambda: images_to_classes(
        pooled(normal(3, 16, act=nn.ReLU), *(normal(16, 16, act=nn.ReLU) for _ in range(6)),
               nn.MaxPool2d(2), normal(16, 16, act=nn.ReLU), width=16)),
    "vgg without norm, small": lambda: images_to_classes(
        small(deep(8, lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
                   nn.Conv2d(3, 8, 3), width=8))),
    "instance norm": lambda: images_to_classes(
        deep(8, lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8),
                                      nn.LeakyReLU(0.2)), nn.Conv2d(3, 8, 3), width=8), 2, 8),
    "instance norm of 2 by 2": lambda: images_to_classes(
        deep(5, lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1),
                                      nn.InstanceNorm2d(8, affine=True), nn.ReLU()),
             nn.Conv2d(3, 8, 3, 4, 1), width=8), 4, 8),
    "group norm, weights standard": lambda: images_to_classes(
        deep(6, lambda: Added(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)),
             nn.Conv2d(3, 8, 3), width=8)),
    "convnext, layer scale 1e-6": lambda: images_to_classes(
        deep(6, lambda: Added(nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.GroupNorm(1, 8),
                              nn.Conv2d(8, 32, 1), nn.GELU(), nn.Conv2d(32, 8, 1), factor=1e-6),
             nn.Conv2d(3, 8, 4, 4), width=8)),
    "unet": lambda: fitted(
        nn.Sequential(normal(3, 8), Added(nn.MaxPool2d(2), normal(8, 8), normal(8, 8),
                                          nn.Upsample(scale_factor=2)), nn.Conv2d(8, 1, 1)),
        images(2, 3, 16), torch.rand(2, 1, 16, 16)),
    "mlp, batchnorm, 2 samples": lambda: mlp(4, 24, nn.BatchNorm1d, nn.ReLU, 2),
    "mlp, batchnorm, 3 samples, deep": lambda: mlp(10, 24, nn.BatchNorm1d, nn.SiLU, 3),
    "mlp, batchnorm, deep": lambda: mlp(20, 24, nn.BatchNorm1d, nn.ReLU, 16),
    "mlp, layer norm, deep": lambda: mlp(16, 12, nn.LayerNorm, nn.GELU, 8),
    "mlp, without norm, deep": lambda: mlp(16, 24, nn.Identity, nn.Tanh, 8),
    "mlp, selu": lambda: mlp(12, 24, nn.Identity, nn.SELU, 8),
    "mixer": lambda: classified(
        nn.Sequential(*(Gated(9, 12) for _ in range(6)), nn.LayerNorm(12), nn.Linear(12, 6)),
        torch.randn(4, 9, 12), 6),
    "transformer, norm after, deep": lambda: classified(
        nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
                        for _ in range(6)), nn.Linear(16, 6)), torch.randn(3, 7, 16), 6),
    "same inputs": constant,
    "inputs far from zero": lambda: offset(0.1),
    "spectral norm": adversaries,
    "separable 1d": lambda: classified(
        nn.Sequential(*(nn.Sequential(nn.Conv1d(6, 6, 5, padding=2, groups=6), nn.Conv1d(6, 6, 1),
                                      nn.BatchNorm1d(6), nn.Mish()) for _ in range(6)),
                      nn.Flatten(), nn.Linear(6 * 20, 6)), torch.randn(3, 6, 20), 6),
}  # fmt: skip


def nets() -> Iterator[tuple[str, Callable[[], Net]]]:
    """Each net from each of the seeds."""
    for name in NETS:
        for seed in SEEDS:
            yield f"{name}, {seed}", partial(_net, name, seed)


def _net(name: str, seed: int) -> Net:
    torch.manual_seed(seed)
    return NETS[name]()
