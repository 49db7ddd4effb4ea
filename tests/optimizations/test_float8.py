"""float8: linear layers that train in 8-bit floating point, by torchao."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import (
    assert_code_has,
    assert_declined,
    assert_no_rule_takes_it,
    each_form,
    needs_capability,
    real,
    with_torchao,
    without_torchao,
)

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan
from speedkit_jupyter.optimizations import float8, named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts

SMALL = Facts(device="cuda:0", parameters=100, linears=4, optimizers=(OptimizerFacts(),))
ON = Decision("float8", True, "as asked", active=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16), nn.Linear(16, 3))


INPUTS = torch.randn(5, 7, 32, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """float8 as torchao computes it where there are no units for it: for its own tests."""
    config = float8._config
    monkeypatch.setattr(float8, "_config", lambda: config(emulate=True))
    return lambda model: named("float8").applied(ON, Target(model))


# --- what is decided ---


@pytest.mark.parametrize("machine", ["cpu", "h200", "t4", "mi300x"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("float8", with_torchao(hardware(machine)), SMALL)


@pytest.mark.parametrize("machine", ["h200", "rtx4050_laptop_windows"])
def test_by_request_it_trains_on_ada_and_hopper(hardware, machine):
    decision = plan(SpeedConfig(float8=True), with_torchao(hardware(machine)), SMALL)["float8"]
    assert decision.active
    assert "4 linear layers" in decision.reason
    assert "`compile` fuses the casts" in decision.reason


@pytest.mark.parametrize(
    ("machine", "facts", "why"),
    [
        ("a100", SMALL, "NVIDIA A100-SXM4-40GB has 8.0"),
        ("t4", SMALL, "Tesla T4 has 7.5"),
        ("mi300x", SMALL, "this is AMD Instinct MI300X"),
        ("cpu", Facts(linears=4), "compute capability 8.9 (Ada, Hopper); this is cpu"),
        ("apple_m2_mps", Facts(linears=4, device="mps"), "this is Apple M2"),
        ("h200", Facts(device="cuda:0", convolutions=4), "no linear layer"),
        ("h200", Facts(device="cuda:0", linears=4, compiled="script"), "TorchScript"),
    ],
)
def test_it_is_declined_with_the_reason(hardware, machine, facts, why):
    assert_declined("float8", SpeedConfig(float8=True), with_torchao(hardware(machine)), facts, why)


@without_torchao
def test_without_a_torchao_that_fits_it_is_declined(hardware, libraries, why):
    machine = hardware("h200").model_copy(update={"libraries": libraries})
    assert why in plan(SpeedConfig(float8=True), machine, SMALL)["float8"].reason


def test_beside_int8_it_has_nothing_to_multiply(hardware):
    facts = Facts(device="cuda:0", linears=4)
    found = plan(SpeedConfig(int8=True, float8=True), with_torchao(hardware("h200")), facts)
    assert found["int8"].active
    assert "int8 multiplies in the weights' stead already" in found["float8"].reason


# --- what it does, where torchao emulates the units ---


@real
def test_training_is_torchaos_bit_by_bit_and_everything_comes_back(emulated):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model, plain = network(), trained(network())
    expected = copy.deepcopy(model)
    convert_to_float8_training(
        expected,
        config=Float8LinearConfig(emulate=True, pad_inner_dim=True),
        module_filter_fn=lambda layer, name: name != "3",
    )
    ids = [(id(p), p.data_ptr()) for p in model.parameters()]
    with emulated(model):
        found = trained(model)
        assert list(model.state_dict()) == list(network().state_dict())
        assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}
    assert all(map(torch.equal, found, trained(expected)))
    assert not all(map(torch.equal, found, plain))
    assert ids == [(id(p), p.data_ptr()) for p in model.parameters()]
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert not any(p.__dict__ for p in model.parameters())


@real
def test_what_was_trained_in_between_is_kept_and_training_goes_on(emulated):
    model = network()
    with emulated(model):
        inside = trained(model)
    assert all(map(torch.equal, inside, model.parameters()))
    copied = copy.deepcopy(model)
    assert all(map(torch.equal, trained(model), trained(copied)))


@real
def test_layers_whose_sizes_do_not_fit_multiply_as_before(emulated):
    model = network()
    with emulated(model):
        observed = named("float8").observe(Target(model))
        assert observed == {"model.float8": "2 of 3 linear layers"}
        assert type(model[3].weight) is nn.Parameter
    assert named("float8").observe(Target(model)) == {"model.float8": "0 of 3 linear layers"}


@real
def test_a_copy_made_meanwhile_multiplies_by_its_own_weights(emulated):
    model, plain = network(), network()(INPUTS)
    with emulated(model):
        assert torch.equal(copy.deepcopy(model)(INPUTS), plain)
        assert not torch.equal(model(INPUTS), plain)


@real
def test_overlapping_plans_are_taken_back_in_any_order(emulated):
    for order in itertools.permutations(range(3)):
        model = network()
        plain, both = model(INPUTS), nn.Sequential(model[0], model[2])
        blocks = [emulated(model), emulated(model[0]), emulated(both)]
        for block in blocks:
            block.__enter__()
        for place in order:
            assert type(model[0].weight) is not nn.Parameter
            blocks[place].__exit__(None, None, None)
        assert not any(p.__dict__ for p in model.parameters())
        assert torch.equal(model(INPUTS), plain)


@real
def test_inside_it_int8_of_a_part_multiplies_and_goes_again(emulated):
    model = network()
    with emulated(model):
        before = model(INPUTS)
        with apply_speedups(model[0], SpeedConfig(int8=True).alone())[1], torch.no_grad():
            assert not torch.equal(model(INPUTS), before)
        assert torch.equal(model(INPUTS), before)
    assert not any(p.__dict__ for p in model.parameters())


@real
def test_what_is_computed_again_for_the_backward_pass_is_the_same(emulated):
    def gradient(again: bool) -> torch.Tensor:
        model = network()
        with emulated(model):
            if again:
                output = checkpoint(model, INPUTS, use_reentrant=False)
            else:
                output = model(INPUTS)
            output.square().mean().backward()
        return model[0].weight.grad

    assert torch.equal(gradient(again=True), gradient(again=False))


@real
def test_nothing_is_kept_alive_by_it(emulated):
    model = network()
    block = emulated(model)
    block.__enter__()
    model(INPUTS).sum().backward()
    block.__exit__(None, None, None)
    references = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert [one() for one in references] == [None] * len(references)


@real
@pytest.mark.slow
@pytest.mark.compile
def test_compiled_training_is_the_same(emulated):
    torch._dynamo.reset()
    eager, model = network(), network()
    with emulated(eager):
        expected = trained(eager)
    with emulated(model):
        found = trained(torch.compile(model, fullgraph=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@each_form
def test_the_code_to_take_along_is_torchaos_call(form, hardware):
    found = plan(SpeedConfig(float8=True).alone(), with_torchao(hardware("h200")), SMALL)
    assert_code_has("convert_to_float8_training(", found, form)


@real
def test_the_line_of_the_code_takes_the_same_layers():
    model = network()
    names: dict[str, Any] = {"torch": torch, "model": model}
    exec("from torchao.float8 import *\n" + float8.CODE, names)
    kinds = [type(part).__name__ for part in model]
    assert kinds == ["Float8Linear", "GELU", "Float8Linear", "Linear"]


@pytest.mark.gpu
@real
def test_on_a_gpu_training_is_near_that_without_it():
    needs_capability(8, 9)
    model, plain = network().cuda(), network().cuda()
    inputs = INPUTS.cuda()
    with apply_speedups(model, SpeedConfig(float8=True).alone())[1] as context:
        assert context.plan["float8"].active
        model(inputs).square().mean().backward()
    plain(inputs).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.1 * other.grad.norm()
