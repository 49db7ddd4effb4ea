"""compile: torch.compile in place."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

from speedkit_jupyter import (
    Facts,
    SpeedConfig,
    SpeedKitError,
    apply_speedups,
    plan,
)
from speedkit_jupyter.catalog.properties.compiled import CompiledCall, CompiledCode

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("made_time", "nothing_compiled")]
X = torch.ones(2, 4)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.layer(x))


class Broken(Own):
    """Breaks its graph, which fullgraph=True forbids."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def compiled_frames(call) -> int:
    from torch._dynamo.utils import counters

    before = counters["frames"]["ok"]
    call()
    return counters["frames"]["ok"] - before


def applied(model, **values):
    return apply_speedups(model, SpeedConfig(**{"compile": True, **values}))[1]


@pytest.mark.parametrize("make", [Own, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
@pytest.mark.slow
def test_the_same_object_runs_compiled_code_and_keeps_its_keys(make):
    model, x = make(), torch.rand(2, 4)
    keys, plain = list(model.state_dict()), model(x)
    with applied(model) as context:
        assert compiled_frames(lambda: model(x)) >= 1
        assert torch.allclose(model(x), plain, atol=1e-6)
        assert list(model.state_dict()) == keys
        assert not context.notes
        assert compiled_frames(lambda: model(x)) == 0
    assert "_compiled_call_impl" not in model.__dict__
    assert compiled_frames(lambda: model(x)) == 0


def test_a_hook_that_is_registered_after_compiling_fires():
    model, x, calls = Own(), torch.rand(2, 4), []
    with applied(model):
        model(x)
        model.layer.register_forward_hook(lambda *_: calls.append(1))
        model(x)
    assert calls


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
        assert compiled_frames(lambda: model(torch.rand(2, 4))) >= 1


def test_a_first_call_by_torch_func_leaves_later_ones_to_be_compiled():
    model, x = Own(), torch.rand(2, 4)
    parameters = dict(model.named_parameters())

    def loss(values, one):
        return torch.func.functional_call(model, values, (one,)).sum()

    with applied(model, compile={"enabled": True, "backend": "eager"}):
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        assert found["layer.bias"].shape == (2, 4)
        assert compiled_frames(lambda: model(x)) >= 1


def test_each_plan_on_one_model_compiles_code_of_its_own():
    model, x = Own(), torch.rand(2, 4)
    first = applied(model)
    assert compiled_frames(lambda: model(x)) >= 1
    with applied(model, precision="bf16") as second, second.autocast():
        assert model(x).dtype is torch.bfloat16
    assert first.active
    assert model(x).dtype is torch.float32
    first.restore()


def test_a_model_that_the_user_compiled_stays_so():
    model = Own()
    model.compile(backend="eager")
    found = model._compiled_call_impl
    with applied(model) as context:
        assert "already" in context.plan["compile"].reason
        assert model._compiled_call_impl is found
    assert model._compiled_call_impl is found


def test_without_a_cpp_compiler_it_is_declined_with_what_to_install(hardware):
    machine = hardware("cpu").model_copy(update={"cxx": None})
    decision = plan(SpeedConfig(compile=True), machine, Facts(parameters=1))["compile"]
    assert decision.declined
    assert "g++" in decision.reason


ATTENTION = """
import sys, torch
from torch import nn
from speedkit_jupyter import SpeedConfig, apply_speedups
class Attention(nn.Module):
    def forward(self, q):
        return nn.functional.scaled_dot_product_attention(q, q, q)
model, q = Attention(), torch.rand(1, 2, 8, 16)
apply_speedups(model, SpeedConfig(compile=True, sdpa=sys.argv[1]))
model(q)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    model(q)
print("flash" in " ".join(event.key for event in profile.key_averages()))
"""


def test_models_share_no_knowledge_of_changing_sizes():
    sizes = []

    def noted(graph, inputs):
        sizes.extend(one for one in inputs if not isinstance(one, torch.Tensor))
        return graph.forward

    for number in (2, 3):
        model, x = nn.Linear(number, 1), torch.ones(number, number)
        call = CompiledCall(model, CompiledCode({"backend": noted}, [model], {}))
        call(x)
    assert sizes == []


class Force(Own):
    """Returns the gradient of a potential, through which gradients flow."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).tanh().sum(), x, create_graph=True)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.compile failed")
def test_a_model_that_needs_gradients_of_gradients_runs_as_before():
    model = Force()
    expected = model(X)
    with apply_speedups(model, SpeedConfig(compile=True).alone())[1]:
        for _ in range(2):
            found = model(X)
            found.square().sum().backward()
    torch.testing.assert_close(found, expected)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_kernel_choice_is_not_served_from_another_choices_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # spares each process some probing
    shown = [
        subprocess.run(
            [sys.executable, "-c", ATTENTION, backend], capture_output=True, text=True, check=True
        ).stdout.strip()
        for backend in ("auto", "math")
    ]
    assert shown == ["True", "False"]


def test_a_compiled_model_is_collected_with_its_context():
    model = Own()
    context = applied(model)
    model(torch.rand(2, 4))
    gone = weakref.ref(model)
    del model, context
    gc.collect()
    assert gone() is None


# Other backends than Inductor, by request only.


def test_on_a_cpu_a_mode_alone_compiles_nothing_and_says_so(hardware):
    wished = SpeedConfig.from_dict({"compile": {"mode": "max-autotune"}})
    decisions = [plan(one, hardware("cpu"), Facts())["compile"] for one in (wished, SpeedConfig())]
    assert [decision.declined for decision in decisions] == [True, False]
    assert "`--compile true`" in decisions[0].reason


def test_one_output_can_have_two_backward_passes():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain, config = (
        copy.deepcopy(model),
        SpeedConfig(compile={"enabled": True, "backend": "aot_eager"}),
    )
    with apply_speedups(model, config.alone())[1]:
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
