"""inference: inference mode and folded batch norms, for models that only predict."""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.codegen.training_loop import Words, loop
from speedkit_jupyter.optimizations.facts.conv_norms import pairs
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.support.exceptions import SpeedKitError

IMAGES = (2, 3, 8, 8)


class Unit(nn.Module):
    def __init__(self, channels: int = 3, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Residual(nn.Module):
    """One batch norm may be folded; of the other convolution something else takes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Unit(), Unit(4)

    def forward(self, x):
        x = self.one(x)
        y = self.two.conv(x)
        return y + self.two.norm(y)


class Untraceable(nn.Module):
    """What torch.fx can't follow, as in Hugging Face models; its parts can be."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit(), Unit(4, bias=True)])

    def forward(self, x):
        if x.shape[1] != 3:
            raise ValueError("channels")
        for unit in self.units:
            x = unit(x)
        return x


class Shared(nn.Module):
    """One convolution before two batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])

    def forward(self, x):
        return self.norms[1](self.conv(self.norms[0](self.conv(x))))


class Beside(nn.Module):
    """Can't be traced, and calls the convolution of a part that can be."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Unit()

    def forward(self, x):
        return self.unit(x) if x.sum() > 0 else self.unit.conv(x)


def line() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 3, padding_mode="reflect", padding=1), nn.BatchNorm1d(4))


def volume() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4, affine=False), nn.ReLU())


MODELS = {
    "unit": (Unit, IMAGES, 1),
    "residual": (Residual, IMAGES, 1),
    "untraceable": (Untraceable, IMAGES, 2),
    "shared": (Shared, IMAGES, 0),
    "beside": (Beside, IMAGES, 1),
    "1-D": (line, (2, 3, 8), 1),
    "3-D": (volume, (2, 3, 4, 4, 4), 1),
    "no statistics": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        IMAGES,
        0,
    ),
    "other order": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)), IMAGES, 0),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 1), nn.BatchNorm2d(4)),
        IMAGES,
        0,
    ),
}


def settled(make) -> nn.Module:
    """In eval mode, with statistics of its own."""
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_floating_point() and tensor.dim() == 1:
                tensor.data.uniform_(0.5, 2.0) if name != "bias" else tensor.data.uniform_(-1, 1)
    return model.eval()


def asked(on: bool = True, **more) -> SpeedConfig:
    return SpeedConfig(inference={"enabled": on, **more}).alone()


def attributes(model: nn.Module) -> list:
    return [
        (type(part), part.training, sorted(part.__dict__), list(map(id, part.parameters(False))))
        for part in model.modules()
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_folded_model_gives_the_same_up_to_rounding_and_is_put_back(name):
    make, shape, number = MODELS[name]
    model, x = settled(make), torch.rand(shape)
    plain, before = model(x), attributes(model)
    state = {key: (id(v), v.clone()) for key, v in model.state_dict(keep_vars=True).items()}
    assert len(pairs(model)) == number
    with apply_speedups(model, asked())[1] as context:
        assert context.plan["inference"].active
        for _ in range(2):
            assert torch.allclose(model(x), plain, atol=1e-5)
            assert torch.allclose(model(-x), before_of(model, -x), atol=1e-5)
        now = model.state_dict(keep_vars=True)
        assert all(id(now[key]) == own for key, (own, _) in state.items())
        assert all(torch.equal(now[key], value) for key, (_, value) in state.items())
    assert attributes(model) == before
    assert torch.equal(model(x), plain)
    model(x).sum().backward()


def before_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(model)(x)


def test_batch_norms_are_folded_and_not_called():
    model, x = settled(Unit), torch.rand(IMAGES)
    for fold, number in ((True, 0), (False, 1)):
        for around in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with (
                apply_speedups(model, asked(fold=fold))[1],
                around(),
                torch.profiler.profile() as trace,
            ):
                model(x)
            names = [event.key for event in trace.key_averages()]
            assert ("aten::batch_norm" in names) == bool(number)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(settled(lambda: Unit(3)).state_dict()),
        lambda model: nn.init.ones_(model.conv.weight),
        lambda model: model.norm.running_var.mul_(3),
        lambda model: setattr(model.norm, "weight", nn.Parameter(torch.rand(4))),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.double().float(),
        lambda model: model.norm.train(),
        lambda model: model.norm.register_forward_hook(lambda *_: _[2] * 2),
        lambda model: setattr(model, "norm", nn.Identity()),
    ],
)
def test_what_is_changed_meanwhile_counts(change):
    model, x = settled(Unit), torch.rand(IMAGES)
    with apply_speedups(model, asked())[1]:
        model(x)
        with torch.no_grad():
            change(model)
        twin = copy.deepcopy(model)
        assert torch.allclose(model(x), twin(x), atol=1e-5)


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
    decision = plan(asked(), facts=facts)["inference"]
    assert (decision.value, decision.active, decision.declined) == (False, False, True)
    assert words in decision.reason
    rules = plan(SpeedConfig(), facts=facts)["inference"]
    assert not rules.active
    assert not rules.declined


