"""Test `inference`, which skips the recording for autograd in models that only predict."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training import surface

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.support.exceptions import SpeedKitError

IMAGES = (2, 3, 8, 8)
ASKED = SpeedConfig(inference=True).alone()


def network() -> nn.Module:
    """Return a convolution and a batch norm in eval mode, with running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model(torch.randn(4, *IMAGES[1:]))
    return model.eval()


def test_calls_record_nothing_and_give_the_same():
    class Telling(nn.Linear):
        def forward(self, x):
            self.records = torch.is_grad_enabled()
            return super().forward(x)

    model, x = Telling(3, 2).eval(), torch.rand(2, 3)
    plain, before = model(x), surface(model)
    with apply_speedups(model, ASKED)[1] as context:
        assert context.plan["inference"].active
        for _ in range(3):  # the first calls still record
            assert torch.equal(model(x), plain)
        assert model.records is False
    assert surface(model) == before
    model(x)
    assert model.records is True


def test_an_optimizer_that_is_made_later_is_refused():
    model, x = network(), torch.rand(IMAGES)
    with apply_speedups(model, ASKED)[1]:
        model(x)
        with pytest.raises(SpeedKitError, match="SGD would train"):
            torch.optim.SGD(model.parameters(), 0.1).step()
    torch.optim.SGD(model.parameters(), 0.1).step()


def test_results_that_enter_a_loss_give_the_gradients_of_the_plain_model():
    model, x = network(), torch.rand(IMAGES)

    def step():
        model.zero_grad()
        model(x)
        loss = model(x).square().sum()
        loss.backward()
        return loss.item(), [one.grad.clone() for one in model.parameters()]

    plain = step()
    with apply_speedups(model, ASKED)[1]:
        torch.testing.assert_close(step(), plain)
    comparison = benchmark(step, "baseline,inference", model=model, budget_s=0.2)
    assert comparison.records[1].failure is None
    assert comparison.verdict(comparison.records[1]) != "wrong"


class Other(nn.Module):
    """Model that returns a dict or an object. If `keeps`, it counts calls and stores a result."""

    def __init__(self, kind="dict", keeps=False):
        super().__init__()
        self.inner, self.kind, self.keeps = nn.Linear(3, 2), kind, keeps
        self.calls = 0

    def forward(self, x):
        result = self.inner(x)
        if self.keeps:
            self.calls, self.kept = self.calls + 1, result
            return result * self.calls
        results = {"a": result.flatten(), "b": [result.argmax(1), result.detach(), x], "n": 3}
        return results if self.kind == "dict" else SimpleNamespace(**results)


def linear():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def frozen():
    return linear().requires_grad_(False)


def moved(model, x):
    result = model(x)
    with torch.no_grad():
        model[2].weight.mul_(2.0)
    return result.sum().backward()


def trained_between(model, x):
    result = model(x)
    model.train()
    result.square().sum().backward()
    return model.training


def of_gradients(model, x):
    slopes = torch.autograd.grad(model(x).square().sum(), [*model.parameters()], create_graph=True)
    return sum(one.square().sum() for one in slopes).backward()


def hooked(model, x):
    seen = []
    model[0].register_forward_hook(lambda *given: seen.append(given[2]))
    model[2].weight.register_hook(seen.append)
    model(x)
    seen[0].square().sum().backward()
    model(x).sum().backward()
    return seen


