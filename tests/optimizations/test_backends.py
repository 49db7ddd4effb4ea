"""compile with `backend`: torch's own beside Inductor, by request only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter import ConfigError, Facts, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.subject.variants import variant
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.support.exceptions import StepError

pytestmark = pytest.mark.compile
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _fresh():
    """No compiled code of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def wish(backend, **more) -> SpeedConfig:
    return SpeedConfig(compile={"enabled": True, "backend": backend, **more}).alone()


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


def test_a_mode_is_inductors_and_falls_away(hardware):
    found = plan(wish("aot_eager", mode="max-autotune"), hardware("cpu"), Facts(parameters=1))
    assert found["compile"].active
    assert "max-autotune" not in code(found)