def test_auto_leaves_it_and_a_search_tries_it_where_nothing_trains(hardware):
    from speedkit_jupyter.tuning.candidates import candidates

    facts = Facts(training=False, batch_norms=2)
    assert not plan(SpeedConfig(), facts=facts)["inference"].active
    for one, tried in ((facts, True), (Facts(), False)):
        names = [candidate.name for candidate in candidates(hardware("cpu"), one)]
        assert ("inference" in names) == tried


@pytest.mark.parametrize("part", ["", "norm"])
def test_a_model_in_training_mode_stays_in_it_and_is_told_what_to_type(part):
    model = settled(Unit)
    model.get_submodule(part).train()
    modes = [module.training for module in model.modules()]
    with apply_speedups(model, asked())[1] as context:
        assert context.plan["inference"].declined
        assert [module.training for module in model.modules()] == modes


def test_a_model_that_trains_after_all_does_so_as_ever():
    model, x = settled(Unit), torch.rand(IMAGES)
    with apply_speedups(model, asked())[1] as context:
        model.train()
        model(x).sum().backward()
        assert model.conv.weight.grad is not None
        assert "training mode" in context.notes["inference"]
        model.eval()
        assert not model(x).is_inference()


def test_a_backward_pass_is_refused_in_one_line():
    model, x = settled(Unit), torch.rand(IMAGES)
    with apply_speedups(model, asked())[1]:
        loss = model(x).sum()
        assert loss.requires_grad
        with pytest.raises(SpeedKitError, match="the step trains") as caught:
            loss.backward()
    assert "\n" not in str(caught.value)


def test_a_gradient_of_an_input_is_had_as_ever():
    model, x = settled(Unit), torch.rand(IMAGES, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with apply_speedups(model, asked())[1] as context:
        (got,) = torch.autograd.grad(model(x).sum(), x)
        assert "asks for its gradient" in context.notes["inference"]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("how", ["no_grad", "frozen"])
def test_what_a_frozen_model_gives_can_be_trained_upon(how):
    model, x, head = settled(Unit), torch.rand(IMAGES), nn.Conv2d(4, 1, 1)
    if how == "frozen":
        model.requires_grad_(False)
    with apply_speedups(model, asked())[1]:
        with torch.no_grad() if how == "no_grad" else torch.enable_grad():
            features = model(x)
        assert not features.requires_grad
        features.add_(1)
        head(features).sum().backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize("before", [False, True])
def test_what_a_hook_keeps_can_be_trained_upon(before):
    model, x, kept = settled(Unit), torch.rand(IMAGES), []
    last = [part for part in model.modules() if isinstance(part, nn.Conv2d)][-1]
    if before:
        last.register_forward_pre_hook(lambda part, given: kept.append(given[0]))
    else:
        last.register_forward_hook(lambda part, given, result: kept.append(result))
    with apply_speedups(model, asked())[1], torch.no_grad():
        model(x)
    head = nn.Conv2d(kept[-1].shape[1], 1, 1)
    head(kept[-1]).sum().backward()
    assert head.weight.grad is not None


Two = namedtuple("Two", "one more")


class Holding:
    def __init__(self, tensor) -> None:
        self.tensor = tensor


class Giving(Unit):
    """Gives, and keeps, tensors in all kinds of things."""

    def forward(self, x):
        y = super().forward(x)
        self.latest, self.all = y, [y]
        self.register_buffer("last", y, persistent=False)
        return {"two": Two(y, [y, (x, None)]), "held": Holding(y), "int": y.argmax(), "x": x}


def test_results_of_all_kinds_are_tensors_like_any_others():
    model, x = settled(Giving), torch.rand(IMAGES)
    with apply_speedups(model, asked())[1]:
        given = model(x)
    y = given["two"].one
    assert type(given["two"]) is Two
    assert given["x"] is x
    assert given["two"].more[0] is y is given["held"].tensor
    kept = [model.latest, model.all[0], model.last, y, given["int"]]
    assert not any(tensor.is_inference() for tensor in kept)
    model.latest.requires_grad_(True).mul(2).sum().backward()


def test_a_step_that_trains_fails_alone_in_a_benchmark():
    model, x = settled(Unit), torch.rand(IMAGES)

    def step():
        loss = model(x).sum()
        loss.backward()
        return loss.item()

    comparison = benchmark(step, "baseline,inference", model=model, budget_s=0.2)
    record = comparison.records[1]
    assert "the step trains" in record.failure
    assert not any(part._compiled_call_impl for part in model.modules())


def test_weights_that_were_made_in_inference_mode_are_not_folded():
    with torch.inference_mode():
        model = settled(Unit)
    x = torch.rand(IMAGES)
    with torch.no_grad():
        plain = model(x)
        with apply_speedups(model, asked())[1]:
            assert torch.equal(model(x), plain)
            assert torch.equal(model(x), plain)


def test_a_trace_is_of_the_model_as_it_is():
    model, x = settled(Unit), torch.rand(IMAGES)
    plain = model(x)
    with apply_speedups(model, asked())[1]:
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), plain)
    traced(x).sum().backward()


