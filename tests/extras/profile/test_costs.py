"""Check the seconds of modules and operators, and the module that an operator belongs to."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter import profile
from speedkit_jupyter.extras.advise.advice import Advice
from speedkit_jupyter.extras.profile.costs import PYTHON, OperatorTrace, covered_s, names_of
from speedkit_jupyter.extras.profile.profile import Profile
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.support.units import seconds
from speedkit_jupyter.torchglue import torch_profiler
from speedkit_jupyter.torchglue.private import innermost_function_mode

CPU = torch.device("cpu")


def traced(call: Callable[[], object], *models: nn.Module) -> OperatorTrace:
    """Return the trace of one call."""
    trace = OperatorTrace()
    trace.add(call, names_of(step_of(call, models))[0], CPU)
    return trace


def places(trace: OperatorTrace, operator: str) -> set[tuple[str, bool]]:
    """Return the pairs `(module, is_backward)` for which an operator ran."""
    return {(one.module, one.is_backward) for one in trace.seconds if one.operator == operator}


def test_the_backward_pass_is_the_work_of_the_module_whose_forward_pass_it_belongs_to():
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    trace = traced(lambda: net(torch.ones(8, 16)).sum().backward(), net)
    linear = {"net.0", "net.2"}
    assert places(trace, "aten::linear") == {(name, False) for name in linear}
    assert places(trace, "aten::mm") == {(name, True) for name in linear}


def test_a_recomputed_forward_pass_counts_for_its_module():
    net = nn.Sequential(nn.Linear(16, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()))

    def step() -> None:
        checkpoint(net[1], net[0](torch.ones(8, 16)), use_reentrant=False).sum().backward()

    trace = traced(step, net)
    inner = {place for place in places(trace, "aten::linear") if place[0] == "net.1.0"}
    assert ("net.1.0", False) in inner
    assert trace.times["module: net.1.0"] == 2


def test_modules_have_the_names_that_the_user_gives_and_two_of_a_class_are_told_apart():
    nets = [nn.Sequential(nn.Linear(2, 2)) for _ in range(3)]
    net = nets[0]
    names, kinds = names_of(step_of(lambda: net, nets))
    assert [names[id(net[0])] for net in nets] == ["net.0", "Sequential.0", "Sequential 3.0"]
    assert kinds["net.0"] == "Linear"
    fast = torch.compile(net)
    names, _ = names_of(step_of(lambda: fast(None), fast))
    assert names[id(nets[0][0])] == "fast.0"
    assert names[id(fast)] == names[id(nets[0])] == "fast"


def test_a_layer_of_one_of_two_models_is_called_by_its_model():
    nets = {"a": nn.Sequential(nn.Linear(8, 8)), "b": nn.Linear(8, 8)}
    assert "nets['a'].0" in str(profile(lambda: nets["b"](nets["a"](torch.ones(1, 8)))))


def test_operators_inside_of_an_operator_are_part_of_it():
    net = nn.Conv2d(3, 8, 3)
    trace = traced(lambda: net(torch.ones(2, 3, 16, 16)).sum().backward(), net)
    operators = {place.operator for place in trace.seconds}
    assert {"aten::conv2d", "aten::convolution_backward"} <= operators
    assert not {"aten::convolution", "aten::_convolution", "aten::mkldnn_convolution"} & operators
    assert trace.times["aten::conv2d"] == 1


def test_overlapping_kernels_keep_a_device_busy_once():
    def kernel(start: float, end: float) -> Any:
        return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end))

    events = [kernel(0, 10), kernel(5, 20), kernel(6, 7), kernel(30, 40)]
    assert covered_s(events) == pytest.approx(30e-6)


@pytest.mark.parametrize(("kernels", "busy_s"), [([(5, 30), (20, 40)], 35e-6), ([], None)])
def test_the_busy_time_of_a_device_is_that_of_its_kernels(monkeypatch, kernels, busy_s):
    """Expect no busy time if the profiler sees no kernels, as on MPS."""
    kinds = {"aten::mm": (DeviceType.CPU, [(0, 10)]), "sgemm": (DeviceType.CUDA, kernels)}
    events = [
        FunctionEvent(number, name, 1, start, end, device_type=kind)
        for name, (kind, times) in kinds.items()
        for number, (start, end) in enumerate(times)
    ]
    recorded = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(torch_profiler, "profiled", lambda: nullcontext(recorded))
    monkeypatch.setattr(torch_profiler, "was_alone", lambda trace: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    trace = OperatorTrace()
    trace.add(lambda: None, {}, torch.device("cuda"))
    assert trace.busy_s == pytest.approx(busy_s)
    assert trace.times["aten::mm"] == 1


@pytest.fixture(scope="module")
def found() -> Profile:
    """Profile a step on the real clock, once for the tests of this file."""
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.ones(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return profile(step, budget_s=6.0)  # in real time, on a machine that may be busy


def test_a_profile_has_modules_and_operators(found):
    costs = found.costs
    names = {cost.name: cost for cost in costs.modules}
    assert {"net.0", "net.2"} <= names.keys()
    assert names["net.2"].times == 1
    assert 0 < names["net.2"].backward < names["net.2"].share
    assert sum(cost.share for cost in costs.operators) == pytest.approx(1, abs=0.01)
    assert {"aten::linear", "aten::mm", PYTHON} <= {cost.name for cost in costs.operators}


@pytest.mark.real_time
def test_a_step_that_has_a_profiler_of_its_own_is_split_all_the_same():
    net = nn.Linear(4, 4)

    def step() -> None:
        with torch.profiler.profile():
            net(torch.ones(2, 4)).sum().backward()

    found = profile(step, budget_s=10)
    assert found.share("forward") > 0
    assert found.costs is None
    assert "the code already runs torch's profiler" in found.report().to_text()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_step_with_nested_batches_has_its_costs_and_leaves_no_mode_on(layout):
    parts = [torch.randn(length, 8) for length in (3, 7)]
    batch, net = torch.nested.nested_tensor(parts, layout=layout), nn.Linear(8, 4)
    found = profile(lambda: net(batch), model=net, budget_s=0.4)
    assert found.why_no_costs == ""
    assert found.costs is not None
    assert [cost.kind for cost in found.costs.modules] == ["Linear"]
    assert _get_current_dispatch_mode() is innermost_function_mode() is None


def test_a_busy_machine_is_told_in_front_of_every_figure(found):
    assert replace(found, timed_s=2.0, held_up_s=0.1).load == ""
    busy = replace(found, timed_s=2.0, held_up_s=1.0)
    told = "The machine was busy: other programs used the CPU for up to 50% of the calls. "
    for result in (busy, Advice(busy)):
        assert result.report().headline.startswith(f"{told}{seconds(busy.step_s)} a step")
