"""compile with `backend`: whatever is registered with torch.compile, by request only."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from speedkit_jupyter import ConfigError, Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.subject.variants import variant
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.support.exceptions import StepError

pytestmark = pytest.mark.compile
X = torch.ones(2, 4)
FORMS = ["torch", "accelerate", "fabric", "transformers"]


@pytest.fixture(autouse=True)
def _fresh():
    """No compiled code of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def register():
    """Registers backends for one test."""
    from torch._dynamo.backends import registry

    names = []

    def add(name, function):
        registry.register_backend(function, name=name)
        names.append(name)

    yield add
    for name in names:
        registry._COMPILER_FNS.pop(name)
        registry._BACKENDS.pop(name)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def wish(backend, **more) -> SpeedConfig:
    return SpeedConfig(compile={"enabled": True, "backend": backend, **more}).alone()


def decided(backend, hardware, facts=None, **more):
    return plan(wish(backend, **more), hardware, facts or Facts(parameters=1))["compile"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.slow
def test_torchs_own_backends_compute_the_same_and_are_taken_back(backend):
    model = network()
    plain, before = model(X), dict(flags.snapshot())
    with apply_speedups(model, wish(backend))[1] as context:
        assert torch.allclose(model(X), plain, atol=1e-6)
        model(X).sum().backward()
        assert not context.notes
        assert context.plan.to_config().compile.backend == backend
    assert "_compiled_call_impl" not in model.__dict__
    assert torch.equal(model(X), plain)
    after = dict(flags.snapshot())
    assert {name: after[name] for name in before} == before


def test_one_that_the_user_registered_is_used_and_no_compiler_is_needed(register, hardware):
    graphs = []

    def mine(graph, inputs):
        graphs.append(graph)
        return graph.forward

    register("MyOwn", mine)
    assert wish("myown").compile.backend == "MyOwn"  # a command's words are in small letters
    model = network()
    with apply_speedups(model, wish("MyOwn"))[1]:
        model(X)
    assert graphs
    bare = hardware("cpu").model_copy(update={"cxx": None})
    assert decided("MyOwn", bare).active
    assert decided("inductor", bare).declined


@pytest.mark.parametrize(
    ("word", "near"),
    [("inducter", "inductor"), ("aot-eager", "aot_eager"), ("cudagraph", "cudagraphs")],
)  # fmt: skip
def test_an_unknown_name_is_one_clear_line_with_the_nearest(word, near):
    with pytest.raises(ConfigError) as caught:
        wish(word)
    (problem,) = caught.value.problems
    assert problem.startswith("SpeedConfig: compile.backend: ")
    assert repr(word) in problem
    assert problem.endswith(f"Did you mean {near!r}?")
    with pytest.raises((ConfigError, StepError), match="Did you mean"):
        variant(f"compile:{word}")


def test_a_backend_is_a_word_of_comparisons():
    assert variant("compile:aot_eager").config.compile == wish("aot_eager").compile
    words = variant("bf16+compile:eager").config
    assert (words.precision, words.compile.backend) == ("bf16", "eager")


def test_no_backend_is_ever_tried_unasked(hardware):
    for machine in ("cpu", "a100", "h200"):
        for device in ("cpu", "cuda:0"):
            facts = Facts(device=device, parameters=1)
            for value in named("compile").candidates(hardware(machine), facts):
                assert SpeedConfig(compile=value).compile.backend == "inductor"
            found = plan(SpeedConfig(), hardware(machine), facts)["compile"]
            assert found.details.get("backend", "inductor") == "inductor"


def test_cuda_graphs_are_declined_without_cuda(hardware):
    decision = decided("cudagraphs", hardware("cpu"))
    assert decision.declined
    assert "CUDA graphs need CUDA" in decision.reason
    assert decided("cudagraphs", hardware("t4"), Facts(device="cuda:0", parameters=1)).active


def test_a_mode_is_inductors_and_falls_away(hardware):
    found = plan(wish("aot_eager", mode="max-autotune"), hardware("cpu"), Facts(parameters=1))
    assert found["compile"].active
    assert "max-autotune" not in code(found)


# --- measured and vetoed like all ---


def measured(model, words):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        model(X).pow(2).sum().backward()
        optimizer.step()

    return benchmark(step, words, budget_s=0.3)


@pytest.mark.slow
def test_a_wrong_one_is_vetoed_however_fast(register):
    def wrong(graph, inputs):
        return lambda *values: tuple(one * 1.3 for one in graph.forward(*values))

    register("wrong_one", wrong)
    found = measured(network(), "baseline,compile:eager,compile:wrong_one")
    by_name = {record.name: record for record in found.records}
    assert by_name["compile:wrong_one"].accuracy.verdict == "wrong"
    assert by_name["compile:eager"].accuracy.verdict != "wrong"
    assert found.best is None or found.best.name != "compile:wrong_one"


def test_one_that_fails_leaves_the_model_running_and_is_named(register):
    def failing(graph, inputs):
        raise RuntimeError("no such chip")

    register("failing_one", failing)
    model = network()
    with apply_speedups(model, wish("failing_one"))[1] as context:
        with pytest.warns(UserWarning, match="the model runs as before"):
            model(X)
        assert "failing_one" in context.notes["compile"]


def test_what_one_changes_while_it_compiles_is_put_back_after_a_measurement(register, monkeypatch):
    def rude(graph, inputs):
        # The first to compile in a process imports much: what is set meanwhile is not the imports'.
        monkeypatch.setitem(sys.modules, "imported_by_a_compiler", types.ModuleType("imported"))
        torch.backends.mkldnn.allow_tf32 = not torch.backends.mkldnn.allow_tf32
        return graph.forward

    register("rude_one", rude)
    before = dict(flags.snapshot())
    measured(network(), "baseline,compile:rude_one")
    assert dict(flags.snapshot()) == before


# --- as code ---


@pytest.mark.parametrize("form", FORMS)
def test_its_code_names_the_backend(form, hardware):
    found = plan(wish("aot_eager"), hardware("cpu"), Facts(parameters=1))
    text = code(found, form)
    compile(text, form, "exec")
    assert 'backend="aot_eager"' in text


# --- on a GPU ---
