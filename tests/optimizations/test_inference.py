"""inference: calls without autograd's records, for models that only predict."""

from __future__ import annotations

import copy
import itertools
import threading
from collections import namedtuple

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.codegen.training_loop import Words, loop
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.support.exceptions import SpeedKitError

IMAGES = (2, 3, 8, 8)
ASKED = SpeedConfig(inference=True).alone()


def network() -> nn.Module:
    """A convolution and a batch norm in eval mode, with statistics of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model(torch.randn(4, *IMAGES[1:]))
    return model.eval()


def attributes(model: nn.Module) -> list:
    return [(part.training, sorted(part.__dict__)) for part in model.modules()]


def test_calls_record_nothing_and_give_the_same():
    class Telling(nn.Linear):
        def forward(self, x):
            self.records = torch.is_grad_enabled()
            return super().forward(x)

    model, x = Telling(3, 2).eval(), torch.rand(2, 3)
    plain, before = model(x), attributes(model)
    with apply_speedups(model, ASKED)[1] as context:
        assert context.plan["inference"].active
        assert torch.equal(model(x), plain)
        assert model.records is False
    assert attributes(model) == before
    model(x)
    assert model.records is True


@pytest.mark.parametrize("change", [
    lambda m: m[0].weight.data.mul_(10),
    lambda m: m[1].running_var.data.copy_(torch.ones(4)),
    lambda m: m[0].weight.detach().numpy().__imul__(3),
    lambda m: [p.data.copy_(2 * p) for p in m.parameters()],
    lambda m: m[0].weight.untyped_storage().copy_(m[0].weight.clone().mul(2).untyped_storage()),
    lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    lambda m: setattr(m[1], "eps", 0.5),
], ids=["data", "buffer", "numpy", "averaged weights", "storage", "loaded", "eps"])  # fmt: skip
def test_weights_that_are_written_in_any_way_count(change):
    model, x = network(), torch.rand(IMAGES)
    with apply_speedups(model, ASKED)[1]:
        before = model(x).detach()
        with torch.no_grad():
            change(model)
        assert torch.equal(model(x), copy.deepcopy(model)(x))
        assert not torch.equal(model(x), before)


Two = namedtuple("Two", "one more")


class Giving(nn.Module):
    """Gives two tensors with gradients and one without, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        return {"two": Two(y, [self.other(y).tanh(), None]), "classes": y.argmax(1)}


@pytest.mark.parametrize("losses", [
    lambda out: out["two"].one.sum(),
    lambda out: out["two"].more[0].pow(2).sum(),
    lambda out: out["two"].one.pow(2).sum() + out["two"].more[0].exp().sum(),
], ids=["the first", "the second", "both"])  # fmt: skip
def test_results_that_enter_a_loss_have_the_gradients_of_a_plain_model(losses):
    torch.manual_seed(0)
    model, head, x = Giving().eval(), nn.Linear(1, 1), torch.rand(5, 3)

    def gradients():
        model.zero_grad()
        head(losses(model(x)).reshape(1, 1)).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with apply_speedups(model, ASKED)[1] as context:
        for _ in range(3):
            assert all(map(torch.equal, gradients(), expected))
        assert "backward pass" in context.notes["inference"]


def test_gradients_by_autograd_grad_and_of_gradients_are_those_of_a_plain_model():
    model, x = Giving().eval(), torch.rand(5, 3)

    def gradients():
        loss = model(x)["two"].more[0].pow(3).sum()
        first = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        return [*first, *torch.autograd.grad(first[0].pow(2).sum(), [*model.parameters()])]

    expected = gradients()
    with apply_speedups(model, ASKED)[1]:
        for one, other in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_backward_pass_has_the_autocast_and_the_random_numbers_of_its_call():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) * nn.functional.dropout(torch.ones(4), 0.5)

    model, x, found = Noisy(8, 4).eval(), torch.rand(2, 8), []
    for on in (False, True):
        torch.manual_seed(3)
        with apply_speedups(model, ASKED if on else SpeedConfig().alone())[1]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = model(x)
            following = torch.rand(1)
            result.float().sum().backward()
            found.append((result.detach(), model.weight.grad, following, torch.rand(1)))
            model.weight.grad = None
    assert all(map(torch.equal, *found))