def lowered(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        result = model(x)
    return result.float().square().sum().backward()


AFTERWARDS = {
    "a loss": (linear, lambda model, x: model(x).square().sum().backward()),
    "NumPy, which a graph refuses": (linear, lambda model, x: model(x).numpy()),
    "NumPy": (frozen, lambda model, x: model(x).numpy().tolist()),
    "a graph of others": (frozen, lambda model, x: model(x).mul_(2.0).requires_grad_()),
    "written to": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Flatten()),
        lambda model, x: model(x).mul_(2.0).square().sum().backward(),
    ),
    "autograd.grad": (linear, lambda model, x: torch.autograd.grad(model(x).sum(), model[0].bias)),
    "second derivatives": (linear, of_gradients),
    "weights that move": (linear, moved),
    "training in between": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(2)), trained_between),
    "hooks": (linear, hooked),
    "autocast": (linear, lowered),
    "a dict": (Other, lambda model, x: (model(x)["a"].sum().backward(), model(x)["b"])),
    "an object": (lambda: Other("object"), lambda model, x: model(x).a.sum().backward()),
    "a state": (
        lambda: Other(keeps=True),
        lambda model, x: (model(x).sum().backward(), model.kept.sum().backward(), model.calls),
    ),
    "vmap": (linear, lambda model, x: torch.func.vmap(model)(x)),
}


def outcome(model: nn.Module, use, x: torch.Tensor):
    """Return the text of torch's error (or ""), and a pair of the result and the gradients."""
    given, said = None, ""
    try:
        given = use(model, x)
    except RuntimeError as error:
        said = str(error)[:40]
    return said, (given, [one.grad for one in model.parameters()])


@pytest.mark.parametrize("kind", AFTERWARDS)
def test_whatever_follows_results_are_as_without_the_plan(kind):
    make, use = AFTERWARDS[kind]
    plain, x = make().eval(), torch.rand(4, 3)
    model = copy.deepcopy(plain)
    with apply_speedups(model, ASKED)[1]:
        for _ in range(2):
            plain(x), model(x)
        (said, found), (says, expected) = outcome(model, use, x), outcome(plain, use, x)
    assert said == says
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_an_input_gets_its_gradient():
    class Inside(nn.Linear):
        def forward(self, given):
            return super().forward(given["x"])

    model, x = Inside(3, 1).eval(), torch.rand(2, 3, requires_grad=True)
    with apply_speedups(model, ASKED)[1] as context:
        model({"x": x}).sum().backward()
        assert "asks for its gradient" in context.notes["inference"]
    torch.testing.assert_close(x.grad, model.weight.detach().expand(2, 3))


def test_a_model_that_trains_after_all_does_so():
    model, x = network(), torch.rand(IMAGES)
    with apply_speedups(model, ASKED)[1] as context:
        model.train()
        model(x).sum().backward()
        assert model[0].weight.grad is not None
        assert "training mode" in context.notes["inference"]


def test_rules_leave_it_and_a_search_tries_it_for_what_predicts_and_records(hardware):
    from speedkit_jupyter.search.candidates import candidates

    assert not plan(ASKED, facts=Facts.read(frozen().eval()))["inference"].active
    for one, tried in ((Facts(training=False), True), (Facts(), False)):
        names = [candidate.name for candidate in candidates(hardware("cpu"), [one])]
        assert ("inference" in names) == tried


@pytest.mark.parametrize("how", [
    lambda model, x: torch.jit.trace(model, x),
    lambda model, x: torch.export.export(model, (x,)).module(),
], ids=["traced", "exported"])  # fmt: skip
def test_a_trace_and_an_export_are_of_the_model_as_it_is(how):
    model, x = network(), torch.rand(IMAGES)
    plain = model(x)
    with apply_speedups(model, ASKED)[1]:
        other = how(model, x)
    torch.testing.assert_close(other(x), plain)


@pytest.mark.gpu
def test_it_predicts_on_a_gpu():
    model, x = network().cuda(), torch.rand(IMAGES).cuda()
    plain = model(x)
    with apply_speedups(model, ASKED)[1]:
        assert torch.equal(model(x), plain)


def test_its_code_does_the_same():
    model, x = network(), torch.rand(IMAGES)
    text = code(plan(ASKED, facts=Facts.read(model)), model=model)
    assert "with torch.no_grad():" in text
    space = {"model": model}
    exec(text, space)
    assert torch.equal(space["predict"](x), model(x))


def test_trainer_is_no_place_for_it():
    with pytest.raises(SpeedKitError, match="--as torch"):
        code(plan(ASKED, facts=Facts(training=False)), "transformers")
