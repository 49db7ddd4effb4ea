"""mx: linear layers in microscaling formats, by torchao, where nothing is trained."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import (
    INPUTS,
    SMALL,
    answer,
    assert_any_order,
    assert_code_has,
    assert_copies_are_plain,
    assert_declined,
    assert_no_rule_takes_it,
    assert_nothing_is_kept_alive,
    assert_restored_after_errors,
    assert_same,
    assert_unchanged_where_there_is_no_kernel,
    bits,
    each_form,
    needs_capability,
    network,
    real,
    with_plan,
    with_torchao,
    without_torchao,
)

from speedkit_jupyter import (
    ConfigError,
    Facts,
    SpeedConfig,
    apply_speedups,
    benchmark,
    plan,
)
from speedkit_jupyter.machines.hardware import Accelerator
from speedkit_jupyter.optimizations import mx
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts

WORDS = ("mxfp8", "mxfp4")
# How far off the outputs of `network` may be by these, as a share of their norm.
OFF = {"mxfp8": (0.001, 0.1), "mxfp4": (0.01, 0.4)}
each = pytest.mark.parametrize("value", WORDS)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the units, which torchao emulates for its own tests."""
    from torchao.quantization.quantize_.common import KernelPreference

    emulating = functools.partial(mx._config, kernel_preference=KernelPreference.EMULATED)
    monkeypatch.setattr(mx, "_config", emulating)
    monkeypatch.setattr(mx.Mx, "missing_units", lambda *given: "")


def on(value: str = "mxfp8") -> SpeedConfig:
    return SpeedConfig(mx=value).alone()