def test_weights_that_were_written_before_the_backward_pass_are_refused():
    model, x = network(), torch.rand(IMAGES)
    with apply_speedups(model, ASKED)[1]:
        loss = model(x).sum()
        with torch.no_grad():
            model[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_input_gets_its_gradient():
    class Inside(nn.Linear):
        def forward(self, given):
            return super().forward(given["x"])

    model, x = Inside(3, 1).eval(), torch.rand(2, 3, requires_grad=True)
    with apply_speedups(model, ASKED)[1] as context:
        model({"x": x}).sum().backward()
        assert "asks for its gradient" in context.notes["inference"]
    torch.testing.assert_close(x.grad, model.weight.detach().expand(2, 3))


@pytest.mark.parametrize("write", [
    lambda y: y.sub_(1), lambda y: y.sigmoid_(), lambda y: y[0].zero_(),
    lambda y: y.view(-1).add_(1),
], ids=["sub_", "sigmoid_", "zero_ of a part", "add_ of a view"])  # fmt: skip
def test_results_can_be_written_to(write):
    model, x = nn.Linear(3, 2).eval(), torch.rand(4, 3)
    expected = model(x).detach()
    write(expected)
    with apply_speedups(model, ASKED)[1]:
        found = model(x)
        write(found)
        found.sum().backward()
    torch.testing.assert_close(found.detach(), expected)


def test_a_model_that_returns_objects_of_its_own_is_recorded_as_usual():
    class Holding:
        def __init__(self, tensor) -> None:
            self.tensor = tensor

    class Wrapping(nn.Linear):
        def forward(self, x):
            return Holding(super().forward(x))

    model, x = Wrapping(3, 2).eval(), torch.rand(4, 3)
    with apply_speedups(model, ASKED)[1] as context:
        model(x).tensor.sum().backward()
        assert "objects of its own" in context.notes["inference"]
    assert model.weight.grad is not None


def test_a_model_that_trains_after_all_does_so():
    model, x = network(), torch.rand(IMAGES)
    with apply_speedups(model, ASKED)[1] as context:
        model.train()
        model(x).sum().backward()
        assert model[0].weight.grad is not None
        assert "training mode" in context.notes["inference"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts(training=False, optimizers=(OptimizerFacts(),)), "the step trains"),
        (Facts(), "model.eval()"),
        (Facts(training=False, compiled="in place"), "compiled already"),
        (Facts(training=False, lazy=True), "lazy"),
    ],
)
def test_it_is_declined_with_the_reason(facts, words):
    decision = plan(ASKED, facts=facts)["inference"]
    assert (decision.value, decision.active, decision.declined) == (False, False, True)
    assert words in decision.reason
    assert not plan(SpeedConfig(), facts=facts)["inference"].active


def test_auto_leaves_it_and_a_search_tries_it_where_nothing_trains(hardware):
    from speedkit_jupyter.tuning.candidates import candidates

    assert not plan(SpeedConfig(), facts=Facts(training=False))["inference"].active
    for one, tried in ((Facts(training=False), True), (Facts(), False)):
        names = [candidate.name for candidate in candidates(hardware("cpu"), one)]
        assert ("inference" in names) == tried


def test_a_step_that_trains_is_right_in_a_benchmark():
    model, x = network(), torch.rand(IMAGES)

    def step():
        loss = model(x).sum()
        loss.backward()
        return loss.item()

    comparison = benchmark(step, "baseline,inference", model=model, budget_s=0.2)
    record = comparison.records[1]
    assert record.failure is None
    assert comparison.verdict(record) != "wrong"


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
        model(x).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_plans_on_a_model_and_its_parts_are_taken_back_in_any_order(order):
    model, x = nn.Sequential(network(), nn.Conv2d(4, 4, 1)).eval(), torch.rand(IMAGES)
    before, plain = attributes(model), model(x)
    other = nn.Sequential(model[1]).eval()
    plans = [apply_speedups(one, ASKED)[1] for one in (model, model[0], other)]
    for number in order:
        assert torch.equal(model(x), plain)
        plans[number].restore()
    assert attributes(model) == before


def test_a_measured_plan_acts_in_its_own_thread_alone():
    model, x, records = network(), torch.rand(IMAGES), []
    model[2].register_forward_hook(lambda *_: records.append(torch.is_grad_enabled()))
    with prepare(model, ASKED).in_force():
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
        model(x)
    assert records == [True, False]


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric"])
def test_the_code_of_each_form_does_the_same(form):
    model, x = network(), torch.rand(IMAGES)
    text = code(plan(ASKED, facts=Facts.read(model)), form, model=model)
    assert "with torch.inference_mode():" in text
    if form == "torch":
        space = {"model": model}
        exec(text, space)
        assert torch.equal(space["predict"](x), model(x))


def test_the_loop_has_nothing_to_edit():
    _, context = apply_speedups(network(), ASKED)
    assert loop(context, Words("net")) == ""
    context.restore()


def test_trainer_is_no_place_for_it():
    with pytest.raises(SpeedKitError, match="--as torch"):
        code(plan(ASKED, facts=Facts(training=False)), "transformers")


def test_a_backward_pass_may_come_after_the_plan_and_after_the_model():
    model, x, parameters = network(), torch.rand(IMAGES), []
    with apply_speedups(model, ASKED)[1]:
        loss, parameters = model(x).pow(2).sum(), [*model.parameters()]
    del model
    loss.backward()
    assert all(p.grad is not None for p in parameters)
