"""Wrong plans are found, and right ones pass; tests/benchmarks/planted.py runs all cases."""

from queue import SimpleQueue

import _planted
import pytest
import torch
from _honest import HONEST
from _planted import PLANTED
from planted import examined, judged, word
from torch import nn
from training import training_step

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.long]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", PLANTED, ids=str)
def test_a_planted_fault_does_not_win(case):
    rows = list(judged(case))
    assert rows
    assert all(row["ok"] for row in rows), rows


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", HONEST, ids=str)
def test_an_honest_net_is_not_called_wrong(case):
    pytest.importorskip("transformers")  # some of the nets come from it
    rows = list(judged(case))
    assert rows
    assert all(row["ok"] for row in rows), rows


def test_what_computes_something_else_each_time_is_not_checked():
    model = nn.Linear(8, 8)
    calls: SimpleQueue[int] = SimpleQueue()  # measurements don't restore queues

    def step():
        calls.put(1)
        with torch.no_grad():
            return model(torch.full((4, 8), 1.0 + calls.qsize() % 7))

    assert examined(step, ["bf16"], model).records[1].accuracy.verdict == "not checked"


class Reordered(nn.Linear):
    """Linear layer whose order of summation depends on the number of threads, like a kernel's."""

    def __init__(self, *sizes, only_float32=False):
        super().__init__(*sizes)
        self.only_float32 = only_float32

    def forward(self, x):
        if self.only_float32 and x.dtype is torch.float64:
            raise TypeError("float32 only")
        if torch.get_num_threads() == 2:
            return super().forward(x)
        return nn.functional.linear(x.flip(1), self.weight.flip(1), self.bias)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("only_float32", [False, True], ids=["float64", "float32 only"])
@pytest.mark.parametrize("scales", [None, False, True], ids=["plain", "disabled", "enabled"])
def test_gradients_that_are_rounding_noise_do_not_decide(scales, only_float32):
    first = Reordered(16, 32, only_float32=only_float32)
    model = nn.Sequential(first, nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    with torch.no_grad():
        model[1].weight.mul_(1e-2)  # BatchNorm enlarges the noise 100 times
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=bool(scales))
    x, y = torch.randn(32, 16), torch.randn(32, 4)

    def step():
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step() if scales is None else scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    found = examined(step, ["threads:2", "bf16"], model, optimizer).records
    assert [word(one) for one in found] == ["exact", found[1].accuracy.verdict, "rounding"]
    assert found[1].accuracy.verdict in ("exact", "rounding"), found[1].accuracy
    assert (found[0].accuracy.baseline_gradient_error == 0) is only_float32


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fill", [float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("fault", ["", "masked other", "not masked", "scaled"])
def test_what_is_masked_alike_is_alike_and_the_rest_counts(fill, fault):
    class Masked(nn.Linear):
        def forward(self, x):
            found, there = super().forward(x), torch.get_num_threads() == 2
            width = {"masked other": 3, "not masked": 5}.get(fault, 4) if there else 4
            found = found * (1.1 if fault == "scaled" and there else 1)
            return found.masked_fill(torch.arange(8) >= width, fill)

    model, x = Masked(8, 8), torch.randn(16, 8)

    def step():
        return model(x).detach()

    found = examined(step, ["threads:2", "bf16"], model).records
    assert word(found[1]) == ("wrong" if fault else "exact"), found[1].accuracy
    assert word(found[2]) == "rounding", found[2].accuracy


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["10 % too large", "rows dropped", "scatter of 10 %"])
@pytest.mark.parametrize("lowered", [False, True], ids=["autocast", "parameters in bf16"])
def test_a_fault_is_seen_in_a_step_that_lowers_its_precision_itself(monkeypatch, name, lowered):
    monkeypatch.setattr(_planted, "in_force", lambda: not torch.backends.cuda.flash_sdp_enabled())
    torch.manual_seed(1)
    model, (x, y) = _planted.Net(_planted.OUTPUTS[name]), _planted.data()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if lowered:
        model, x = model.bfloat16(), x.bfloat16()

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=not lowered):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = examined(step, ["sdpa:math"], model, optimizer).records
    assert word(found[0]) == "exact"
    assert word(found[1]) in ("wrong", "not checked"), found[1].accuracy


@pytest.mark.parametrize(("size", "verdict"), [(1e-17, "rounding"), (1e-6, "wrong")])
def test_of_gradients_that_vanish_only_what_is_no_noise_counts(size, verdict):
    model, x = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU()), torch.rand(32, 16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model[0].bias.register_hook(lambda one: one + (size if torch.get_num_threads() == 2 else 0.0))
    step = training_step(optimizer, lambda: 1e-20 * model(x).square().mean())
    assert word(examined(step, ["threads:2"], model, optimizer).records[1]) == verdict
