"""A step that lowers its precision itself is judged by what that rounds: honest plans are right,
faults are not.
"""

from __future__ import annotations

import _planted
import pytest
import torch
from _nets import net
from planted import examined, word

pytestmark = pytest.mark.usefixtures("one_thread")

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
HONEST = ["channels_last", "fused_optimizer", "sdpa:math"]
WRONG = (
    "10 % too large", "zero", "another sign", "shifted by 5 % of its scatter",
    "rows dropped", "rows in another order", "scatter of 10 %",
)  # fmt: skip


def step_of(how, name, model, forward, loss, optimizer):
    """Under autocast of its own, or with the whole model in the lower dtype."""
    dtype = LOWER[name]
    if how == "model":
        model.to(dtype)
        model.register_forward_pre_hook(
            lambda _, args: tuple(one.to(dtype) if one.is_floating_point() else one for one in args)
        )

    def step():
        with torch.autocast("cpu", dtype, enabled=how == "autocast"):
            value = loss(forward())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    "name",
    [
        "cnn batchnorm", "residual", "inverted residuals", "mlp gelu norm", "attention", "gru",
        "hourglass", "t5",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("how", "precision"), [("autocast", "bf16"), ("autocast", "fp16"), ("model", "bf16")]
)
def test_an_honest_plan_is_not_accused(name, how, precision):
    model, forward, loss = net(name)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = step_of(how, precision, model, forward, loss, optimizer)
    for record in examined(step, HONEST, model, optimizer).records:
        assert word(record) in ("exact", "rounding") or record.failure, record.accuracy


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("how", ["autocast", "model"])
def test_a_fault_is_seen(name, how, monkeypatch):
    monkeypatch.setattr(_planted, "in_force", lambda: not torch.backends.cuda.flash_sdp_enabled())
    torch.manual_seed(1)
    model = _planted.Net(_planted.OUTPUTS[name])
    x, y = _planted.data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = step_of(
        how,
        "bf16",
        model,
        lambda: model(x),
        lambda out: torch.nn.functional.cross_entropy(out, y),
        optimizer,
    )
    found = examined(step, ["sdpa:math"], model, optimizer)
    assert word(found.records[0]) == "exact"
    assert word(found.records[1]) in ("wrong", "not checked"), found.records[1].accuracy
