"""sdpa: which attention kernel is tried first."""

from __future__ import annotations

import pytest
import torch
import torch.compiler.config
from torch.nn.functional import scaled_dot_product_attention

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan, sdp_context
from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations.attention import flash_attention
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.sdpa import Sdpa

ON_GPU = Facts(device="cuda:0", devices=("cuda:0",), parameters=1)


def kernels() -> str:
    """The names of the attention operations that run."""
    q = torch.rand(1, 2, 8, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scaled_dot_product_attention(q, q, q)
    return " ".join(e.key for e in profile.key_averages() if "attention" in e.key)


def test_math_runs_the_math_kernel_while_applied():
    assert "flash" in kernels()
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(sdpa="math"))[1]:
        assert "flash" not in kernels()
        assert "math" in kernels()
    assert "flash" in kernels()


def test_the_context_holds_where_another_plan_is_in_force():
    kept = torch.nn.Linear(2, 2)
    _, first = apply_speedups(kept, SpeedConfig(sdpa="math"))
    first_tag = torch.compiler.config.cache_key_tag
    assert "sdpa:math" in first_tag
    torch.backends.cuda.enable_flash_sdp(True)  # somebody else's wish
    with sdp_context(first):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    first.restore()
    assert first.kept == ("sdp.flash",)
    assert torch.compiler.config.cache_key_tag == ""


def test_auto_leaves_torchs_order(hardware):
    assert not plan(SpeedConfig(), hardware("h200"), ON_GPU)["sdpa"].active


def test_flash_on_a_cpu_is_declined_with_the_reason():
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(sdpa="flash"))[1] as context:
        assert context.plan["sdpa"].declined
        assert "CUDA kernel" in context.plan["sdpa"].reason


def test_flash_on_a_t4_becomes_efficient(hardware):
    decision = plan(SpeedConfig(sdpa="flash"), hardware("t4"), ON_GPU)["sdpa"]
    assert (decision.value, decision.active, decision.declined) == ("efficient", True, True)


def test_an_input_that_the_chosen_kernel_can_not_take_goes_to_another(machine):
    machine("cpu")
    q = torch.rand(1, 2, 8, 16, dtype=torch.float64)
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, SpeedConfig(sdpa="math"))[1]:
        assert scaled_dot_product_attention(q, q, q).isfinite().all()


# --- FlashAttention's own packages ---


registers_others = pytest.mark.skipif(
    not flash_attention.switches(), reason="this torch registers none"
)


@pytest.mark.parametrize(
    ("machine", "word", "libraries", "why"),
    [
        ("t4", "fa4", {"flash-attn-4": "4.0"}, "needs an NVIDIA GPU of compute capability 9.0 or"),
        ("mi300x", "fa3", {"flash-attn-3": "3.0"}, "needs an NVIDIA GPU"),
        pytest.param("h200", "fa3", {}, "pip install flash-attn-3", marks=registers_others),
        pytest.param(
            "h200",
            "fa4",
            {"flash-attn-3": "3.0"},
            "pip install flash-attn-4",
            marks=registers_others,
        ),
    ],
)
def test_a_package_is_declined_where_it_can_not_be(hardware, machine, word, libraries, why):
    here = hardware(machine).model_copy(update={"libraries": libraries})
    decision = plan(SpeedConfig(sdpa=word), here, ON_GPU)["sdpa"]
    assert decision.declined
    assert not decision.active
    assert why in decision.reason


def test_an_older_torch_is_the_reason_where_it_takes_no_other_kernel(hardware, monkeypatch):
    monkeypatch.setattr(flash_attention, "switches", dict)
    here = hardware("h200").model_copy(update={"libraries": {"flash-attn-3": "3.0"}})
    decision = plan(SpeedConfig(sdpa="fa3"), here, ON_GPU)["sdpa"]
    assert decision.declined
    assert "needs a newer torch" in decision.reason


@registers_others
@pytest.mark.parametrize(("word", "library"), [("fa3", "flash-attn-3"), ("fa4", "flash-attn-4")])
def test_by_request_it_stands_in_for_the_flash_kernel(hardware, word, library):
    here = hardware("h200").model_copy(update={"libraries": {library: "4.0"}})
    decision = plan(SpeedConfig(sdpa=word), here, ON_GPU)["sdpa"]
    assert decision.active
    assert "dropout" in decision.reason
    assert plan(SpeedConfig(sdpa=word), hardware("cpu"))["sdpa"].declined
    assert word not in Sdpa().candidates(here, ON_GPU)
    snippet = Sdpa().code(decision, ON_GPU, "torch")
    assert f'activate_flash_attention_impl("{word.upper()}")' in snippet.setup
    assert "FLASH_ATTENTION, " in snippet.setup[1]


@pytest.fixture
def registered():
    """torch's own registry with one that notes when it is in force, which needs no GPU."""
    import torch.nn.attention
    from torch.nn.attention import _registry

    before, there = dict(_registry._FLASH_ATTENTION_IMPLS), []

    class Handle:
        def __init__(self) -> None:
            there.append(self)

        def remove(self) -> None:
            there.remove(self)

    torch.nn.attention.register_flash_attention_impl("FA4", register_fn=Handle)
    yield there
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    _registry._FLASH_ATTENTION_IMPLS.clear()
    _registry._FLASH_ATTENTION_IMPLS.update(before)


@registers_others
def test_it_is_registered_while_applied_and_never_after(registered):
    before = flags.snapshot()
    decision = Decision("sdpa", "fa4", "", active=True, asked=True)
    target = Target(torch.nn.Linear(2, 2))
    with Sdpa().applied(decision, target):
        assert (flash_attention.active(), len(registered)) == ("FA4", 1)
        with Sdpa().around_forward(decision, target)():
            assert len(registered) == 1
        assert len(registered) == 1
    assert (flash_attention.active(), registered) == ("", [])
    with pytest.raises(ZeroDivisionError), Sdpa().applied(decision, target):
        1 / 0  # noqa: B018
    assert registered == []
    assert flags.snapshot() == before


@registers_others
def test_one_that_can_not_be_imported_changes_nothing(registered):
    def missing():
        raise ModuleNotFoundError("No module named 'flash_attn'")

    torch.nn.attention.register_flash_attention_impl("FA4", register_fn=missing)
    before = flags.snapshot()
    decision = Decision("sdpa", "fa4", "", active=True, asked=True)
    with (
        pytest.raises(ModuleNotFoundError),
        Sdpa().applied(decision, Target(torch.nn.Linear(2, 2))),
    ):
        pass
    assert flags.snapshot() == before


@pytest.mark.gpu
@pytest.mark.parametrize("word", ["fa3", "fa4"])
def test_it_computes_what_torchs_own_kernel_computes(word):
    model = torch.nn.Linear(2, 2, device="cuda")
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v)
    with apply_speedups(model, SpeedConfig(sdpa=word).alone())[1] as context:
        if not context.plan["sdpa"].active:
            pytest.skip(context.plan["sdpa"].reason)
        assert torch.allclose(scaled_dot_product_attention(q, k, v), expected, atol=2e-2)
    assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
