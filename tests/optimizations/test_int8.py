"""int8: linear layers that multiply 8-bit integers, by torchao, where nothing is trained."""

from __future__ import annotations

import copy
import io
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import (
    assert_any_order,
    assert_no_rule_takes_it,
    assert_nothing_is_kept_alive,
    assert_restored_after_errors,
    assert_same,
    assert_weights_multiply_where_gradients_are_recorded,
    bits,
    each_form,
    real,
    with_plan,
    with_torchao,
)

from speedkit_jupyter import (
    ConfigError,
    Facts,
    Hardware,
    SpeedConfig,
    apply_speedups,
    benchmark,
    code,
    plan,
)
from speedkit_jupyter.machines.hardware import OPTIONAL
from speedkit_jupyter.optimizations import int8
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.optimizations.twins import quantizing

INT8 = SpeedConfig(int8=True).alone()
SMALL = Facts(parameters=100, linears=4)


class Tied(nn.Module):
    """A tied head, a layer that is called twice, and an attention layer that lends its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.shared = nn.Linear(32, 32)
        self.again = self.shared
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.again(self.shared(self.words(tokens))))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden)


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied().eval()


TOKENS = torch.arange(12).view(2, 6)


@torch.no_grad()
def answer(model: nn.Module) -> torch.Tensor:
    return model(TOKENS)


# --- what is decided ---


@pytest.mark.parametrize("machine", ["cpu", "h200", "t4", "apple_m2_mps"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("int8", with_torchao(hardware(machine)), SMALL)


@pytest.mark.parametrize("word", [True, "true", "dynamic", "on"])
def test_the_bare_word_is_the_one_that_multiplies_integers(hardware, word):
    decision = plan(SpeedConfig(int8=word), with_torchao(hardware("cpu")), SMALL)["int8"]
    assert (decision.value, decision.active) == ("dynamic", True)
    assert "4 linear layers" in decision.reason


def test_false_leaves_it_and_a_wrong_word_is_told(hardware):
    assert not plan(SpeedConfig(int8=False), with_torchao(hardware("cpu")), SMALL)["int8"].active
    with pytest.raises(ConfigError, match="allowed: auto, false, dynamic, weights"):
        SpeedConfig(int8="four")


@pytest.mark.parametrize(
    ("machine", "changes", "facts", "why"),
    [
        ("cpu", {"libraries": {}}, SMALL, "pip install torchao"),
        ("cpu", {"libraries": {"torchao": "0.17.0"}}, SMALL, "needs torchao 0.18; this is 0.17.0"),
        ("cpu", {"libraries": {"torchao": "unknown"}}, SMALL, "this is unknown"),
        ("cpu", {"torch": "2.9.1"}, SMALL, "needs torch 2.11; this is 2.9.1"),
        ("cpu", {}, Facts(linears=4, optimizers=(OptimizerFacts(),)), "AdamW trains this model"),
        ("cpu", {}, Facts(convolutions=4), "no linear layer"),
        ("cpu", {}, Facts(linears=4, dtypes=("float64",)), "the weights are float64"),
        ("cpu", {}, Facts(linears=4, compiled="script"), "TorchScript"),
        ("v100", {}, SMALL, "Tesla V100-SXM2-16GB has 7.0: int8: weights"),
        ("gtx1660", {}, SMALL, "GTX 1660 has no Tensor Cores: int8: weights"),
        ("mi300x", {}, SMALL, "int8: weights is there"),
        ("apple_m2_mps", {}, SMALL, "int8: weights is there"),
        ("arc_b580_xpu", {}, SMALL, "int8: weights is there"),
    ],
)
def test_it_is_declined_with_the_reason_and_the_next_step(hardware, machine, changes, facts, why):
    here = with_torchao(hardware(machine)).model_copy(update=changes)
    decision = plan(SpeedConfig(int8="dynamic"), here, facts)["int8"]
    assert decision.declined
    assert not decision.active
    assert why in decision.reason


@pytest.mark.parametrize("machine", ["t4", "a100", "h200", "rtx4050_laptop_windows"])
def test_gpus_with_integer_tensor_cores_have_it(hardware, machine):
    assert plan(SpeedConfig(int8=True), with_torchao(hardware(machine)), SMALL)["int8"].active


@pytest.mark.parametrize("machine", ["v100", "apple_m2_mps", "mi300x"])
def test_weights_alone_need_no_integer_products(hardware, machine):
    assert plan(SpeedConfig(int8="weights"), with_torchao(hardware(machine)), SMALL)["int8"].active


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch._C, "_get_tracing_state"),
        (torch._C._functorch, "is_functorch_wrapped_tensor"),
        (torch.autograd.forward_ad, "_current_level"),
    ],
)
def test_where_torch_has_moved_what_it_stands_on_it_is_declined_by_name(
    hardware, monkeypatch, owner, name
):
    monkeypatch.delattr(owner, name)
    decision = plan(INT8, with_torchao(hardware("cpu")), SMALL)["int8"]
    assert decision.declined
    assert name in decision.rule


def test_what_is_installed_is_read_without_importing_it():
    assert Hardware.detect().libraries.keys() <= {*OPTIONAL}
    assert Hardware.from_json('{"libraries": {"torchao": "1.0"}}').libraries == {"torchao": "1.0"}


# --- what it does ---


@real
@pytest.mark.parametrize("value", ["dynamic", "weights"])
def test_it_computes_what_torchao_does_and_everything_comes_back(value):
    from torchao import quantization

    names = {
        "dynamic": "Int8DynamicActivationInt8WeightConfig",
        "weights": "Int8WeightOnlyConfig",
    }
    model = tied()
    before, plain = bits(model), answer(model)
    expected = copy.deepcopy(model)
    # As the code to take home asks, and where torchao does not know of this processor's overflow.
    seven_bits = value == "dynamic" and int8._has_to_be_narrow(torch.device("cpu"))
    narrow = {"reduce_range": True} if seven_bits else {}
    config = getattr(quantization, names[value])(set_inductor_config=False, **narrow)
    quantization.quantize_(expected, config)
    with apply_speedups(model, SpeedConfig(int8=value).alone())[1] as context:
        assert "2 of 2 linear layers" in str(context.changes())
        assert "2 linear layers" in context.plan["int8"].reason
        found = answer(model)
        assert [id(p) for p in model.parameters()] == [row[0] for row in before]
    assert torch.equal(found, answer(expected))
    assert not torch.equal(found, plain)
    assert torch.equal(answer(model), plain)
    assert_same(before, bits(model))


@real
def test_what_is_applied_is_restored_after_errors_and_interrupts():
    assert_restored_after_errors(tied(), INT8)


@real
def test_a_state_dict_a_copy_and_a_file_are_as_without_it():
    model = tied()
    plain, values = answer(model), copy.deepcopy(model.state_dict())
    model.shared.weight.mark = "the user's"
    with apply_speedups(model, INT8)[1]:
        found, file = model.state_dict(), io.BytesIO()
        copied, shallow = copy.deepcopy(model), copy.copy(model.shared.weight)
        torch.save(model, file)
        torch.save(model.state_dict(), kept := io.BytesIO())
    file.seek(0)
    kept.seek(0)
    assert list(found) == list(values)
    loaded = torch.load(kept, weights_only=True)
    for name, value in values.items():
        assert type(found[name]) is type(loaded[name]) is torch.Tensor
        assert torch.equal(found[name], value)
        assert torch.equal(loaded[name], value)
    for other in (copied, torch.load(file, weights_only=False)):
        assert {type(p) for p in other.parameters()} == {nn.Parameter}
        assert other.head.weight is other.words.weight
        assert not other.head.weight.__dict__
        assert torch.equal(answer(other), plain)
    assert type(shallow) is nn.Parameter
    assert shallow.__dict__ == {"mark": "the user's"}


@real
def test_plans_on_a_model_and_its_parts_are_taken_back_in_any_order():
    def made() -> tuple:
        model = tied()
        other = nn.Sequential(model.shared, nn.Linear(32, 2)).eval()
        weights = SpeedConfig(int8="weights")
        return model, ((model, INT8), (model.shared, weights), (other, INT8))

    assert_any_order(made, TOKENS)


@real
def test_where_gradients_are_recorded_the_weights_multiply_and_a_note_says_so():
    assert_weights_multiply_where_gradients_are_recorded(tied, TOKENS, INT8, "int8")


@real
def test_without_weights_that_are_trained_gradients_do_not_keep_it_from_multiplying():
    model = tied().requires_grad_(False)
    with apply_speedups(model, INT8)[1]:
        assert torch.equal(model(TOKENS), answer(model))
        assert not torch.equal(model(TOKENS), answer(tied()))


@real
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_comes_later_trains_the_users_own_weights(fused):
    def trained(config: SpeedConfig) -> tuple[nn.Module, dict[str, str]]:
        model = tied()
        with apply_speedups(model, config)[1] as context:
            answer(model)
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            for _ in range(2):
                optimizer.zero_grad()
                model(TOKENS).square().mean().backward()
                optimizer.step()
        optimizer.step()  # after it, too
        return model, context.notes

    model, notes = trained(INT8)
    plain, _ = trained(SpeedConfig().alone())
    assert "taken back before the first step of AdamW" in notes["int8"]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@real
@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.shared.weight.data.mul_(3),
        lambda model: model.shared.weight.detach().mul_(3),
        lambda model: torch._foreach_mul_([model.shared.weight], 3),
        lambda model: model.load_state_dict(
            {k: v * 3 if k in ("shared.weight", "again.weight") else v
             for k, v in model.state_dict().items()}
        ),
        lambda model: setattr(model.shared.weight, "data", model.shared.weight.data * 3),
    ],
    ids=["data", "detached", "foreach", "load", "assigned"],
)  # fmt: skip
def test_a_weight_that_is_written_meanwhile_is_rounded_anew(write):
    expected = tied()
    with torch.no_grad():
        expected.shared.weight.mul_(3)
    model = tied()
    with apply_speedups(model, INT8)[1]:
        answer(model)
        with torch.no_grad():
            write(model)
        found = answer(model)
    with apply_speedups(expected, INT8)[1]:
        assert torch.equal(found, answer(expected))
    assert torch.equal(model.shared.weight, expected.shared.weight)


@real
def test_a_weight_whose_memory_was_given_back_is_not_read():
    layer = nn.Linear(64, 8)
    storage = layer.weight.untyped_storage()
    size, saved = storage.nbytes(), layer.weight.detach().clone()
    with apply_speedups(layer, INT8)[1], torch.no_grad():
        storage.resize_(0)
        layer.weight.data  # noqa: B018  (it may have been written)
        with pytest.raises(RuntimeError):
            layer(torch.ones(1, 64))
        storage.resize_(size)
        layer.weight.copy_(saved)
        layer(torch.ones(1, 64))
    assert torch.equal(layer.weight, saved)


@real
def test_a_model_that_is_cast_or_gets_other_weights_goes_on():
    model = tied()
    with apply_speedups(model, INT8)[1]:
        model.to(torch.bfloat16)
        assert answer(model).dtype is torch.bfloat16
        model.shared.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16))
        answer(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert model.shared.weight.dtype is torch.bfloat16
    assert not any(p.__dict__ for p in model.parameters())


@real
def test_empty_and_wrong_inputs_are_torchs_own_and_odd_ones_are_right():
    layer = nn.Linear(32, 8)
    with apply_speedups(layer, INT8)[1], torch.inference_mode():
        assert layer(torch.zeros(0, 32)).shape == (0, 8)
        assert layer(torch.ones(32)).shape == (8,)
        assert layer(torch.ones(2, 3, 4, 32)).shape == (2, 3, 4, 8)
        assert F.linear(bias=None, weight=layer.weight, input=torch.ones(1, 32)).shape == (1, 8)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(torch.ones(2, 31))


@real
@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: torch.func.vmap(layer)(x),
        lambda layer, x: torch.func.jvp(layer, (x,), (x,))[1],
        lambda layer, x: torch.func.jacrev(layer)(x),
        lambda layer, x: torch.jit.trace(layer, x)(x),
        lambda layer, x: torch.export.export(layer, (x,)).module()(x),
        lambda layer, x: layer(x.to_sparse()),
        lambda layer, x: layer(torch.nested.nested_tensor([x, x[:1]])).to_padded_tensor(0),
        lambda layer, x: torch.addmm(layer.bias, x, layer.weight.t()),
        lambda layer, x: torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)),
    ],
    ids=[
        "vmap", "jvp", "jacobian", "traced", "exported", "sparse", "nested", "addmm", "functional",
    ],
)  # fmt: skip
def test_what_is_not_a_plain_product_is_as_without_it(use, request):
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    with torch.no_grad():
        plain = use(layer, x)
        with apply_speedups(layer, INT8)[1]:
            found = use(layer, x)
            rounded = layer(x)
    if "functional" in request.node.name:
        assert torch.equal(found, rounded)
    else:
        assert torch.equal(found, plain)


@real
def test_forward_mode_derivatives_are_the_weights():
    from torch.autograd import forward_ad

    torch.manual_seed(0)
    layer, x, tangent = nn.Linear(8, 4), torch.randn(3, 8), torch.randn(3, 8)
    with apply_speedups(layer, INT8)[1], torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    assert torch.allclose(found, tangent @ layer.weight.t(), atol=1e-6)


@real
def test_inside_autocast_it_multiplies_too():
    model = tied()
    _, context = apply_speedups(model, SpeedConfig(int8=True, precision="bf16").alone())
    with context, context.autocast():
        found = answer(model)
    assert torch.allclose(found.float(), answer(model), atol=0.2)


@real
def test_layers_that_are_not_plain_are_left_and_counted():
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Linear(4, 4, dtype=torch.float64),
        nn.Linear(4, 4, device="meta"),
        nn.LazyLinear(4),
    )
    with apply_speedups(model, INT8)[1] as context:
        assert "1 of 5 linear layers" in str(context.changes())


def written(file: Path) -> set[tuple[str, ...]]:
    """What steps wrote: what they kept themselves would have been put back."""
    return {tuple(line.split()) for line in file.read_text().splitlines()}


@real
def test_a_thread_that_is_not_measured_multiplies_by_the_weights(tmp_path):
    model, file = tied(), tmp_path / "seen"
    plain = answer(model)

    def step() -> None:
        here = torch.allclose(answer(model), plain, atol=1e-4)
        with ThreadPoolExecutor(1) as pool:
            there = torch.allclose(pool.submit(answer, model).result(), plain, atol=1e-4)
        with file.open("a") as opened:
            opened.write(f"{here} {there}\n")

    benchmark(step, "baseline,int8", model=model, budget_s=0.2)
    assert written(file) == {("True", "True"), ("False", "True")}


@real
def test_it_is_measured_in_the_words_of_the_catalog_and_leaves_the_model_as_it_was(tmp_path):
    model, file = tied(), tmp_path / "seen"
    before = bits(model)

    def step() -> torch.Tensor:
        with file.open("a") as opened:
            opened.write(f"{type(model.shared.weight) is nn.Parameter}\n")
        return answer(model)

    found = benchmark(step, "baseline,int8,int8:weights", model=model, budget_s=0.3)
    assert written(file) == {("True",), ("False",)}
    assert [record.name for record in found.records] == ["baseline", "int8", "int8:weights"]
    assert found.records[1].plan == {"int8": "dynamic"}
    assert_same(before, bits(model))


@real
def test_a_step_that_trains_is_told_that_it_is_for_inference():
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(TOKENS).sum().backward()
        optimizer.step()

    found = benchmark(step, "baseline,int8", model=model, optimizer=optimizer, budget_s=0.1)
    assert "SGD trains this model" in found.records[1].failure


@real
def test_what_was_kept_is_not_rounded_again_when_a_hidden_plan_returns(monkeypatch):
    made = []
    original = quantizing.by_torchao
    monkeypatch.setattr(quantizing, "by_torchao", lambda *given: made.append(1) or original(*given))
    model = tied()
    _, context = apply_speedups(model, INT8)
    assert len(made) == 2
    _, newer = apply_speedups(model, SpeedConfig().alone())
    newer.restore()
    assert len(made) == 2
    context.restore()


@real
def test_nothing_is_kept_alive_by_it():
    assert_nothing_is_kept_alive(tied, TOKENS, INT8)


@real
@pytest.mark.slow
@pytest.mark.compile
def test_compiled_code_multiplies_by_it_too():
    torch._dynamo.reset()
    model = tied()
    plain = answer(model)
    with apply_speedups(model, SpeedConfig(int8=True, compile=True).alone())[1] as context:
        found, eager = answer(model), None
        assert "compile" not in context.notes
        with torch.no_grad():
            model.shared.weight.mul_(3)
        other = answer(model)
    with apply_speedups(model, INT8)[1]:
        eager = answer(model)
    assert not torch.allclose(found, plain, atol=1e-4)
    torch.testing.assert_close(found, plain, rtol=0.1, atol=0.1)
    torch.testing.assert_close(other, eager, rtol=0.1, atol=0.1)


@real
@each_form
def test_the_code_to_take_along_does_the_same(form, hardware):
    found = plan(INT8, with_torchao(hardware("cpu")), Facts(linears=4, parameters=9))
    text = code(found, form=form)
    assert "quantize_(" in text
    if form == "torch":
        model = tied()
        with apply_speedups(model, INT8)[1]:
            expected = answer(model)
        names: dict[str, Any] = {"model": model}
        exec(text, names)
        assert torch.equal(answer(model), expected)


IMPORTED = """
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from torch._inductor.fx_passes import joint_graph, post_grad
from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations.twins import quantizing

