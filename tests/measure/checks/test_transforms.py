"""Steps with `torch.func`'s transforms, and tensors that only stand for others, are measured.

What is computed within a transform has no values to compare; what the step returns and its
gradients do.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from planted import examined
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

pytestmark = pytest.mark.usefixtures("one_thread")

LEFT = []
FEATURES = 3


def per_sample(model, x):
    def loss(parameters, one):
        return functional_call(model, parameters, (one,)).square().mean()

    return vmap(grad(loss), (None, 0))(dict(model.named_parameters()), x)["0.weight"]


def inner_step(model, x):
    def loss(parameters, x):
        return functional_call(model, parameters, (x,)).square().mean()

    parameters = dict(model.named_parameters())
    made = grad(loss)(parameters, x)
    return loss({name: one - 0.1 * made[name] for name, one in parameters.items()}, x)


def dual(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def with_noise(model, x):
    return vmap(lambda one: model(one + torch.randn(FEATURES)), randomness="different")(x)


def second(model, x):
    return torch.autograd.functional.jacobian(
        lambda a: model(a).sum(0), x, create_graph=True, vectorize=True
    )


def backward_through(model, x):
    given, back = vjp(model, x)
    return back(torch.ones_like(given))[0]


def kept(model, x):
    """What leaves a transform in a list is dead."""
    found = []

    def one(a):
        found.append(model(a))
        return found[-1]

    LEFT.append(found)
    return vmap(one)(x)


TRANSFORMS = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap, nested": lambda model, x: vmap(vmap(model))(x.unsqueeze(0)),
    "vmap, random": with_noise,
    "vmap of grad": per_sample,
    "grad": inner_step,
    "vjp": backward_through,
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda model, x: vmap(jacrev(model))(x),
    "jacfwd": lambda model, x: vmap(jacfwd(model))(x),
    "hessian": lambda model, x: vmap(hessian(lambda a: model(a).sum()))(x),
    "functionalize": lambda model, x: torch.func.functionalize(model)(x),
    "linearize": lambda model, x: torch.func.linearize(model, x)[0],
    "dual numbers": dual,
    "vectorized jacobian": second,
    "kept": kept,
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_step_with_transforms_is_measured_and_judged(name, trains):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
    )
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
