"""torch's own test lists for autocast and linear algebra: before, while and after plans hold."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.machines import gemm
from speedkit_jupyter.machines.gemm_kernels import Crossover

pytest.importorskip("expecttest", reason="torch's own tests need `pip install expecttest`")

# What each of torch's lists expects of autocast: the dtype of what comes out, if it is one.
LISTS = {
    "torch_expect_builtin_promote": None,
    "methods_expect_builtin_promote": None,
    "torch_16": torch.bfloat16,
    "nn_16": torch.bfloat16,
    "torch_fp32": torch.float32,
    "nn_fp32": torch.float32,
    "torch_need_autocast_promote": torch.float32,
}
PLANS = [
    {"precision": "bf16"},
    {"precision": "fp16", "grad_scaler": True},
    {"tf32": "medium"},
    {"gemm": "onednn"},
    {"sdpa": "math"},
    {"threads": 2},
    {"reduced_reduction": "full"},
    {"inference": True},
    {"fused_optimizer": True, "channels_last": True, "cudnn_benchmark": True},
]
# Of torch's list of all operators: linear algebra, and what layers are made of.
NAMES = [
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "__rmatmul__", "mv", "addmv", "addr",
    "inner", "outer", "dot", "einsum", "tensordot", "linalg.multi_dot", "linalg.vecdot",
    "nn.functional.linear", "nn.functional.bilinear", "nn.functional.conv1d",
    "nn.functional.conv2d", "nn.functional.conv_transpose2d", "nn.functional.gelu",
    "nn.functional.scaled_dot_product_attention", "nn.functional.layer_norm",
    "nn.functional.batch_norm", "nn.functional.group_norm", "nn.functional.cross_entropy",
    "cumsum", "sum", "mean", "var", "addcmul", "exp", "softmax",
]  # fmt: skip
FORBIDDING = "__allow_nonbracketed_mutation_flag"
# Of each operator's cases so many.
CASES = 6


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's products are small ones here; and none is timed in a process of its own first."""
    monkeypatch.setattr("speedkit_jupyter.optimizations.gemm._crossover_here", _every_size)


def torchs_own(name: str) -> Any:
    """A module of torch's own tests. To import it forbids everybody to set flags of backends."""
    was_frozen = torch.backends.flags_frozen()
    module = importlib.import_module(f"torch.testing._internal.{name}")
    if not was_frozen:
        setattr(torch.backends.m, FORBIDDING, True)
    return module


def _every_size(*given: Any) -> Crossover:
    return Crossover(1, 1, 1)


@pytest.fixture(params=PLANS, ids=lambda plan: "+".join(plan))
def plan(request) -> Callable[[], Any]:
    """Applies it to a net that no test calls."""

    def apply() -> Any:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 4))
        optimizer = () if "inference" in request.param else torch.optim.AdamW(net.parameters())
        net.train("inference" not in request.param)
        _, context = apply_speedups(net, SpeedConfig(**request.param), optimizer=optimizer)
        return context

    return apply


def autocast_cases() -> Iterator[tuple[str, torch.dtype | None, str, tuple, dict[str, Any]]]:
    """Each of torch's cases: its list, what it expects, the operator and its arguments."""
    torch.manual_seed(0)
    own = torchs_own("autocast_test_lists")
    lists = own.AutocastCPUTestLists("cpu")
    for name, expected in LISTS.items():
        for case in getattr(lists, name):
            operator, arguments, *rest = case
            keywords = next((one for one in rest if isinstance(one, dict)), {})
            dtype = next((one for one in rest if isinstance(one, torch.dtype)), expected)
            yield name, dtype, operator, arguments, keywords


def called(name: str, operator: str, arguments: tuple, keywords: dict[str, Any]) -> Any:
    """As torch's own tests find an operator."""
    if name.startswith("methods"):
        return getattr(arguments[0], operator)(*arguments[1:], **keywords)
    home = torch._C._nn if name.startswith("nn") else torch
    return getattr(home, operator)(*arguments, **keywords)


def autocast_results() -> list[torch.Tensor]:
    """As `test_autocast` asks: the dtype, and what the operator gives where its arguments are cast.

    Autocast is the user's own, in bf16.
    """
    results = []
    for name, dtype, operator, arguments, keywords in autocast_cases():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = called(name, operator, arguments, keywords)
            if isinstance(result, torch.Tensor) and dtype is not None:
                assert result.dtype == dtype, operator
            if name.endswith(("_16", "_fp32")):
                cast = [
                    one.to(dtype)
                    if isinstance(one, torch.Tensor) and one.is_floating_point()
                    else one
                    for one in arguments
                ]
                with torch.autocast("cpu", enabled=False):
                    control = called(name, operator, tuple(cast), keywords)
                torch.testing.assert_close(result, control, rtol=0, atol=0)
        if isinstance(result, torch.Tensor):
            results.append(result)
    assert not torch.is_autocast_enabled("cpu")
    return results


def test_autocast_does_what_torch_says_before_while_and_after_a_plan_holds(plan):
    before = autocast_results()
    context = plan()
    try:
        torch.testing.assert_close(autocast_results(), before)
    finally:
        context.restore()
    torch.testing.assert_close(autocast_results(), before, rtol=0, atol=0)


def operator_results(name: str, seed: int = 0) -> list[Any]:
    """What torch's own cases give, in float32, with the gradients of what they are derived by."""
    torch.manual_seed(seed)
    own = torchs_own("common_methods_invocations")
    results: list[Any] = []
    for info in (info for info in own.op_db if info.name == name and not info.variant_test_name):
        samples = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
        for sample, _ in zip(samples, range(CASES), strict=False):
            result = info(sample.input, *sample.args, **sample.kwargs)
            if not isinstance(result, torch.Tensor):
                continue
            results.append(result.detach().clone())
            leaves = [
                one
                for one in (sample.input, *sample.args)
                if isinstance(one, torch.Tensor) and one.requires_grad
            ]
            if result.requires_grad and leaves:
                given = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
                results += [one for one in given if one is not None]
    return results


@pytest.mark.slow
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", NAMES)
def test_operators_give_the_same_within_rounding_and_afterwards_bit_for_bit(name, plan):
    before = operator_results(name)
    assert before, f"torch has no cases of {name}"
    context = plan()
    try:
        torch.testing.assert_close(operator_results(name), before, rtol=1e-4, atol=1e-4)
    finally:
        context.restore()
    torch.testing.assert_close(operator_results(name), before, rtol=0, atol=0)


def test_onednn_multiplies_under_its_own_plan_alone(plan, request):
    context = plan()
    try:
        is_asked = "gemm" in request.node.callspec.id
        assert (gemm.engine() == gemm.ONEDNN) == is_asked
    finally:
        context.restore()
    assert gemm.engine() != gemm.ONEDNN


def test_plans_hold_also_where_torch_s_own_tests_forbid_to_set_flags(request):
    request.addfinalizer(lambda: setattr(torch.backends.m, FORBIDDING, True))
    torch.backends.disable_global_flags()
    net = nn.Linear(4, 4)
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    _, context = apply_speedups(net, SpeedConfig(cudnn_benchmark=True, tf32="medium"))
    assert context.active
    context.restore()
    assert (torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32) == before
    assert torch.backends.flags_frozen()