@pytest.mark.gpu
def test_it_predicts_on_a_gpu():
    model, x = settled(Untraceable).cuda(), torch.rand(IMAGES).cuda()
    plain = model(x)
    with apply_speedups(model, asked())[1]:
        assert torch.allclose(model(x), plain, atol=1e-4)
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.allclose(model(x).float(), plain, atol=1e-1)
    assert torch.equal(model(x), plain)


def test_copies_and_files_carry_nothing_of_it():
    model = settled(Untraceable)
    before = list(model.state_dict()), [sorted(part.__dict__) for part in model.modules()]
    with apply_speedups(model, asked())[1]:
        model(torch.rand(IMAGES))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for one in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            now = list(one.state_dict()), [sorted(part.__dict__) for part in one.modules()]
            assert now == before


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_plans_on_a_model_and_its_parts_are_taken_back_in_any_order(order):
    model, x = settled(Untraceable), torch.rand(IMAGES)
    before, plain = attributes(model), model(x)
    other = nn.Sequential(model.units[1])
    plans = [apply_speedups(one, asked())[1] for one in (model, model.units[0], other)]
    for number in order:
        assert torch.allclose(model(x), plain, atol=1e-5)
        plans[number].restore()
    assert attributes(model) == before
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("ending", [ValueError, KeyboardInterrupt])
def test_after_an_error_inside_nothing_is_left(ending):
    class Failing(Unit):
        def forward(self, x):
            self.conv(x)
            raise ending

    model = settled(Failing)
    before = attributes(model)
    with pytest.raises(ending), apply_speedups(model, asked())[1]:
        model(torch.rand(IMAGES))
    assert attributes(model) == before
    assert not torch.is_inference_mode_enabled()


def test_a_measured_plan_acts_in_its_own_thread_alone():
    model, x, trained = settled(Unit), torch.rand(IMAGES), []

    def train() -> None:
        model(x).sum().backward()
        trained.append(model.conv.weight.grad is not None)

    with prepare(model, asked()).in_force():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert trained == [True]


@pytest.mark.slow
def test_compiled_and_frozen_weights_are_not_used_once_they_have_changed():
    model, x = settled(Unit), torch.rand(IMAGES)
    config = SpeedConfig(inference={"enabled": True, "freezing": True}, compile=True).alone()
    with apply_speedups(model, config)[1] as context:
        assert context.plan["inference"].details["freezing"]
        plain = copy.deepcopy(model)(x)
        assert torch.allclose(model(x), plain, atol=1e-4)
        with torch.no_grad():
            model.conv.weight.mul_(2)
        assert torch.allclose(model(x), copy.deepcopy(model)(x), atol=1e-4)
        assert "frozen" in context.notes["inference"]


