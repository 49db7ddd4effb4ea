"""sparsity: linear layers by weights with two zeros in each four, where nothing is trained."""

from __future__ import annotations

import copy

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
    assert_restored_after_errors,
    assert_same,
    assert_unchanged_where_there_is_no_kernel,
    assert_weights_multiply_where_gradients_are_recorded,
    bits,
    each_form,
    needs_capability,
    network,
    real,
    with_plan,
)

from speedkit_jupyter import (
    ConfigError,
    Facts,
    SpeedConfig,
    apply_speedups,
    benchmark,
    plan,
)
from speedkit_jupyter.optimizations import named, sparsity
from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts

HALF = Facts(device="cuda:0", parameters=100, linears=4, dtypes=("bfloat16",))
WORDS = (True, "prune")
each = pytest.mark.parametrize("value", WORDS)


def sparse_network() -> nn.Module:
    """The network with its second layer 2:4 sparse."""
    model = network()
    with torch.no_grad():
        model[2].weight.copy_(sparsity.pruned(model[2].weight))
    return model


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the units: the zeros are multiplied, too."""
    monkeypatch.setattr(sparsity, "_packed", torch.clone)
    monkeypatch.setattr(sparsity.Sparsity, "missing_units", lambda *given: "")


def on(value: object = "prune") -> SpeedConfig:
    return SpeedConfig(sparsity=value).alone()


# --- what is decided ---


@pytest.mark.parametrize("machine", ["cpu", "a100", "b200", "h200", "t4", "mi300x"])
def test_auto_never_takes_or_offers_it(hardware, machine):
    assert_no_rule_takes_it("sparsity", hardware(machine))


@pytest.mark.parametrize("machine", ["a100", "h200", "b200"])
@pytest.mark.parametrize("facts", [SMALL, HALF], ids=["autocast", "bfloat16"])
def test_by_request_ampere_and_later_have_it_without_another_library(hardware, machine, facts):
    bare = hardware(machine).model_copy(update={"libraries": {}})
    decision = plan(SpeedConfig(sparsity=True), bare, facts)["sparsity"]
    assert (decision.value, decision.active) == (True, True)
    assert "those of 4 linear layers whose weights are 2:4 sparse" in decision.reason


def test_what_pruning_gives_up_is_said_in_the_reason(hardware):
    decision = plan(SpeedConfig(sparsity="prune"), hardware("a100"), SMALL)["sparsity"]
    assert (decision.value, decision.active) == ("prune", True)
    assert "the two smaller of each four weights in a row are left out" in decision.reason


def test_weights_that_are_sparse_already_make_no_other_model(hardware):
    effects = {}
    for value in WORDS:
        found = plan(SpeedConfig(sparsity=value), hardware("a100"), SMALL)
        effects[value] = named("sparsity").effect_of(found["sparsity"], SMALL)
        assert ("sparsity" in found.changes_model()) == (value == "prune")
    assert effects == {True: Effect.ROUNDING, "prune": Effect.CHANGES_MODEL}


def test_false_leaves_it_and_a_wrong_word_is_told(hardware):
    assert not plan(SpeedConfig(sparsity=False), hardware("a100"), SMALL)["sparsity"].active
    with pytest.raises(ConfigError, match="allowed: auto, true, false, prune"):
        SpeedConfig(sparsity="half")


@each
@pytest.mark.parametrize(
    ("machine", "facts", "wishes", "why"),
    [
        ("t4", SMALL, {}, "compute capability 8.0 (Ampere); Tesla T4 has 7.5"),
        ("mi300x", SMALL, {}, "this is AMD Instinct MI300X"),
        ("cpu", Facts(linears=4), {}, "this is cpu"),
        ("rtx4050_laptop_windows", SMALL, {}, "no kernels for it on Windows"),
        ("a100", SMALL, {"precision": "fp32"}, "multiply bfloat16 and float16: ask for precision"),
        ("a100", Facts(device="cuda:0", convolutions=1), {}, "no linear layer"),
        (
            "a100",
            Facts(device="cuda:0", linears=4, optimizers=(OptimizerFacts("SGD"),)),
            {},
            "SGD trains this model",
        ),
    ],
)
def test_it_is_declined_with_the_reason(hardware, value, machine, facts, wishes, why):
    asked = SpeedConfig(sparsity=value, **wishes)
    assert_declined("sparsity", asked, hardware(machine), facts, why)


# --- which weights, and what is left of them ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pruned_weights_keep_the_two_larger_of_each_four(dtype):
    torch.manual_seed(0)
    weight = torch.randn(32, 64).to(dtype)
    found = sparsity.pruned(weight)
    kept = found != 0
    assert sparsity.is_sparse(found)
    assert not sparsity.is_sparse(weight)
    assert torch.equal(found[kept], weight[kept])
    groups, chosen = weight.abs().view(-1, 4), kept.view(-1, 4)
    for sizes, mask in zip(groups.tolist(), chosen.tolist(), strict=True):
        left_out = [size for size, keeps in zip(sizes, mask, strict=True) if not keeps]
        assert sorted(sizes)[:2] == sorted(left_out)
    assert torch.equal(sparsity.pruned(found), found)


@pytest.mark.parametrize("kind", ["transposed", "strided"])
def test_rows_are_pruned_however_they_lie_in_memory(kind):
    dense = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    other = dense.t().contiguous().t() if kind == "transposed" else dense.repeat(1, 2)[:, :64]
    assert other.stride() != dense.stride()
    assert torch.equal(sparsity.pruned(other), sparsity.pruned(dense))


def test_what_is_not_a_number_is_not_left_out():
    weight = torch.ones(16, 16)
    weight[3, 5], weight[4, 4] = float("nan"), float("inf")
    found = sparsity.pruned(weight)
    assert found[3, 5].isnan()
    assert found[4, 4].isinf()


@real
def test_torchao_prunes_by_the_same_mask():
    from torchao.sparsity.utils import mask_creator

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sparsity.pruned(weight), weight * mask_creator(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_packed_form_of_torchs_kernels_holds_all_that_is_left(dtype):
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass as pack,
    )
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_to_dense_cutlass as unpack,
    )

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = sparsity.pruned(weight)
    assert torch.equal(unpack(*pack(found)), found)
    assert not torch.equal(unpack(*pack(weight)), weight)


# --- what it does, where the zeros are multiplied, too ---


def by_hand(model: nn.Module, places: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The layers in these places by weights without their smaller halves, in this dtype."""
    hidden = INPUTS
    with torch.no_grad():
        for place, layer in enumerate(model):
            if place in places:
                weight = sparsity.pruned(layer.weight.detach()).to(dtype)
                product = F.linear(hidden.reshape(-1, weight.shape[1]).to(dtype), weight,
                                   layer.bias.to(dtype))  # fmt: skip
                hidden = product.to(hidden.dtype).reshape(*hidden.shape[:-1], -1)
            else:
                hidden = layer(hidden)
    return hidden


