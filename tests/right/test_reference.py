"""Check that the float64 reference and the control run handle unusual steps and undo them."""

import warnings
from typing import Any

import pytest
import torch
from planted import examined, word
from torch import nn
from torch.nn import functional
from training import is_lowered, training_step

from speedkit_jupyter.right.reference import in_float64, rounded


class Off(torch.autograd.Function):
    """Identity whose gradient is off by a factor, as under a wrong plan."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Net(nn.Module):
    """Net whose first layer's gradients are off by a factor while autocast is on."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second, self.factor = nn.Linear(16, 32), nn.Linear(32, 8), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.first(x))
        factor = self.factor if torch.is_autocast_enabled("cpu") else 1.0
        return self.second(Off.apply(hidden, factor))


# Parameters that the step trains in addition to the model's.
FREE = {
    "in the optimizer": lambda: nn.Parameter(torch.tensor(1.0)),
    "in bf16": lambda: nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16)),
    "complex": lambda: nn.Parameter(torch.tensor([1.0 + 0.5j] * 8)),
}


def judged(kind: str, factor: float) -> str:
    """Return the verdict on bf16; check that nothing warns and that everything is restored."""
    torch.manual_seed(0)
    net, free = Net(factor), FREE[kind]()
    held = [*net.parameters(), free]
    optimizer = torch.optim.SGD(held, 1e-3)
    x, target = torch.randn(16, 16), torch.randint(0, 8, (16,))
    before = [one.detach().clone() for one in held]

    def step() -> float:
        y = net(x) * free
        loss = functional.cross_entropy(y.abs() if y.is_complex() else y, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = word(examined(step, ["bf16"], net, optimizer).records[1])
    assert all(one.dtype == old.dtype for one, old in zip(held, before, strict=True))
    assert all(map(torch.equal, held, before))
    assert all(one.grad is None for one in held)
    return found


@pytest.mark.parametrize("kind", FREE)
def test_right_ones_are_right_and_a_gradient_off_by_a_third_is_wrong(made_time, kind):
    assert judged(kind, 1.0) == "rounding"
    assert judged(kind, 1.35) in ("wrong", "not checked")


def test_tensors_are_taken_to_float64_themselves_and_put_back_to_their_own_memory():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer, x = torch.optim.AdamW(model.parameters(), 1e-2), torch.randn(8, 3)

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step()
    held = [*model.parameters(), *model.buffers()]
    held += [value for state in optimizer.state.values() for value in state.values()]
    before = [(t.data_ptr(), t.dtype, t.clone()) for t in held]
    with in_float64([model, optimizer]):
        assert step().dtype is torch.float64
        assert model[0].weight.dtype is model[0].weight.grad.dtype is torch.float64
        assert model[0].weight.is_leaf
    for tensor, (address, dtype, values) in zip(held, before, strict=True):
        assert (tensor.data_ptr(), tensor.dtype) == (address, dtype)
        assert tensor.dim() == 0 or torch.equal(tensor, values)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_data_in_float32_meets_every_layer(layer):
    model, x = layer(6, 6), torch.randn(4, 2, 6)
    with in_float64([model]), torch.no_grad():
        out = model(x)[0]
        kept = torch.zeros(6)
        kept.lerp_(out[0, 0], 0.5)
    assert out.dtype is torch.float64
    assert kept.dtype is torch.float32
    assert torch.allclose(kept.double(), out[0, 0] / 2)


@torch.library.custom_op(
    "speedkit_tests::attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def attention(x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    """Copy the input; the operator's tag says that it may draw random numbers."""
    return x.clone()


def masked(x):
    return functional.scaled_dot_product_attention(x, x, x, torch.ones(8, 8).tril().bool())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("plan", ["fused_optimizer", "bf16"])
@pytest.mark.parametrize("kernel", [masked, attention])
@pytest.mark.parametrize("wrong", [False, True], ids=["kept", "left out"])
def test_dropout_that_a_variant_leaves_out_beside_an_attention_is_wrong(kernel, plan, wrong):
    model, x = nn.Linear(8, 8), torch.randn(16, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss():
        found = kernel(x[:, None])[:, 0]
        in_force = optimizer.param_groups[0].get("fused") or is_lowered(model)
        found = found if wrong and in_force else functional.dropout(found, 0.1)
        return model(found).square().mean()

    found = examined(training_step(optimizer, loss), [plan], model, optimizer).records[1]
    assert word(found) in (("wrong",) if wrong else ("exact", "rounding")), found.accuracy


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("by_rows", [False, True])
def test_a_control_rounds_what_leads_to_a_sparse_gradient(by_rows):
    tokens, adjacent = torch.randint(0, 50, (8, 4)), (torch.rand(8, 8) < 0.4).double()
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    onto = torch.randn(16, 3, dtype=torch.float64)

    def gradient():
        weight.grad = None
        found = functional.embedding(tokens, weight, sparse=True).sum(1)
        found = torch.sparse.mm(adjacent.to_sparse_csr(), found) if by_rows else found
        (found @ onto).square().sum().backward()
        return weight.grad.to_dense().clone()

    exact = gradient()
    with rounded("bf16"):
        found = gradient()
    assert 1e-4 < float((found - exact).norm() / exact.norm()) < 0.1
