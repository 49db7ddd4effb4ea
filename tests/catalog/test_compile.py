"""Test `compile`, which compiles the user's model in place."""

import copy
import platform
import warnings

import pytest
import torch
from torch import nn
from training import graphs_of

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, apply_speedups, code, plan
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.compile import options_of
from speedkit_jupyter.catalog.model_changes.compiled import CompiledCall, CompiledCode
from speedkit_jupyter.machines.hardware import cxx_compiler

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("nothing_compiled")]
X = torch.ones(2, 4)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(x))


class Broken(Own):
    """Model with a graph break, which fullgraph=True forbids."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def applied(model, **values):
    values = {"compile": {"enabled": True, "backend": "aot_eager"}, **values}
    return apply_speedups(model, SpeedConfig(**values))[1]


@pytest.mark.parametrize("make", [Own, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
def test_the_same_object_runs_compiled_code_with_later_hooks_and_keeps_its_keys(make):
    model, x, calls = make(), torch.rand(2, 4), []
    keys, plain = list(model.state_dict()), model(x)
    with applied(model) as context:
        assert graphs_of(lambda: model(x)) >= 1
        assert torch.allclose(model(x), plain, atol=1e-6)
        assert list(model.state_dict()) == keys
        assert not context.notes
        assert graphs_of(lambda: model(x)) == 0
        hook = next(model.children()).register_forward_hook(lambda *_: calls.append(1))
        model(x)
        assert calls
        hook.remove()
    assert "_compiled_call_impl" not in model.__dict__
    assert graphs_of(lambda: model(x)) == 0


def test_a_failing_compiler_warns_once_and_the_model_runs_on():
    model, x = Broken(), torch.rand(2, 4)
    plain = model(x)
    with applied(model, compile={"enabled": True, "fullgraph": True}) as context:
        with pytest.warns(UserWarning, match="the model runs as before"):
            assert torch.equal(model(x), plain)
        assert "torch.compile failed" in context.notes["compile"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(model(x), plain)


def test_the_users_own_error_is_the_plain_one_and_compiling_goes_on():
    model = Own()
    with applied(model) as context:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.rand(2, 5))
        assert not context.notes
        assert graphs_of(lambda: model(torch.rand(2, 4))) >= 1


def test_a_first_call_by_torch_func_leaves_later_ones_to_be_compiled():
    model, x = Own(), torch.rand(2, 4)
    parameters = dict(model.named_parameters())

    def loss(values, one):
        return torch.func.functional_call(model, values, (one,)).sum()

    with applied(model, compile={"enabled": True, "backend": "eager"}):
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        assert found["layer.bias"].shape == (2, 4)
        assert graphs_of(lambda: model(x)) >= 1


def test_each_plan_on_one_model_compiles_code_of_its_own_under_its_precision():
    model, x = Own(), torch.rand(2, 4)
    plain = model(x)
    first = applied(model)
    assert graphs_of(lambda: model(x)) >= 1
    with applied(model, precision="bf16") as second:
        assert not torch.equal(found := model(x), plain)
        assert found.dtype is torch.float32
        with second.autocast():
            assert model(x).dtype is torch.bfloat16
    assert first.active
    assert torch.allclose(model(x), plain, atol=1e-6)
    first.restore()


def test_a_model_that_the_user_compiled_stays_so():
    model = Own()
    model.compile(backend="eager")
    found = model._compiled_call_impl
    with applied(model) as context:
        assert "already" in context.plan["compile"].reason
        assert model._compiled_call_impl is found
    assert model._compiled_call_impl is found


def test_where_lengths_vary_a_search_tries_code_for_all_lengths(hardware):
    facts, values = Facts(lengths_vary=True), {"enabled": True, "dynamic": True}
    assert named("compile").candidates(hardware("cpu"), facts) == (values,)
    assert "dynamic=True" in code(plan(SpeedConfig(compile=values), hardware("cpu"), facts))


@pytest.mark.parametrize(
    ("system", "tools"),
    [("Linux", "g++"), ("Windows", "Visual Studio's C++ build tools"), ("Darwin", "Xcode's tools")],
)
def test_without_a_compiler_it_is_told_what_to_install(here, monkeypatch, tmp_path, system, tools):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: system)
    decision = plan(SpeedConfig(device="cpu", compile=True), facts=Facts(parameters=1))["compile"]
    assert decision.declined
    assert decision.reason == f"no C++ compiler found: install {tools}"


def test_models_share_no_knowledge_of_changing_sizes():
    sizes = []

    def noted(graph, inputs):
        sizes.extend(one for one in inputs if not isinstance(one, torch.Tensor))
        return graph.forward

    for number in (2, 3):
        model, x = nn.Linear(number, 1), torch.ones(number, number)
        CompiledCall(model, CompiledCode({"backend": noted}, [model], {}))(x)
    assert sizes == []


class Force(Own):
    """Model that returns a potential's gradient, which can itself be differentiated."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).tanh().sum(), x, create_graph=True)[0]


@pytest.mark.filterwarnings("ignore:torch.compile failed")
def test_a_model_that_needs_gradients_of_gradients_runs_as_before():
    model = Force()
    expected = model(X)
    with applied(model):
        for _ in range(2):
            found = model(X)
            found.square().sum().backward()
    torch.testing.assert_close(found, expected)


def test_one_output_can_have_two_backward_passes():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    with applied(model):
        for each in (plain, model, model):
            each.zero_grad()
            output = each(X)
            output[:, 0].sum().backward(retain_graph=True)
            output[:, 1].sum().backward()
    found, expected = ([one.grad for one in each.parameters()] for each in (model, plain))
    torch.testing.assert_close(found, expected)


def test_where_compiling_is_required_its_error_is_raised(machine):
    model, values = Broken(), {"enabled": True, "fullgraph": True, "required": True}
    with applied(model, compile=values), pytest.raises(Exception, match="graph_break"):
        model(X)
    machine("one_core")
    values["scope"] = "blocks"
    with pytest.raises(SpeedKitError, match="compile is required: it has no repeated blocks"):
        applied(model, compile=values)
    assert model.__dict__.get("_compiled_call_impl") is None


@pytest.mark.slow
@pytest.mark.skipif(not cxx_compiler(), reason="a C++ compiler")
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.thorough)])
def test_same_random_draws_the_numbers_of_uncompiled_code(precision):
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Dropout1d(0.3))
    x = torch.ones(8, 16)

    def drawn(*compiling):
        values = {name: {"enabled": True, "draws": "same_random"} for name in compiling}
        with apply_speedups(model, SpeedConfig(precision=precision, **values).alone())[1]:
            torch.manual_seed(0)
            return [model(x) == 0, torch.get_rng_state()]

    assert all(map(torch.equal, drawn(), drawn("compile")))


def test_same_random_is_an_option_of_torch_and_excludes_a_mode():
    values = {"enabled": True, "draws": "same_random"}
    assert options_of(values) == {"options": {"fallback_random": True}}
    asked = SpeedConfig(compile={**values, "mode": "max-autotune"})
    assert "default mode" in plan(asked, facts=Facts())["compile"].reason