def test_pruned_it_computes_without_the_smaller_weights_and_everything_comes_back(emulated):
    model = network()
    plain, found = with_plan(model, INPUTS, on(), "2 of 3 linear layers")
    assert torch.equal(found, by_hand(model, (0, 2), torch.bfloat16))
    assert 0.05 < (found - plain).norm() / plain.norm() < 0.8


def test_without_the_word_only_sparse_weights_are_taken_and_nothing_is_lost(emulated):
    model = sparse_network()
    plain, found = with_plan(model, INPUTS, on(True), "1 of 3 linear layers")
    assert torch.equal(found, by_hand(model, (2,), torch.bfloat16))
    assert (found - plain).norm() < 0.01 * plain.norm()


def test_where_no_weight_is_sparse_that_is_said_with_the_word_that_prunes(emulated):
    model = network()
    with apply_speedups(model, on(True))[1] as context:
        assert "two zeros in each four" in context.notes["sparsity"]
        assert "`sparsity: prune`" in context.notes["sparsity"]
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_how_much_is_given_up_is_said(emulated):
    model = network()
    with apply_speedups(model, on())[1] as context:
        note = context.notes["sparsity"]
    weights = [model[0].weight.detach(), model[2].weight.detach()]
    lost = sum((w - sparsity.pruned(w)).square().sum() for w in weights)
    assert f"{lost / sum(w.square().sum() for w in weights):.1%} of their squared norm" in note


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_float32_weights_multiply_in_the_plans_precision(emulated, dtype, word):
    model = network()
    config = SpeedConfig(sparsity="prune", precision=word).alone()
    with apply_speedups(model, config)[1] as context:
        assert model[0].weight._speedkit_twin.dtype is dtype
        with context.autocast(), torch.no_grad():
            assert model(INPUTS).dtype is dtype
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_multiply_in_their_own(emulated, dtype):
    model = network().to(dtype)
    with apply_speedups(model, on())[1]:
        assert model[0].weight._speedkit_twin.dtype is dtype
        with torch.no_grad():
            assert model(INPUTS.to(dtype)).dtype is dtype


