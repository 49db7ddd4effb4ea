"""What the tests share of the entries that put other weights in the place of a model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.extras.by_request.quantization import OLDEST, SINCE, lacks

MISSING = lacks(Hardware.detect(), "torchao", SINCE)
real = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MISSING_TOO = lacks(Hardware.detect(), "torchao", OLDEST)
real_of_any_version = pytest.mark.skipif(bool(MISSING_TOO), reason=MISSING_TOO)
SMALL = Facts(device="cuda:0", parameters=100, linears=4, dtypes=("bfloat16",))
INPUTS = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    """Two layers whose sizes suit all of the entries, and one that suits few."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32), nn.Linear(32, 3)).eval()


def with_torchao(machine: Hardware, version: str = "0.18.0") -> Hardware:
    return machine.model_copy(update={"libraries": {"torchao": version}})


def on(name: str) -> Decision:
    return Decision(name, True, "as asked", active=True)


def needs_capability(*wanted: int) -> None:
    """Skips the test on a GPU of an older compute capability."""
    if torch.cuda.get_device_capability() < wanted:
        pytest.skip(f"needs compute capability {'.'.join(map(str, wanted))}")


def bits(model: nn.Module) -> list[tuple[Any, ...]]:
    """Which objects the model is made of, and their values."""
    modules = [(id(m), m.training, sorted(m.__dict__)) for m in model.modules()]
    return [*modules, *((id(p), p.requires_grad, p.tolist()) for p in model.parameters())]


@torch.no_grad()
def with_plan(
    model: nn.Module, inputs: torch.Tensor, config: SpeedConfig, said: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model gives without the plan and with it; afterwards it is as it was."""
    before, plain = bits(model), model(inputs)
    for error in (None, ValueError, KeyboardInterrupt):
        try:
            with apply_speedups(model, config.alone())[1] as context:
                assert said in str(context.changes())
                found = model(inputs)
                if error:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert torch.equal(model(inputs), plain)
        assert bits(model) == before
    return plain, found


def is_near_on_a_gpu(name: str, *capability: int) -> None:
    """Asserts that an entry changes a model's results a little, and that they come back."""
    needs_capability(*capability)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).cuda().bfloat16()
    inputs = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    plain, found = with_plan(model, inputs, SpeedConfig(**{name: True}), "2 of 2 linear layers")
    assert not torch.equal(found, plain)
    assert (found - plain).norm() < 0.2 * plain.norm()
