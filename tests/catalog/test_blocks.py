"""The blocks that a model repeats, found by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from speedkit_jupyter.catalog.facts.model import repeated_blocks


class Block(nn.Module):
    def __init__(self, width=4, inner=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Decoding(nn.Module):
    """Two attentions of one class inside, which are none of its model's blocks."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)


class Tower(nn.Module):
    def __init__(self, layers=3, width=4):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.projection = nn.Linear(width, width)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Block(4, 32) for _ in range(4)])
        self.router = nn.Linear(4, 4)


class Convolving(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3), nn.Conv2d(outputs, outputs, 3)


def stages():
    """A residual network: stages that are sequences, of units that widen."""
    widths = [(4, 8, 3), (8, 16, 2), (16, 32, 3)]
    return nn.Sequential(
        *[
            nn.Sequential(Convolving(a, b), *[Convolving(b, b) for _ in range(number - 1)])
            for a, b, number in widths
        ]
    )


def lazily():
    return nn.Sequential(*[nn.Sequential(nn.LazyLinear(4), nn.ReLU()) for _ in range(3)])


def names(model):
    ids = {id(block) for block in repeated_blocks(model)}
    return [name for name, module in model.named_modules() if id(module) in ids]


def numbered(begin, number):
    return [f"{begin}{index}" for index in range(number)]


SHAPES = {
    "a list": (lambda: Tower(5), numbered("layers.", 5)),
    "torch's encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 3),
        numbered("layers.", 3),
    ),
    "encoder and decoder": (
        lambda: nn.Transformer(4, 2, 2, 2, 8),
        numbered("encoder.layers.", 2) + numbered("decoder.layers.", 2),
    ),
    "a sequence of sequences": (
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)]),
        numbered("", 4),
    ),
    "stages": (stages, numbered("0.", 3) + numbered("1.", 2) + numbered("2.", 3)),
    "two attentions in each": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList([Decoding(), Decoding()])}),
        numbered("layers.", 2),
    ),
    "experts": (lambda: nn.ModuleList([Mixture() for _ in range(3)]), numbered("", 3)),
    "lazy": (lazily, numbered("", 3)),
    "layers alone": (lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]), []),
    "unlike": (lambda: nn.ModuleList([Block(4), Block(5), Block(6)]), []),
    "one block, twice": (lambda: nn.Sequential(*[Block()] * 2), []),
    "without parameters": (
        lambda: nn.Sequential(*[nn.Sequential(nn.ReLU(), nn.Dropout()) for _ in range(3)]),
        [],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_found_in_models_of_all_shapes(shape):
    make, expected = SHAPES[shape]
    model = make()
    assert names(model) == expected
    assert names(copy.deepcopy(model)) == expected


def test_blocks_stand_inside_no_other_block():
    for make, _ in SHAPES.values():
        blocks = repeated_blocks(make())
        inside = {id(part) for block in blocks for part in [*block.modules()][1:]}
        assert not inside & {id(block) for block in blocks}
