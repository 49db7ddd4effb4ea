"""What modules and operators cost: whose work it is, how much of it, and what is said of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter import profile
from speedkit_jupyter.extras.profile.costs import _limit
from speedkit_jupyter.extras.profile.operators import PYTHON, ModuleCalls, Trace, counted, names_of
from speedkit_jupyter.extras.profile.profile import Profile
from speedkit_jupyter.torchglue import torch_profiler

pytestmark = pytest.mark.usefixtures("made_time")

CPU = torch.device("cpu")


def flops_by_module(call: Any, *models: nn.Module) -> dict[tuple[str, bool], int]:
    """Operations by module and pass."""
    found = Counter[tuple[str, bool]]()
    for work, times in counted(call, ModuleCalls(names_of(models, {})[0])).items():
        found[work.place.module, work.place.is_backward] += times * work.flops
    return {place: flops for place, flops in found.items() if flops}


def bytes_of(call: Any) -> dict[str, int]:
    """Bytes by operator."""
    found = Counter[str]()
    for work, times in counted(call, ModuleCalls({})).items():
        found[work.place.operator] += times * work.moved_bytes
    return dict(found)


def test_the_backward_pass_is_the_work_of_the_module_whose_forward_pass_it_belongs_to():
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    first, second = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4
    found = flops_by_module(lambda: net(torch.ones(8, 16)).sum().backward(), net)
    assert found == {
        ("Sequential.0", False): first,
        ("Sequential.2", False): second,
        ("Sequential.0", True): first,  # of its weight: its input needs no gradient
        ("Sequential.2", True): 2 * second,
    }


def test_what_a_checkpoint_computes_again_is_the_module_s_and_of_the_backward_pass():
    net = nn.Sequential(nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    inner = 2 * 8 * 32 * 32

    def step() -> None:
        checkpoint(net[1], net[0](torch.ones(8, 16)), use_reentrant=False).sum().backward()

    found = flops_by_module(step, net)
    assert found["Sequential.1.0", False] == inner
    assert found["Sequential.1.0", True] == 3 * inner


@pytest.mark.parametrize(
    ("call", "operator", "expected"),
    [
        (lambda x: x.t().view(10, 10), "aten::t", 0),
        (lambda x: x.detach(), "aten::detach", 0),
        (lambda x: x + 1, "aten::add", 2 * 400),
        (lambda x: x.clone().add_(1), "aten::add_", 2 * 400),
        (lambda x: x[:1].expand(10, 10) * 2, "aten::mul", 400 + 400),
        (lambda x: functional.embedding(torch.tensor([1]), x), "aten::embedding", 40 + 40 + 8),
        (lambda x: torch.empty_like(x), "aten::empty_like", 0),
    ],
)
def test_bytes_are_those_that_are_read_and_written(call, operator, expected):
    x = torch.ones(10, 10)
    assert bytes_of(lambda: call(x)).get(operator, 0) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_batches_are_counted_as_what_they_are_made_of(layout):
    parts = [torch.randn(length, 8) for length in (3, 7)]
    joined = torch.cat(parts)
    batch, net = torch.nested.nested_tensor(parts, layout=layout), nn.Linear(8, 4)
    work = counted(lambda: net(batch), ModuleCalls({}))
    if layout is torch.jagged:
        assert work.keys() == counted(lambda: net(joined), ModuleCalls({})).keys()
    assert work


def test_modules_have_the_names_that_the_user_gives_and_two_of_a_class_are_told_apart():
    nets = [nn.Sequential(nn.Linear(2, 2)) for _ in range(3)]
    names, kinds = names_of(nets, {id(nets[0]): "net"})
    assert [names[id(net[0])] for net in nets] == ["net.0", "Sequential.0", "Sequential 2.0"]
    assert kinds["net.0"] == "Linear"
    compiled = torch.compile(nets[0])
    names, _ = names_of([compiled], {id(compiled): "fast"})
    assert names[id(nets[0][0])] == "fast.0"
    assert names[id(compiled)] == names[id(nets[0])] == "fast"


def test_kernels_inside_of_an_operator_are_that_operator_s():
    net = nn.Conv2d(3, 8, 3)
    trace, calls = Trace(), ModuleCalls(names_of([net], {})[0])

    def step() -> None:
        net(torch.ones(2, 3, 16, 16)).sum().backward()

    trace.add(step, calls, CPU, {one.place.operator for one in counted(step, calls)})
    operators = {place.operator for place in trace.seconds}
    assert {"aten::convolution", "aten::convolution_backward"} <= operators
    assert not [name for name in operators if "mkldnn" in name or name == "aten::conv2d_backward"]
    assert trace.times["aten::convolution"] == 1


def test_overlapping_kernels_keep_a_device_busy_once():
    def kernel(start: float, end: float) -> Any:
        return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end))

    events = [kernel(0, 10), kernel(5, 20), kernel(6, 7), kernel(30, 40)]
    assert torch_profiler.covered_s(events) == pytest.approx(30e-6)


@pytest.mark.parametrize(
    ("computing_s", "roof_s", "expected"),
    [
        (0.5, 0.5, (0.5, "compute")),
        (0.1, 0.8, (0.8, "memory")),
        (0.1, 3.0, (0.1, "compute")),  # faster than memory: from a cache
        (0.0, 3.0, (None, "")),
        (1.3, 1.3, (1.0, "compute")),
        (0.0, 0.0, (None, "")),
    ],
)
def test_the_limit_is_of_operations_or_of_memory_and_never_more_than_all(
    computing_s, roof_s, expected
):
    assert _limit(computing_s, roof_s, 1.0) == expected


@pytest.fixture(scope="module")
def found() -> Profile:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.ones(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return profile(step, budget_s=0.8)


def test_a_profile_has_modules_operators_and_their_tree(found):
    costs = found.costs
    names = {cost.name: cost for cost in costs.modules}
    assert {"net.0", "net.2"} <= names.keys()
    assert names["net.2"].flops == 3 * 2 * 32 * 64 * 128
    assert names["net.2"].times == 1
    assert 0 < names["net.2"].backward < names["net.2"].share
    assert sum(cost.share for cost in costs.operators) == pytest.approx(1, abs=0.01)
    assert costs.tree["net"] >= costs.tree["net.0"] > 0
    assert all(0 < cost.limit <= 1 for cost in costs.modules if cost.limit is not None)
    assert {"aten::addmm", "aten::mm", PYTHON} <= {cost.name for cost in costs.operators}


@pytest.mark.real_time
def test_a_step_that_has_a_profiler_of_its_own_is_split_all_the_same():
    net = nn.Linear(4, 4)

    def step() -> None:
        with torch.profiler.profile():
            net(torch.ones(2, 4)).sum().backward()

    found = profile(step, budget_s=10)
    assert found.share("forward") > 0
    assert found.costs is None
    assert "torch's profiler is at work in this code already" in found.report().to_text()
