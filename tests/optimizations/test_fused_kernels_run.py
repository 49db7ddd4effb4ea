"""fused_kernels: Liger's kernels give what the modules give, and all of it goes without a trace.

They run on a CUDA device, or on the CPU in Triton's interpreter:
    TRITON_INTERPRET=1 pytest -n 0 tests/optimizations/test_fused_kernels_run.py
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import as_compiled
from language_models import batch, language_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.fusing import liger
from speedkit_jupyter.optimizations.fusing.fused_calls import Fused
from speedkit_jupyter.optimizations.properties.calls import SLOT, around
from speedkit_jupyter.support.exceptions import SpeedKitError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
HERE = Hardware.detect()
MISSING = (
    "needs liger-kernel and triton"
    if "liger-kernel" not in HERE.libraries or not HERE.triton
    else "needs a CUDA device, or TRITON_INTERPRET=1"
)
RUNS = MISSING.endswith("=1") and (INTERPRETED or DEVICE == "cuda")
pytestmark = pytest.mark.skipif(not RUNS, reason=MISSING)
if DEVICE == "cuda":
    pytestmark = [pytestmark, pytest.mark.gpu]

pytest.importorskip("transformers")
ENTRY = named("fused_kernels")
ON = SpeedConfig(fused_kernels=True).alone()
FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "olmo2", "phi3"]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has Triton too, in this process; and the plan is for where the model is."""
    if INTERPRETED:
        monkeypatch.setattr(liger, "INTERPRETED", {"cpu"})
        as_compiled(monkeypatch)
    if DEVICE == "cuda":
        monkeypatch.setenv("SPEEDKIT_HARDWARE", "")


def only(*kinds: str) -> SpeedConfig:
    wish = {"enabled": True} | {kind: kind in kinds for kind in ("rms_norm", "swiglu", "rope")}
    return SpeedConfig(fused_kernels=wish).alone()


def model_of(family: str, seed: int = 0, **more: Any) -> nn.Module:
    return language_model(family, seed, **more).to(DEVICE)


def words(**more: Any) -> dict[str, torch.Tensor]:
    return {name: value.to(DEVICE) for name, value in batch(**more).items()}