def by_torchao(value: str, layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """What torchao's own call makes of a layer in bfloat16."""
    from torchao.quantization import quantize_

    layer = copy.deepcopy(layer).bfloat16()
    quantize_(layer, mx._config(value))
    return layer(inputs.bfloat16()).to(inputs.dtype)


# --- what is decided ---


@pytest.mark.parametrize("machine", ["cpu", "b200", "h200", "t4", "mi300x"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("mx", with_torchao(hardware(machine)))


@each
def test_by_request_blackwell_has_it(hardware, value):
    decision = plan(SpeedConfig(mx=value), with_torchao(hardware("b200")), SMALL)["mx"]
    assert (decision.value, decision.active) == (value, True)
    assert "4 linear layers, where no gradients are recorded" in decision.reason
    assert "`compile` fuses the casts" in decision.reason


@pytest.mark.parametrize("word", [True, "true", "on"])
def test_the_bare_word_is_the_one_that_loses_least(hardware, word):
    assert plan(SpeedConfig(mx=word), with_torchao(hardware("b200")), SMALL)["mx"].value == "mxfp8"


def test_false_leaves_it_and_a_wrong_word_is_told(hardware):
    assert not plan(SpeedConfig(mx=False), with_torchao(hardware("b200")), SMALL)["mx"].active
    with pytest.raises(ConfigError, match="allowed: auto, false, mxfp8, mxfp4"):
        SpeedConfig(mx="fp6")


@pytest.mark.parametrize(
    ("machine", "facts", "why"),
    [
        ("h200", SMALL, "Blackwell's Tensor Cores (compute capability 10.0); NVIDIA H200 has 9.0"),
        ("t4", SMALL, "Tesla T4 has 7.5"),
        ("mi300x", SMALL, "this is AMD Instinct MI300X"),
        ("cpu", Facts(linears=4), "this is cpu"),
        ("apple_m2_mps", Facts(linears=4, device="mps"), "this is Apple M2"),
        ("b200", Facts(device="cuda:0", convolutions=4), "no linear layer"),
        ("b200", Facts(device="cuda:0", linears=4, dtypes=("float64",)), "weights are float64"),
        ("b200", Facts(device="cuda:0", linears=4, compiled="script"), "TorchScript"),
        (
            "b200",
            Facts(device="cuda:0", linears=4, optimizers=(OptimizerFacts("SGD"),)),
            "SGD trains this model",
        ),
    ],
)
def test_it_is_declined_with_the_reason(hardware, machine, facts, why):
    assert_declined("mx", SpeedConfig(mx=True), with_torchao(hardware(machine)), facts, why)


@without_torchao
def test_without_a_torchao_that_fits_it_is_declined(hardware, libraries, why):
    machine = hardware("b200").model_copy(update={"libraries": libraries})
    assert why in plan(SpeedConfig(mx=True), machine, SMALL)["mx"].reason


@each
def test_on_geforce_blackwell_mxfp4_is_declined_with_the_format_that_is_there(hardware, value):
    gpu = Accelerator(kind="cuda", name="NVIDIA GeForce RTX 5090", capability=(12, 0))
    machine = with_torchao(hardware("b200"), accelerators=(gpu,))
    decision = plan(SpeedConfig(mx=value), machine, SMALL)["mx"]
    assert decision.active == (value != "mxfp4")
    assert decision.active or "RTX 5090 has 12.0: mx: mxfp8 is there" in decision.reason


def test_one_of_them_has_the_weights(hardware):
    asked = SpeedConfig(float8=True, mx="mxfp4", sparsity="prune")
    found = plan(asked, with_torchao(hardware("b200")), SMALL)
    assert [found[name].active for name in ("float8", "mx", "sparsity")] == [True, False, False]
    assert "float8 multiplies in the weights' stead already" in found["mx"].reason


# --- what it does, where the units are emulated ---


@real
@each
def test_it_computes_what_torchao_does_and_everything_comes_back(emulated, value):
    model = network()
    plain, found = with_plan(model, INPUTS, SpeedConfig(mx=value), "2 of 3 linear layers")
    with torch.no_grad():
        hidden = F.gelu(by_torchao(value, model[0], INPUTS))
        assert torch.equal(found, model[3](by_torchao(value, model[2], hidden)))
    least, most = OFF[value]
    assert least < (found - plain).norm() / plain.norm() < most


@real
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_comes_out_has_the_dtype_of_what_came_in(emulated, value, dtype):
    plain, found = with_plan(network().to(dtype), INPUTS.to(dtype), SpeedConfig(mx=value))
    assert found.dtype is dtype
    assert (found - plain).norm() < OFF[value][1] * plain.norm()


@real
@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inside_autocast_it_has_that_of_autocast(emulated, value, dtype):
    model = network()
    with torch.autocast("cpu", dtype=dtype):
        plain, found = with_plan(model, INPUTS, SpeedConfig(mx=value))
    assert plain.dtype is found.dtype is dtype
    assert (found - plain).norm() < OFF[value][1] * plain.norm()


@real
@each
@pytest.mark.parametrize(
    "inputs",
    [
        torch.ones(64),
        torch.ones(1, 64),
        torch.ones(2, 3, 4, 64),
        torch.ones(64, 5).t(),
        torch.ones(3, 64, 2).transpose(1, 2),
        torch.ones(1, 64).expand(4, 64),
        torch.ones(4, 128)[:, ::2],
    ],
    ids=["vector", "row", "four", "transposed", "permuted", "expanded", "strided"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_inputs_of_every_shape_and_layout_are_rows(emulated, value, inputs, bias):
    layer = nn.Linear(64, 32, bias=bias)
    with apply_speedups(layer, on(value))[1], torch.inference_mode():
        found, rows = layer(inputs), layer(inputs.reshape(-1, 64).contiguous())
    assert torch.equal(found, rows.reshape(found.shape))
    assert found.shape == (*inputs.shape[:-1], 32)


@real
@each
def test_of_zeros_the_products_are_zeros(emulated, value):
    layer = nn.Linear(64, 32)
    with apply_speedups(layer, on(value))[1], torch.no_grad():
        assert torch.equal(layer(torch.zeros(3, 64)), layer.bias.bfloat16().float().expand(3, 32))
        layer.weight.zero_()
        assert torch.equal(layer(torch.ones(3, 64)), layer.bias.bfloat16().float().expand(3, 32))


@real
def test_empty_and_wrong_inputs_are_torchs_own(emulated):
    layer = nn.Linear(64, 32)
    with apply_speedups(layer, on())[1], torch.no_grad():
        assert layer(torch.zeros(0, 64)).shape == (0, 32)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(torch.ones(2, 63))
        for dtype in (torch.float64, torch.bfloat16):
            with pytest.raises(RuntimeError, match="same dtype"):
                layer(torch.ones(2, 64, dtype=dtype))


@real
@each
def test_what_is_applied_is_restored_after_errors_and_interrupts(emulated, value):
    assert_restored_after_errors(network(), on(value))


@real
@each
def test_a_state_dict_a_copy_and_a_file_are_as_without_it(emulated, value):
    assert_copies_are_plain(network(), INPUTS, on(value))


@real
def test_plans_on_a_model_and_its_parts_are_taken_back_in_any_order(emulated):
    def made() -> tuple:
        model = network()
        other = nn.Sequential(model[0], nn.Linear(96, 2)).eval()
        return model, ((model, on("mxfp8")), (model[0], on("mxfp4")), (other, on("mxfp8")))

    assert_any_order(made, INPUTS)


@real
def test_where_no_layer_fits_that_is_said(emulated):
    model = nn.Sequential(nn.Linear(64, 30), nn.Linear(30, 64))
    with apply_speedups(model, on())[1] as context:
        assert "multiple of 32" in context.notes["mx"]
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


@real
def test_where_gradients_are_recorded_the_weights_multiply_and_an_optimizer_takes_them(emulated):
    model, twin = network(), network()
    with apply_speedups(model, on())[1] as context:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(INPUTS).square().mean().backward()
        assert "records gradients" in context.notes["mx"]
        optimizer.step()
        assert "taken back before the first step of SGD" in context.notes["mx"]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(INPUTS).square().mean().backward()
    optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@real
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(3),
        lambda weight: weight.data.mul_(3),
        lambda weight: weight.copy_(weight * 3),
    ],
    ids=["in place", "data", "copied"],
)
def test_a_weight_that_is_written_meanwhile_is_rounded_anew(emulated, write):
    model, expected = network(), network()
    with torch.no_grad():
        expected[0].weight.mul_(3)
        with apply_speedups(model, on())[1]:
            answer(model)
            write(model[0].weight)
            found = answer(model)
    with apply_speedups(expected, on())[1]:
        assert torch.equal(found, answer(expected))


@real
def test_nothing_is_kept_alive_by_it(emulated):
    assert_nothing_is_kept_alive(network, INPUTS, on())


@real
@each
def test_where_torch_has_no_kernel_for_it_that_is_one_line_and_nothing_is_changed(
    value, monkeypatch
):
    monkeypatch.setattr(mx.Mx, "missing_units", lambda *given: "")
    line = r"^mx does not work on cpu here: \w+Error: .+$"
    assert_unchanged_where_there_is_no_kernel(on(value), line)


@real
def test_it_is_measured_as_another_model(emulated):
    model = network()
    before = bits(model)

    def step() -> torch.Tensor:
        return answer(model)

    found = benchmark(step, "baseline,mx,mx:mxfp4", model=model, budget_s=0.3)
    assert [record.name for record in found.records] == ["baseline", "mx", "mx:mxfp4"]
    assert [record.plan for record in found.records[1:]] == [{"mx": "mxfp8"}, {"mx": "mxfp4"}]
    assert [record.accuracy.verdict for record in found.records[1:]] == ["other model"] * 2
    assert_same(before, bits(model))


@real
@pytest.mark.slow
@pytest.mark.compile
@each
def test_compiled_code_multiplies_by_it_too(emulated, value):
    """Traced and split up, not more: Inductor's C++ has no word for the scales (float8_e8m0fnu)."""
    torch._dynamo.reset()
    model = network()
    config = SpeedConfig(mx=value, compile={"enabled": True, "backend": "aot_eager"}).alone()
    with apply_speedups(model, config)[1] as context:
        found = answer(model)
        assert "compile" not in context.notes
    with apply_speedups(model, on(value))[1]:
        assert torch.equal(found, answer(model))


# --- the same without SpeedKit ---


@each_form
@each
def test_the_code_to_take_along_is_torchaos_call(form, value, hardware):
    found = plan(on(value), with_torchao(hardware("b200")), SMALL)
    assert_code_has("quantize_(", found, form)


@real
@each
def test_the_lines_of_the_code_compute_the_same(emulated, value, hardware):
    from torchao.quantization import quantize_

    model = network()
    with apply_speedups(model, on(value))[1], torch.autocast("cpu", dtype=torch.bfloat16):
        expected = answer(model)
    found = plan(on(value), with_torchao(hardware("b200")), SMALL)
    snippet = mx.Mx().code(found["mx"], SMALL, "torch")
    names = {"torch": torch, "model": model, "quantize_": quantize_}
    names["MXDynamicActivationMXWeightConfig"] = lambda **given: mx._config(value)
    exec("\n".join(snippet.model), names)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(answer(model), expected)
    assert snippet.forward == ('torch.autocast("cuda", dtype=torch.bfloat16)',)


@pytest.mark.gpu
@real
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_it_is_near_the_model_and_comes_back(value, dtype):
    needs_capability(10, 0)
    if value == "mxfp4" and torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs compute capability 10")
    model, inputs = network().cuda().to(dtype), INPUTS.cuda().to(dtype)
    plain, found = with_plan(model, inputs, SpeedConfig(mx=value), "2 of 3 linear layers")
    assert found.dtype is dtype
    assert 0 < (found - plain).norm() < OFF[value][1] * plain.norm()