@each
def test_what_is_applied_is_restored_after_errors_and_interrupts(emulated, value):
    assert_restored_after_errors(sparse_network(), on(value))


@each
def test_a_state_dict_a_copy_and_a_file_are_as_without_it(emulated, value):
    assert_copies_are_plain(sparse_network(), INPUTS, on(value))


def test_plans_on_a_model_and_its_parts_are_taken_back_in_any_order(emulated):
    def made() -> tuple:
        model = sparse_network()
        other = nn.Sequential(model[2], nn.Linear(32, 2)).eval()
        return model, ((model, on("prune")), (model[2], on(True)), (other, on(True)))

    assert_any_order(made, INPUTS)


def test_a_sparse_weight_that_is_written_dense_multiplies_by_itself(emulated):
    model, dense = sparse_network(), network()
    with apply_speedups(model, on(True))[1], torch.no_grad():
        answer(model)
        model.load_state_dict(dense.state_dict())
        assert torch.equal(answer(model), answer(dense))
        model.load_state_dict(sparse_network().state_dict())
        assert torch.equal(answer(model), by_hand(sparse_network(), (2,), torch.bfloat16))


@each
def test_where_gradients_are_recorded_the_weights_multiply(emulated, value):
    assert_weights_multiply_where_gradients_are_recorded(
        sparse_network, INPUTS, on(value), "sparsity"
    )


def test_where_torch_has_no_kernel_for_it_that_is_one_line_and_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(sparsity.Sparsity, "missing_units", lambda *given: "")
    line = r"sparsity does not work on cpu here: RuntimeError: "
    assert_unchanged_where_there_is_no_kernel(on(), line)


def test_pruned_it_is_measured_as_another_model_and_sparse_weights_are_not(emulated):
    model, inputs = sparse_network().bfloat16(), INPUTS.bfloat16()
    before = bits(model)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(inputs)

    found = benchmark(step, "baseline,sparsity,sparsity:prune", model=model, budget_s=0.3)
    sparse, pruned = found.records[1:]
    assert (sparse.plan, pruned.plan) == ({"sparsity": True}, {"sparsity": "prune"})
    assert sparse.accuracy.verdict in ("exact", "rounding")
    assert pruned.accuracy.verdict == "other model"
    assert_same(before, bits(model))


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_code_multiplies_by_it_too(emulated):
    torch._dynamo.reset()
    model, dense = sparse_network(), network()
    with apply_speedups(model, SpeedConfig(sparsity=True, compile=True).alone())[1] as context:
        found = answer(model)
        assert "compile" not in context.notes
        model.load_state_dict(dense.state_dict())
        other = answer(model)
    sparse = sparse_network()
    expected, plain = by_hand(sparse, (2,), torch.bfloat16), answer(sparse)
    assert (found - expected).norm() < 0.2 * (plain - expected).norm()
    torch.testing.assert_close(other, answer(dense))


# --- the same without SpeedKit ---


@each_form
@each
def test_the_code_to_take_along_is_torchs_call(form, value, hardware):
    found = plan(SpeedConfig(sparsity=value, precision="bf16").alone(), hardware("a100"), SMALL)
    assert_code_has("to_sparse_semi_structured(", found, form)


@each
def test_the_lines_of_the_code_compute_the_same(emulated, value, hardware):
    model = sparse_network()
    config = SpeedConfig(sparsity=value, precision="bf16").alone()
    with apply_speedups(model, config)[1] as context, context.autocast():
        expected = answer(model)
    found = plan(config, hardware("a100"), SMALL)
    snippet = sparsity.Sparsity().code(found["sparsity"], found.facts_after, "torch")
    names = {"torch": torch, "model": model, "to_sparse_semi_structured": torch.clone}
    exec("\n".join(snippet.model), names)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(answer(model), expected)


@pytest.mark.gpu
@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_it_computes_what_the_weights_without_their_zeros_do(value, dtype):
    needs_capability(8, 0)
    model, inputs = sparse_network().cuda().to(dtype), INPUTS.cuda().to(dtype)
    number = "1 of 3" if value is True else "2 of 3"
    _, found = with_plan(model, inputs, on(value), f"{number} linear layers")
    expected = copy.deepcopy(model)
    for place in (2,) if value is True else (0, 2):
        weight = expected[place].weight
        weight.data = sparsity.pruned(weight.data)
    with torch.no_grad():
        torch.testing.assert_close(found, expected(inputs), rtol=0.05, atol=0.02)