def step(model: nn.Module, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    """Loss, gradients, and the outputs."""
    model.zero_grad()
    outputs = model(**(words() | more))
    outputs.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return outputs.loss.detach(), gradients, outputs


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative, by norm."""
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm().clamp_min(1e-12))


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert distance(gradient, expected[name]) < 2e-5, name


def looks(model: nn.Module) -> list[Any]:
    """All that a plan may touch, by identity where there is one."""
    return [
        (id(part), type(part), type(part).forward, sorted(part.__dict__), part.training,
         part.__dict__.get(SLOT), [(n, id(p), p.data_ptr()) for n, p in part.named_parameters()],
         [id(v) for n, v in part.__dict__.items() if n.endswith("hooks")])
        for part in model.modules()
    ]  # fmt: skip


class Running:
    """Counts the calls of Liger's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        functional = liger.imported()
        for name in ("rms_norm", "swiglu", "geglu", "rope"):
            self._count(monkeypatch, functional, name)

    def _count(self, monkeypatch: pytest.MonkeyPatch, functional: Any, name: str) -> None:
        original = getattr(functional, f"liger_{name}")

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return original(*args, **kwargs)

        monkeypatch.setattr(functional, f"liger_{name}", counted)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    return Running(monkeypatch)


# --- what the kernels compute ---


@pytest.mark.parametrize(
    ("family", "seed"),
    [*((family, 0) for family in FAMILIES), ("llama", 1), ("gemma", 1), ("qwen3", 2)],
)
def test_a_step_in_float32_gives_the_same_loss_outputs_and_gradients(family, seed, running):
    model = model_of(family, seed)
    before, state = looks(model), copy.deepcopy(model.state_dict())
    loss, expected, outputs = step(model)
    with apply_speedups(model, ON)[1] as context:
        found_loss, found, found_outputs = step(model)
        again_loss, again, _ = step(model)
        assert "fused_kernels" not in context.notes
    assert distance(found_loss, loss) < 1e-6
    assert distance(found_outputs.logits, outputs.logits) < 1e-5
    assert_near(found, expected)
    assert torch.equal(found_loss, again_loss)
    assert_near(again, found)
    norms = sum("RMSNorm" in type(part).__name__ for part in model.modules())
    gate = "geglu" if family.startswith("gemma") else "swiglu"
    parts = {} if family == "phi3" else {gate: 4} if family == "olmo2" else {gate: 4, "rope": 4}
    assert running.calls == {"rms_norm": 2 * norms, **parts}
    assert looks(model) == before
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    assert torch.equal(step(model)[0], loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_bf16_is_as_near_to_float32_as_the_models_own(family, running):
    exact, model = model_of(family), model_of(family).bfloat16()
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    loss, gradients, _ = step(exact)
    own_loss, own, _ = step(model)
    with apply_speedups(model, ON)[1] as context:
        found_loss, found, outputs = step(model)
        assert "fused_kernels" not in context.notes
    assert running.calls["rms_norm"]
    assert outputs.logits.dtype is torch.bfloat16
    assert distance(found_loss, loss) < 2 * distance(own_loss, loss) + 1e-2
    assert {g.dtype for g in found.values()} == {torch.bfloat16}
    off = sum(distance(found[name], gradients[name]) for name in found)
    own_off = sum(distance(own[name], gradients[name]) for name in own)
    assert off < 1.5 * own_off


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_under_autocast_dtypes_are_the_models_own(family, running):
    model = model_of(family)
    seen: list[list[torch.dtype]] = []

    def note(dtypes: list[torch.dtype]) -> Any:
        return lambda module, args, result: dtypes.append(
            (result[0] if isinstance(result, tuple) else result).dtype
        )

    for config in (SpeedConfig().alone(), ON):
        dtypes: list[torch.dtype] = []
        layers = [layer.register_forward_hook(note(dtypes)) for layer in model.model.layers]
        with apply_speedups(model, config)[1], torch.autocast(DEVICE, torch.bfloat16):
            outputs = model(**words())
            dtypes.append(outputs.logits.dtype)
            for part in model.modules():
                if "RMSNorm" in type(part).__name__:
                    width = part.weight.shape[0]
                    for dtype in (torch.float32, torch.bfloat16):
                        x = torch.randn(2, 3, width, dtype=dtype, device=DEVICE)
                        dtypes.append(part(x).dtype)
        outputs.loss.backward()
        seen.append(dtypes)
        for layer in layers:
            layer.remove()
    assert seen[0] == seen[1]
    assert running.calls["rms_norm"]
    assert ("rope" in running.calls) is (family != "olmo2")


@settings(max_examples=25, deadline=None)
@given(
    which=st.sampled_from(["llama", "gemma", "olmo2", "torch"]),
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    width=st.sampled_from([1, 2, 3, 7, 16, 33, 130]),
    dtypes=st.sampled_from(
        [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"),
         ("float32", "bfloat16"), ("float64", "float64")]
    ),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_norms_of_any_shape_agree_forwards_and_backwards(which, shape, width, dtypes, scale, seed):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    if which == "torch" and len(set(dtypes)) > 1:
        return
    kinds = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "olmo2": Olmo2RMSNorm}
    torch.manual_seed(seed)
    eps = 1e-6 if seed % 2 else None
    norm: Any = kinds[which](width) if which in kinds else nn.RMSNorm(width, eps)
    norm = norm.to(DEVICE, getattr(torch, dtypes[1]))
    with torch.no_grad():
        norm.weight.add_(torch.randn_like(norm.weight))
    x = (scale * torch.randn(*shape, width)).to(DEVICE, getattr(torch, dtypes[0]))
    upstream = torch.randn(*shape, width).to(DEVICE)

    def run(module: Any, x: Any) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = module(x)
        gradients = torch.autograd.grad(y, [x, module.weight], upstream.to(y.dtype))
        return [y.detach(), *gradients]

    own = run(norm, x)
    with apply_speedups(norm, ON)[1]:
        found = run(norm, x)
    assert [t.dtype for t in own] == [t.dtype for t in found]
    half = "bfloat16" in dtypes
    for place, (one, other) in enumerate(zip(found, own, strict=True)):
        assert one.shape == other.shape
        near = 3e-2 if half else 1e-5
        # The gradient of x is what is left of two sums: near zero for a row of one number.
        assert (one.double() - other.double()).norm() <= near * (
            other.double().norm() + (upstream.double().norm() / scale if place == 1 else 0)
        )


@settings(max_examples=15, deadline=None)
@given(
    act=st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    rows=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    bias=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 1000),
)
def test_gated_mlps_of_any_size_agree_forwards_and_backwards(act, rows, sizes, bias, dtype, seed):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=sizes[0], intermediate_size=sizes[1], hidden_act=act, mlp_bias=bias,
        num_attention_heads=1, head_dim=2,
    )  # fmt: skip
    mlp = LlamaMLP(config).to(DEVICE, getattr(torch, dtype))
    x = torch.randn(2, rows, sizes[0], device=DEVICE, dtype=getattr(torch, dtype))

    def run() -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        y = mlp(given)
        return [y.detach(), *torch.autograd.grad(y.sum(), [given, *mlp.parameters()])]

    own = run()
    with apply_speedups(mlp, ON)[1]:
        found = run()
    for one, other in zip(found, own, strict=True):
        assert one.dtype == other.dtype
        assert distance(one, other) < (3e-2 if dtype == "bfloat16" else 1e-5)


