"""Judge unusual steps: torch.func, updates within the backward pass, all kinds of results."""

from contextlib import contextmanager

import pytest
import torch
from planted import examined
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.masked import masked_tensor

from speedkit_jupyter.catalog.inference import Inference
from speedkit_jupyter.right.trace import leaves
from speedkit_jupyter.torchglue.storage import plain

FEATURES = 3


def per_sample(model, x):
    def loss(parameters, one):
        return functional_call(model, parameters, (one,)).square().mean()

    return vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x)["0.weight"]


TRANSFORMS = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap, random": lambda model, x: vmap(
        lambda one: model(one + torch.randn(FEATURES)), randomness="different"
    )(x),
    "vmap of grad": per_sample,
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_step_with_transforms_is_measured_and_judged(name, trains):
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x = torch.randn(6, FEATURES)

    def train():
        loss = TRANSFORMS[name](model, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def infer():
        return TRANSFORMS[name](model, x).detach()

    plans = ["fused_optimizer", "bf16"] if trains else ["bf16"]
    for record in examined(train if trains else infer, plans, model, optimizer).records:
        assert record.failure is None, record.failure
        assert record.accuracy.verdict in ("exact", "rounding"), record.accuracy
        assert record.accuracy.output_error is not None


def judged(spoil):
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
    optimizers = {one: torch.optim.Adam([one], 1e-3, foreach=False) for one in model.parameters()}

    def hook(one):
        is_on = not torch.backends.cuda.flash_sdp_enabled()
        if spoil is not None and is_on and one is model[0].weight:
            spoil(one)
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(hook)

    def step():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return examined(step, ["bf16+sdpa:math"], model, list(optimizers.values())).records[1].accuracy


@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [(None, "rounding"), (lambda one: one.grad.zero_(), "wrong"),
     (lambda one: one.grad.neg_(), "wrong")],
    ids=["right", "stays", "turns"],
)  # fmt: skip
def test_a_parameter_that_goes_elsewhere_is_seen_and_a_sign_of_rounding_not_accused(spoil, verdict):
    found = judged(spoil)
    assert found.verdict == verdict, found


def test_a_plan_that_keeps_its_first_result_is_wrong_where_the_step_draws(monkeypatch):
    model, kept = nn.Linear(FEATURES, 2), {}
    whole = Inference.applied

    @contextmanager
    def stale(self, decision, target):
        def forward(x):
            return kept.setdefault(len(x), nn.functional.linear(x, model.weight, model.bias))

        with whole(self, decision, target), monkeypatch.context() as patch:
            patch.setattr(model, "forward", forward)
            kept.clear()
            yield

    monkeypatch.setattr(Inference, "applied", stale)
    found = examined(lambda: model(torch.randn(6, FEATURES)), ["inference"], model.eval())
    assert found.records[1].accuracy.verdict == "wrong"


prototypes = pytest.mark.filterwarnings("ignore")  # torch warns that layouts are prototypes
WITH_VALUES = {
    "strided": lambda x: x,
    "coo": torch.Tensor.to_sparse,
    "coo, uncoalesced": lambda x: torch.sparse_coo_tensor([[0, 0, 1]], x[:3], (4, x.shape[1])),
    "csr": torch.Tensor.to_sparse_csr,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "mkldnn": torch.Tensor.to_mkldnn,
    "jagged": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "nested": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "masked": lambda x: masked_tensor(x, x > 0),
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
}
WITHOUT_VALUES = {"meta": lambda x: x.to("meta"), "fake": lambda x: FakeTensorMode().from_tensor(x)}
ALL = {**WITH_VALUES, **WITHOUT_VALUES}


@pytest.fixture
def x():
    return torch.randn(4, 6)


@prototypes
@pytest.mark.parametrize("name", WITH_VALUES)
def test_values_of_every_layout_are_compared(name, x):
    (values,), (others,) = (leaves(WITH_VALUES[name](one)).values() for one in (x, 2 * x))
    assert float(values.abs().sum()) > 0
    assert bool((others != values).any())


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_what_has_no_values_is_named(name, x):
    one = WITHOUT_VALUES[name](x)
    assert plain(one) is None
    (found,) = leaves(one).values()
    assert isinstance(found, str)


@prototypes
@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ALL)
def test_a_step_that_returns_one_is_measured(name, x):
    model = nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        given = model(x)
        given.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return ALL[name](given.detach())

    for record in examined(step, ["fused_optimizer"], model, optimizer).records:
        assert record.failure is None, record.failure
        assert record.accuracy.verdict in ("exact", "rounding"), record.accuracy


def test_integers_keep_their_sign_and_any_size_is_compared():
    assert [*map(int, leaves([-5, True, 2**63 + 1]).values())] == [-5, 1, 1 - 2**63]
