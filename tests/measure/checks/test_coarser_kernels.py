"""Float32 kernels that round coarsely are not accused, and what is wrong beside them is seen.

Batch norm in channels_last rounds a thousand times as coarsely on a CPU, all of a channel alike;
behind it a few activations fall the other way, and move gradients by a percent.
"""

from __future__ import annotations

import pytest
import torch
from _coarse import digits, unit
from planted import examined, word
from torch import nn
from torch.nn import functional

from speedkit_jupyter.measure.checks.reference import kernels_of_layouts, promotion, rounding

pytestmark = pytest.mark.usefixtures("one_thread")
POOLINGS = {
    "max pooling": lambda width: nn.MaxPool2d(2),
    "mean pooling": lambda width: nn.AvgPool2d(2),
    "strides": lambda width: nn.Conv2d(width, width, 2, stride=2),
}


def net(pooling: str, width: int, depth: int) -> nn.Sequential:
    units = [part for _ in range(depth) for part in unit(2 * width, 2 * width)]
    return nn.Sequential(
        *unit(1, width), *unit(width, width), POOLINGS[pooling](width), *unit(width, 2 * width),
        *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


def behind(model: nn.Module) -> nn.Module:
    """Whose first parameters are behind a batch norm of what is given."""
    return nn.Sequential(nn.BatchNorm2d(1), model)


NETS = {
    "narrow": lambda: net("max pooling", 8, 0),
    **{kind: (lambda kind=kind: net(kind, 32, 0)) for kind in POOLINGS},
    "deep": lambda: net("max pooling", 16, 3),
    "wide": lambda: net("mean pooling", 48, 2),
    "batch norm at first": lambda: behind(net("max pooling", 24, 0)),
}


@pytest.mark.sampled(35)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", NETS)
def test_sound_kernels_are_not_accused(kind, seed):
    x, y = digits()
    torch.manual_seed(seed)
    model = NETS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for record in examined(step, ["channels_last", "gemm:onednn"], model, optimizer).records:
        assert word(record) in ("exact", "rounding"), (record.name, record.accuracy)


def test_a_control_takes_over_what_the_kernel_of_the_other_layout_gives():
    torch.manual_seed(0)
    model, x = nn.Sequential(*unit(3, 16)), torch.rand(32, 3, 16, 16) + 4
    last = model(x.to(memory_format=torch.channels_last))
    with torch.no_grad(), promotion.in_float64([model]):
        exact = model(x)
        with rounding.rounded("fp32", compute=kernels_of_layouts.in_the_other_layout):
            control = model(x)
    assert torch.equal(control.float(), last.contiguous())
    assert not torch.equal(control, exact)


@pytest.mark.parametrize(
    "spoil", [lambda out: out * 1.02, lambda out: torch.cat([out[:, :1] * 1.02, out[:, 1:]], 1)]
)
def test_a_kernel_that_does_more_than_round_is_none_to_go_by(spoil):
    x = torch.randn(4, 16, 8, 8, dtype=torch.float64)

    def relu(value: torch.Tensor) -> torch.Tensor:
        return functional.relu(value if value.dtype is torch.float64 else spoil(value))

    relu._schema = torch.ops.aten.relu.default._schema
    assert torch.equal(kernels_of_layouts.in_the_other_layout(relu, (x,), {}), functional.relu(x))


def test_running_statistics_are_updated_once():
    torch.manual_seed(0)
    x, found, expected = torch.randn(8, 4, 5, 5), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    expected(x)
    with promotion.in_float64([found]):
        with rounding.rounded("fp32", compute=kernels_of_layouts.in_the_other_layout):
            found(x)
        torch.testing.assert_close(found.running_mean.float(), expected.running_mean)
        torch.testing.assert_close(found.running_var.float(), expected.running_var)