class Telling(nn.Module):
    """Says whether it was called in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 3), []

    def forward(self, x):
        self.seen.append(torch.is_inference_mode_enabled())
        return self.layer(x)


@pytest.mark.parametrize("records", [True, False], ids=["recording", "under no_grad"])
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "eager"])
def test_only_compiled_code_that_records_nothing_does_without_inference_mode(is_compiled, records):
    model, x = Telling().eval(), torch.rand(2, 3)
    compiling = {"enabled": is_compiled, "backend": "eager"}
    config = SpeedConfig(inference=True, compile=compiling).alone()
    with torch.set_grad_enabled(records):
        expected = model(x)
        with apply_speedups(model, config)[1]:
            found = model(x)
    assert model.seen[1] is (records or not is_compiled)
    assert torch.equal(found, expected)
    assert not found.is_inference()
    assert found.requires_grad is records


def test_freezing_without_compile_is_said_to_do_nothing():
    decision = plan(asked(freezing=True), facts=Facts(training=False))["inference"]
    assert decision.active
    assert decision.details["freezing"] is False
    assert "without compile" in decision.reason


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric"])
@pytest.mark.parametrize("make", [Unit, Untraceable])
def test_the_code_of_each_form_does_the_same(form, make):
    model, x = settled(make), torch.rand(IMAGES)
    expected = model(x)
    text = code(plan(asked(), facts=Facts.read(model)), form, model=model)
    if form != "torch":
        assert "with torch.inference_mode():" in text
        assert "model = fold(model.eval())" in text
        return
    space = {"model": copy.deepcopy(model)}
    exec(text, space)
    assert torch.allclose(space["predict"](x), expected, atol=1e-5)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in space["model"].modules())


def test_it_is_said_how_many_batch_norms_are_folded_and_the_loop_predicts():
    model = settled(Residual)
    _, context = apply_speedups(model, asked())
    assert "up to 2 batch norms" in context.plan["inference"].reason
    assert context.notes["inference"].startswith("1 of 2 batch norms")
    assert loop(context, Words("net")) == ""
    context.restore()


def test_trainer_is_no_place_for_it():
    with pytest.raises(SpeedKitError, match="--as torch"):
        code(plan(asked(), facts=Facts(training=False)), "transformers")


class CallsTwice(nn.Module):
    """Two convolutions before two norms, in a way that torch.fx can't follow."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Unit()
        with torch.no_grad():
            for tensor in (self.unit.norm.running_mean, self.unit.norm.weight):
                tensor.normal_()

    def forward(self, x, z):
        if x.shape[1] != 3:
            raise ValueError("channels")
        one, other = self.unit.conv(x), self.unit.conv(z)
        return self.unit.norm(one) + self.unit.norm(other)


def test_a_pair_that_is_called_twice_before_its_norms_gives_the_same():
    model, x, z = CallsTwice().eval(), torch.randn(IMAGES), torch.randn(IMAGES)
    expected = model(x, z)
    with apply_speedups(model, SpeedConfig(inference=True).alone())[1]:
        torch.testing.assert_close(model(x, z), expected, rtol=1e-4, atol=1e-4)


def test_another_eps_counts():
    model, x = Unit().eval(), torch.randn(IMAGES)
    with apply_speedups(model, SpeedConfig(inference=True).alone())[1]:
        model(x)
        model.norm.eps = 0.5
        found = model(x)
    torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("write", [
    lambda y: y.sub_(1), lambda y: y.sigmoid_(), lambda y: y[0].zero_(),
    lambda y: y.view(-1).add_(1),
], ids=["sub_", "sigmoid_", "zero_ of a part", "add_ of a view"])  # fmt: skip
def test_results_can_be_written_to(write):
    model, x = nn.Linear(3, 2).eval(), torch.rand(4, 3)
    expected = model(x).detach()
    write(expected)
    with apply_speedups(model, SpeedConfig(inference=True).alone())[1]:
        found = model(x)
        write(found)
    torch.testing.assert_close(found.detach(), expected)


def test_an_input_within_a_dictionary_gets_its_gradient():
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, given):
            return self.layer(given["x"])

    model, x = Inside().eval().requires_grad_(False), torch.rand(2, 3, requires_grad=True)
    with apply_speedups(model, SpeedConfig(inference=True).alone())[1]:
        model({"x": x}).sum().backward()
    torch.testing.assert_close(x.grad, model.layer.weight.detach().expand(2, 3))
