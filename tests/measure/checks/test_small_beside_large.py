"""What is wrong in something small is seen beside something large, and named; noise is not accused.

`tests/benchmarks/planted.py` tries all kinds and all nets; these are some of each.
"""

from __future__ import annotations

import pytest
import torch
from _amplifying import NETS
from _beside import BESIDE
from planted import examined, training_step, word

# The fault, and what the reason names.
CHOSEN = {
    "beside, inference, bf16: smallest column doubled": "output scales",
    "beside, training, bf16: a penalty 10 % too large": "output penalty",
    "beside, inference, sdpa:math: last token of one sample": "output logits",
    "gradients, bf16: a small bias zero": "gradient of small.bias",
    "buffers, bf16: a histogram, one bin": "buffer counts",
    "buffers, sdpa:math: usage of a codebook": "buffer usage",
    "buffers, bf16: a small moving average doubled": "buffer small_average",
    "buffers, bf16: a table that never changes": "buffer table",
    "updates of Adam, bf16: a single number stays": "parameter temperature",
    "updates of SGD, sdpa:math: weight decay of a small layer": "parameter small.weight",
}
KINDS = {f"{one.group}: {one.name}": one for one in BESIDE}
# Whose signal dies; whose noise is all there is; who divide by what elements have in common.
HONEST = ("efficientnet, balanced", "efficientnet, plain, small", "same inputs")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.thorough] * one.startswith("efficientnet"))
        for one in HONEST
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_net_that_amplifies_rounding_is_not_accused(name, kind):
    torch.manual_seed(0)
    model, forward, loss = NETS[name]()
    optimizer = kind(model.train().parameters(), 1e-3)
    step = training_step(model, forward, loss, optimizer)
    for record in examined(step, ["bf16", "channels_last"], model, optimizer).records:
        assert word(record) not in ("wrong", "not reached"), record.accuracy