x = torch.randn(64, 64)


def state():
    return {
        "flags": dict(flags.snapshot()),
        "kernels": {name for name in torch.library._impls if name.startswith("aten/")},
        "dynamo": dynamo.get_config_copy(),
        "inductor": inductor.get_config_copy(),
        "patterns": [len(one.patterns) for one in post_grad.pass_patterns],
        "joint": len(joint_graph.patterns.patterns),
        "product": (x @ x).tolist(),
        "functions": [torch.nn.Linear.forward, torch.compile, torch.nn.functional.linear],
    }


before = state()
quantization = quantizing.imported()
config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
quantizing.by_torchao(config, x)
quantizing.imported("float8")
quantizing.imported("prototype.mx_formats")
after = state()
assert "torchao" in __import__("sys").modules
print([name for name in before if before[name] != after[name]])
assert before == after
"""


@real
@pytest.mark.slow
def test_importing_torchao_changes_nothing_for_others(tmp_path):
    program = tmp_path / "imported.py"
    program.write_text(IMPORTED)
    code, said = fresh.run(program)
    assert code == 0, said
    assert "Failed to load" not in said


WITHOUT_VNNI = """
import torch
from torch import nn
from speedkit_jupyter import SpeedConfig, apply_speedups

layer, x = nn.Linear(256, 64), torch.rand(64, 256)
layer.weight.data.fill_(1.0)
with torch.no_grad():
    plain = layer(x)
    with apply_speedups(layer, SpeedConfig(int8=True).alone())[1] as context:
        off = (layer(x) - plain).abs().max() / plain.abs().max()
print(float(off), context.notes)
assert float(off) < 0.02
assert "7 bits" in context.notes["int8"]
"""


@real
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86")
def test_a_cpu_without_vnni_uses_seven_bits(tmp_path, monkeypatch):
    """Its products of full 8-bit integers are wrong, silently."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    program = tmp_path / "without_vnni.py"
    program.write_text(WITHOUT_VNNI)
    code, said = fresh.run(program)
    assert code == 0, said


@pytest.mark.gpu
@real
@pytest.mark.parametrize("value", ["dynamic", "weights"])
def test_on_a_gpu_it_is_near_the_model_and_comes_back(value):
    plain, found = with_plan(tied().cuda(), TOKENS.cuda(), SpeedConfig(int8=value))
    torch.testing.assert_close(found, plain, rtol=0.1, atol=0.2)
