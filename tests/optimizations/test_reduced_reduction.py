"""reduced_reduction: the precision in which cuBLAS adds up half-precision products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.reduced_reduction import ACCUMULATION, REDUCTIONS, WORDS

ENTRY = named("reduced_reduction")
CUDA = Facts(device="cuda:0", devices=("cuda:0",), parameters=1, dtypes=("float16",))
HAS_SPLIT_K = isinstance(torch._C._get_cublas_allow_fp16_reduced_precision_reduction(), tuple)
with_split_k = pytest.mark.skipif(not HAS_SPLIT_K, reason="this torch has no switch for split-K")


def geforce() -> Hardware:
    machine = Hardware.from_json("rtx4050_laptop_windows")
    assert "GeForce RTX" in machine.accelerators[0].name
    return machine


def decided(machine: Hardware, facts: Facts = CUDA, **wishes: Any) -> Decision:
    return plan(SpeedConfig(**wishes), machine, facts)["reduced_reduction"]


def now() -> dict[str, Any]:
    return {name: flags.snapshot()[name] for name in (ACCUMULATION, *REDUCTIONS)}


def test_auto_offers_sums_in_fp16_where_the_chip_is_twice_as_fast_at_them_and_there_is_fp16():
    decision = decided(geforce())
    assert (decision.value, decision.active) == ("reduced", False)
    assert decision.worth_measuring == "fp16_accumulation"
    assert "GeForce RTX" in decision.reason
    assert decided(geforce(), replace(CUDA, dtypes=("float32",))).worth_measuring is None


@pytest.mark.parametrize("machine", ["t4", "a100", "h200", "gtx1080"])
def test_elsewhere_torchs_own_stays_and_a_search_tries_nothing(hardware, machine):
    assert decided(hardware(machine)).worth_measuring is None
    assert ENTRY.candidates(hardware(machine), CUDA) == ()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("machine", ["cpu", "apple_m2_mps", "mi300x"])
def test_where_there_is_no_cublas_a_wish_is_declined(hardware, machine, word):
    device = {"cpu": "cpu", "apple_m2_mps": "mps", "mi300x": "cuda:0"}[machine]
    facts = replace(CUDA, device=device, devices=(device,))
    decision = decided(hardware(machine), facts, reduced_reduction=word)
    assert decision.declined
    assert not decision.active
    assert "cuBLAS" in decision.reason


def test_sums_in_fp16_mean_nothing_inside_bf16():
    decision = decided(
        geforce(), replace(CUDA, dtypes=("float32",)),
        reduced_reduction="fp16_accumulation", precision="bf16",
    )  # fmt: skip
    assert decision.declined
    assert "inside bf16 autocast no product is in fp16" in decision.reason


def test_in_full_float32_it_says_whose_products_it_is_about(hardware):
    facts = replace(CUDA, dtypes=("float32",))
    decision = decided(hardware("t4"), facts, reduced_reduction="full", precision="fp32")
    assert decision.active
    assert "half-precision products of your own: this plan has none" in decision.reason


def test_an_older_torch_without_split_k_is_told(hardware):
    old = replace(CUDA, flags={ACCUMULATION: False, **dict.fromkeys(REDUCTIONS, True)})
    machine = hardware("a100").model_copy(update={"torch": "2.9.1"})
    decision = decided(machine, old, reduced_reduction="no_split_k")
    assert decision.declined
    assert "torch 2.9.1 has no switch for split-K" in decision.reason
    assert decided(machine, old, reduced_reduction="full").active


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((False, (True, True), (True, True)), "reduced"),
        ((False, True, True), "reduced"),
        ((False, False, False), "full"),
        ((False, (False, True), (False, True)), "full"),
        ((False, (False, False), (False, False)), "no_split_k"),
        ((True, (True, True), (True, True)), "fp16_accumulation"),
        ((False, (True, True), (False, True)), "auto"),
    ],
)
def test_what_the_user_has_set_has_its_word_and_is_left(hardware, values, word):
    facts = replace(CUDA, flags=dict(zip((ACCUMULATION, *REDUCTIONS), values, strict=True)))
    decision = decided(hardware("a100"), facts)
    assert (decision.value, decision.active) == (word, False)
    assert ("torch's own" in decision.reason) == (word == "reduced")


@pytest.mark.parametrize("word", WORDS)
def test_each_word_sets_the_switches_and_what_the_user_had_comes_back(word, changing_flags):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    before, target = flags.snapshot(), Target(nn.Linear(2, 2))
    decision = Decision("reduced_reduction", word, "as asked", active=True)
    with ENTRY.applied(decision, target):
        inside, facts = now(), Facts(flags=flags.snapshot())
        assert ENTRY.as_is(facts) == (word if HAS_SPLIT_K or word != "no_split_k" else "full")
        assert inside == dict(ENTRY.expected(decision, target, facts))
    assert flags.snapshot() == before
    assert target.kept == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overlapping_it_goes_back_in_any_order(order):
    before, contexts = now(), []
    for word in ("full", "fp16_accumulation"):
        decision = Decision("reduced_reduction", word, "as asked", active=True)
        context = ENTRY.applied(decision, Target(nn.Linear(2, 2)))
        context.__enter__()
        contexts.append(context)
    contexts[order[0]].__exit__(None, None, None)
    assert now() != before
    contexts[order[1]].__exit__(None, None, None)
    assert now() == before


@with_split_k
def test_what_the_user_sets_meanwhile_stays(changing_flags):
    target = Target(nn.Linear(2, 2))
    decision = Decision("reduced_reduction", "full", "as asked", active=True)
    with ENTRY.applied(decision, target):
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
    assert target.kept == [REDUCTIONS[0]]
    assert now()[REDUCTIONS[0]] == (False, False)
    assert now()[REDUCTIONS[1]] == (True, True)


@with_split_k
@pytest.mark.parametrize("word", WORDS)
def test_the_code_does_what_the_plan_does(word, changing_flags):
    facts = replace(CUDA, dtypes=("float32",))
    torch.backends.cuda.matmul.allow_fp16_accumulation = word == "reduced"  # so that it changes
    found = plan(SpeedConfig(reduced_reduction=word).alone(), Hardware.from_json("t4"),
                 replace(facts, flags=flags.snapshot()))  # fmt: skip
    lines = [line for line in code(found).splitlines() if line.startswith("torch.backends.cuda")]
    assert lines
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    exec("\n".join(lines), {"torch": torch})
    assert ENTRY.as_is(Facts(flags=flags.snapshot())) == word


def test_on_a_cpu_apply_declines_it_and_changes_nothing():
    before = now()
    config = SpeedConfig(reduced_reduction="fp16_accumulation").alone()
    model = nn.Linear(2, 2)
    with apply_speedups(model, config)[1] as context:
        assert context.plan["reduced_reduction"].declined
        assert now() == before


@pytest.mark.gpu
@pytest.mark.parametrize("word", ["fp16_accumulation", "full"])
def test_it_is_set_and_put_back_and_products_stay_close(word):
    model = nn.Linear(512, 512).cuda().half()
    x = torch.randn(64, 512, device="cuda", dtype=torch.float16)
    before, plain = now(), model(x)
    config = SpeedConfig(reduced_reduction=word).alone()
    with apply_speedups(model, config)[1] as context:
        assert context.plan["reduced_reduction"].active
        torch.testing.assert_close(model(x), plain, rtol=1e-2, atol=1e-2)
    assert now() == before
    assert torch.equal(model(x), plain)
