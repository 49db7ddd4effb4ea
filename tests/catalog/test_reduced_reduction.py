"""reduced_reduction: fp16 sums in fp16 inside cuBLAS."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.reduced_reduction import SWITCH
from speedkit_jupyter.machines import flags

ENTRY = named("reduced_reduction")
CUDA = Facts(device="cuda:0", devices=("cuda:0",), parameters=1, dtypes=("float16",))


def test_the_switch_is_set_as_its_code_does_and_what_the_user_had_comes_back(changing_flags):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    before, target = flags.snapshot(), Target(nn.Linear(2, 2))
    asked = SpeedConfig(reduced_reduction="fp16_accumulation").alone()
    found = plan(asked, Hardware.from_json("t4"), CUDA)
    with ENTRY.applied(found["reduced_reduction"], target):
        assert flags.snapshot()[SWITCH] is True
    assert flags.snapshot() == before
    assert target.kept == []
    lines = [line for line in code(found).splitlines() if line.startswith("torch.backends.cuda")]
    exec("\n".join(lines), {"torch": torch})
    assert flags.snapshot()[SWITCH] is True


@pytest.mark.gpu
def test_it_is_put_back_and_products_stay_close():
    model = nn.Linear(512, 512).cuda().half()
    x = torch.randn(64, 512, device="cuda", dtype=torch.float16)
    plain = model(x)
    config = SpeedConfig(reduced_reduction="fp16_accumulation").alone()
    with apply_speedups(model, config)[1]:
        torch.testing.assert_close(model(x), plain, rtol=1e-2, atol=1e-2)
    assert torch.equal(model(x), plain)