class OwnNorm(nn.Module):
    """As a notebook may have it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.eps, self.weight = 1e-5, nn.Parameter(torch.rand(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        y = self._norm(x.float()).type_as(x)
        return y * self.weight


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, inner), nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.mlp = nn.RMSNorm(11), OwnNorm(11), FeedForward(11, 23)
        self.again = self.norm

    def forward(self, x):
        x = self.first(x)
        return self.again(x + self.mlp(self.norm(x)))


def own() -> Own:
    torch.manual_seed(0)
    return Own().to(DEVICE)


INPUTS = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def trained(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_model_of_ones_own_trains_the_same(running):
    plain = trained(own())
    model = own()
    with apply_speedups(model, ON)[1] as context:
        changes = str(context.changes())  # the shared norm is one module
        assert "2 of 2 by Liger" in changes
        assert "1 of 1 by Liger" in changes
        found = trained(model, 2)
    assert running.calls == {"rms_norm": 6, "swiglu": 2}
    for one, other in zip(trained(copy.deepcopy(model), 1), found, strict=True):
        assert one.shape == other.shape
    twin = own()
    for one, other in zip(found, trained(twin, 2), strict=True):
        assert distance(one, other) < 1e-4
    assert len(plain) == len(found)


# --- where it is not for a kernel, the module runs as ever ---


@pytest.mark.parametrize(
    "use",
    [
        lambda norm, x: norm(x.double()),
        lambda norm, x: norm(x[:, :0]),
        lambda norm, x: norm(x=x),
        lambda norm, x: torch.func.vmap(norm)(x),
        lambda norm, x: torch.func.jvp(norm, (x,), (x,))[1],
        lambda norm, x: torch.func.jacrev(norm)(x[0, 0]),
        lambda norm, x: torch.jit.trace(norm, x, check_trace=False)(x),
        lambda norm, x: torch.export.export(norm, (x,)).module()(x),
    ],
    ids=["double", "empty", "keyword", "vmap", "jvp", "jacobian", "traced", "exported"],
)
def test_what_no_kernel_takes_is_computed_by_the_module_itself(use, running):
    torch.manual_seed(0)
    norm = OwnNorm(11).to(DEVICE)
    expected = use(norm, INPUTS)
    with apply_speedups(norm, ON)[1]:
        assert torch.equal(use(norm, INPUTS), expected)
        assert not running.calls
        norm(INPUTS)
        assert running.calls


def test_a_wrong_input_is_the_users_error_and_stops_nothing(running):
    norm = OwnNorm(11).to(DEVICE)
    mlp = FeedForward(11, 5).to(DEVICE)
    model = nn.ModuleList([norm, mlp])
    with apply_speedups(model, ON)[1] as context:
        for module in (norm, mlp):
            with pytest.raises(RuntimeError):
                module(INPUTS[..., :7])
            module(INPUTS)
        assert "fused_kernels" not in context.notes
    assert running.calls == {"rms_norm": 1, "swiglu": 1}


def test_hooks_see_what_they_would_see(running):
    model, seen = model_of("llama"), []
    mlp = model.model.layers[0].mlp
    with apply_speedups(model, ON)[1]:
        handles = [
            mlp.gate_proj.register_forward_hook(lambda m, a, result: seen.append(result)),
            model.model.norm.register_forward_hook(lambda m, a, result: seen.append(result)),
            model.model.layers[1].self_attn.q_proj.register_forward_hook(
                lambda m, a, result: seen.append(result)
            ),
        ]
        kept = step(model)
        copies = [one.detach().clone() for one in seen]
        for handle in handles:
            handle.remove()
    assert len(seen) == 3
    assert all(map(torch.equal, seen, copies))
    assert running.calls == {"rms_norm": 4, "swiglu": 1, "rope": 1}
    seen.clear()
    assert_near(kept[1], step(model)[1])


def test_outputs_that_someone_else_needs_are_not_written_over(running):
    """Of a gate whose own backward pass needs its result, one that is the input itself, and one
    that gives it to others too.
    """

    class Kept(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            kept.append(y.sin().sum())
            return y

    kept: list[torch.Tensor] = []
    relu = nn.Sequential(nn.Linear(11, 11), nn.ReLU())
    for part in (lambda: relu, nn.Identity, nn.Sigmoid, lambda: Kept(11, 11)):
        torch.manual_seed(0)
        mlp = FeedForward(11, 11).to(DEVICE)
        mlp.w1 = part().to(DEVICE)
        given = INPUTS.clone().requires_grad_()

        def gradients(mlp: Any = mlp, given: torch.Tensor = given) -> tuple[torch.Tensor, ...]:
            wanted = [given, *mlp.parameters()]
            kept.clear()
            loss = mlp(given * 2).sum()
            first = torch.autograd.grad(loss, wanted, retain_graph=True)
            return first + (torch.autograd.grad(kept[0], mlp.w1.weight) if kept else ())

        expected = gradients()
        with apply_speedups(mlp, ON)[1]:
            found = gradients()
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
    assert not running.calls


def test_a_second_backward_pass_and_second_derivatives_are_refused_by_one_line():
    for module, second in ((OwnNorm(11), False), (FeedForward(11, 5), True)):
        module = module.to(DEVICE)
        given = INPUTS.clone().requires_grad_()
        with apply_speedups(module, ON)[1]:
            result = module(given).sum()
            first = torch.autograd.grad(result, given, retain_graph=True)[0]
            if second:
                with pytest.raises(SpeedKitError, match="swiglu: false"):
                    torch.autograd.grad(result, given, retain_graph=True)
            else:
                assert torch.equal(first, torch.autograd.grad(result, given)[0])
            with pytest.raises(SpeedKitError, match="no second derivative"):
                torch.autograd.grad(module(given).sum(), given, create_graph=True)
        torch.autograd.grad(module(given).sum(), given, create_graph=True)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope"])
def test_a_kernel_that_fails_leaves_the_model_as_it_was_and_says_so(name, monkeypatch):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of shared memory")

    model = model_of("llama")
    loss, gradients, _ = step(model)
    monkeypatch.setattr(liger.imported(), f"liger_{name}", fails)
    with apply_speedups(model, only(name))[1] as context:
        with pytest.warns(UserWarning, match=f"Liger's {name} failed"):
            found_loss, found, _ = step(model)
        assert "out of shared memory" in context.notes["fused_kernels"]
        step(model)
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(found[key], gradients[key]) for key in found)


def test_memory_that_is_not_there_stays_the_users_error(monkeypatch):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    norm = OwnNorm(11).to(DEVICE)
    monkeypatch.setattr(liger.imported(), "liger_rms_norm", fails)
    with apply_speedups(norm, ON)[1], pytest.raises(torch.OutOfMemoryError):
        norm(INPUTS)


# --- undo ---


def test_nothing_of_transformers_is_another_while_it_is_in_force():
    from transformers.models.llama import modeling_llama

    def kept() -> list[Any]:
        classes = [v for v in vars(modeling_llama).values() if isinstance(v, type)]
        return [dict(vars(modeling_llama)), [(c, dict(vars(c))) for c in classes]]

    model, other = model_of("llama"), model_of("llama", 1)
    before, outside = kept(), looks(other)
    with apply_speedups(model, ON)[1]:
        step(model)
        assert kept() == before
        assert looks(other) == outside
        assert not any(around(part, Fused) for part in other.modules())
    assert kept() == before


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
def test_everything_is_taken_back_whatever_ends_the_block(ending):
    model = model_of("qwen3")
    before, random = looks(model), torch.get_rng_state()
    try:
        with apply_speedups(model, ON)[1] as context:
            assert ENTRY.observe(Target(model)) == {
                "model.rms_norm": "9 of 9 by Liger",
                "model.swiglu": "2 of 2 by Liger",
                "model.rope": "2 of 2 by Liger",
            }
            assert context.plan["fused_kernels"].active
            if ending is not None:
                raise ending
    except (ValueError, KeyboardInterrupt):
        pass
    assert looks(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert {v[0] for v in ENTRY.observe(Target(model)).values()} == {"0"}


def test_overlapping_plans_are_taken_back_in_any_order(running):
    for order in itertools.permutations(range(3)):
        model, other = own(), nn.Sequential()
        other.append(model.norm).append(nn.RMSNorm(11).to(DEVICE))
        before = looks(model), looks(other)
        plain = model(INPUTS)
        contexts = [apply_speedups(m, ON)[1] for m in (model, model.mlp, other)]
        for place in order:
            running.calls.clear()
            assert torch.allclose(model(INPUTS), plain, atol=1e-5)
            assert running.calls
            contexts[place].restore()
        assert (looks(model), looks(other)) == before
        running.calls.clear()
        assert torch.equal(model(INPUTS), plain)
        assert not running.calls


def test_copies_and_files_have_nothing_of_it(running):
    model = model_of("llama")
    expected = step(model)[0]
    with apply_speedups(model, ON)[1]:
        step(model)
        copied, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        keys = list(model.state_dict())
    file.seek(0)
    running.calls.clear()
    for other in (copied, torch.load(file, weights_only=False)):
        assert not any(SLOT in part.__dict__ and part.__dict__[SLOT] for part in other.modules())
        assert torch.equal(step(other)[0], expected)
        assert list(other.state_dict()) == keys
    assert not running.calls


def test_nothing_is_kept_alive_by_it():
    model = own()
    context = apply_speedups(model, ON)[1]
    model(INPUTS).sum().backward()
    references = [weakref.ref(part) for part in model.modules()]
    del model, context
    gc.collect()
    assert [one() for one in references] == [None] * len(references)


# --- beside other things ---


def test_what_is_computed_again_for_the_backward_pass_is_the_same(running):
    expected = step(model_of("llama"))[1]
    both = SpeedConfig(fused_kernels=True, activation_checkpointing=True).alone()
    model = model_of("llama")
    with apply_speedups(model, both)[1] as context:
        assert context.plan["activation_checkpointing"].active
        assert_near(step(model)[1], expected)
    assert running.calls["rms_norm"] > 5
    for reentrant in (False, True):
        model = model_of("llama")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with apply_speedups(model, ON)[1]:
            assert_near(step(model)[1], expected)
    mlp = own()
    plain = torch.autograd.grad(mlp(INPUTS).sum(), list(mlp.parameters()))
    with apply_speedups(mlp, ON)[1]:
        again = checkpoint(mlp, INPUTS, use_reentrant=False)
        found = torch.autograd.grad(again.sum(), list(mlp.parameters()))
    for one, other in zip(found, plain, strict=True):
        assert distance(one, other) < 2e-5


def test_within_a_block_that_is_computed_again_by_an_outer_plan(running):
    model = model_of("llama")
    expected = step(model)[1]
    outer = SpeedConfig(activation_checkpointing=True).alone()
    with apply_speedups(model, outer)[1], apply_speedups(model.model.layers[0], ON)[1]:
        assert_near(step(model)[1], expected)
    assert running.calls


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_words_are_generated_as_without_it(family, running):
    """One after another: Liger's rotation of a single position goes by a stride that says nothing,
    and was wrong for the second row of Gemma 3, whose norms lay it out anew.
    """
    model = model_of(family).eval()
    asked = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    inputs = words()["input_ids"]
    expected = model.generate(inputs, **asked)
    with apply_speedups(model, ON)[1]:
        assert torch.equal(model.generate(inputs, **asked), expected)
    assert running.calls["rope"]


def test_compiled_calls_and_int8_stay_out_of_its_way():
    model = own()
    asked = SpeedConfig(fused_kernels=True, compile=True).alone()
    with apply_speedups(model, asked)[1] as context:
        assert context.plan["fused_kernels"].active
        assert "passes by fused_kernels" in context.plan["compile"].reason


# --- measured ---


def test_a_thread_that_is_not_measured_has_nothing_of_it(tmp_path, running):
    model, file = own(), tmp_path / "seen"

    def look() -> bool:
        before = sum(running.calls.values())
        model(INPUTS)
        return sum(running.calls.values()) > before

    def measured() -> None:
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            there, here = pool.submit(look).result(), look()
        with file.open("a") as opened:
            opened.write(f"{here} {there}\n")

    benchmark(measured, "baseline,fused_kernels", model=model, budget_s=0.3)
    assert {*file.read_text().splitlines()} == {"False False", "True False"}


@pytest.mark.parametrize("variants", ["fused_kernels,fused_kernels:swiglu", "fused_kernels:rope"])
def test_it_is_measured_in_the_words_of_the_catalog_and_leaves_the_model_as_it_was(variants):
    with_labels = "rope" in variants
    model = model_of("llama", num_hidden_layers=1) if with_labels else own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, inputs = looks(model), words()

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**inputs).loss if with_labels else model(INPUTS).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    variants = f"baseline,{variants}"
    found = benchmark(train, variants, model=model, optimizer=optimizer, budget_s=5)
    assert [record.name for record in found.records] == variants.split(",")
    assert not any(record.failure for record in found.records)
    assert {record.accuracy.verdict for record in found.records} <= {"exact", "rounding"}
    assert looks(model) == before


def test_a_step_whose_kernel_is_wrong_is_found_out(monkeypatch):
    """The accuracy check sees what the kernel gives, not what the module would give."""
    functional = liger.imported()
    original = functional.liger_rms_norm
    monkeypatch.setattr(functional, "liger_rms_norm", lambda *given: original(*given) * 1.3)
    model = own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()

    found = benchmark(
        train, "baseline,fused_kernels", model=model, optimizer=optimizer, budget_s=0.5
    )
    assert found.verdict(found.records[1]) == "wrong"


# --- the code to take along ---


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_the_code_computes_the_same(family, tmp_path):
    model = model_of(family)
    with apply_speedups(model, only("rms_norm", "swiglu"))[1]:
        loss, gradients, _ = step(model)
    text = code(plan(only("rms_norm", "swiglu"), facts=Facts.read(model)))
    names: dict[str, Any] = {"model": model}
    exec(text, names)
    found_loss, found, _ = step(model)
    assert torch.equal(found_loss, loss)
    assert_near(found, gradients)


def test_the_code_for_rotations_is_ligers_patch():
    from transformers.models.llama import modeling_llama

    original, model = modeling_llama.apply_rotary_pos_emb, model_of("llama")
    loss = step(model)[0]
    text = code(plan(only("rope"), facts=Facts.read(model)))
    try:
        exec(text, {"model": model})
        assert modeling_llama.apply_rotary_pos_emb is not original
        found = step(model)[0]
    finally:
        modeling_llama.apply_rotary_pos_emb = original
    assert distance(found, loss) < 1e-5
    assert "liger_kernel" in sys.modules
