"""cuda_graphs: calls that torch's make_graphed_callables records, and what is made as usual.

Recording itself needs a GPU. What decides, copies, counts and puts back is tested here on a CPU
too, where a stand-in computes anew into the same memory at each replay, as a graph does.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.optimizations.cuda_graphs import Graphed, is_recording
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.optimizations.properties.calls import CALLS
from speedkit_jupyter.tuning.candidates import candidates

SMALL = Facts(device="cuda:0", parameters=8 * 64 * 64, linears=8)


# --- what is decided ---


def test_rules_leave_it_and_a_search_tries_it_on_nvidias_gpus(hardware):
    assert not plan(SpeedConfig(compile=False), hardware("a100"), SMALL)["cuda_graphs"].active
    for machine, facts, tried in (("a100", SMALL, True), ("cpu", Facts(linears=8), False)):
        names = [one.name for one in candidates(hardware(machine), facts)]
        assert ("cuda_graphs" in names) == tried


@pytest.mark.parametrize(
    ("machine", "facts", "more", "why"),
    [
        ("cpu", Facts(linears=8), {}, "the model is on cpu"),
        ("mi300x", SMALL, {}, "NVIDIA's GPUs record"),
        ("a100", Facts(device="cuda:0", compiled="in place"), {}, "reduce-overhead"),
        ("a100", SMALL, {"compile": True}, "`compile: reduce-overhead` records"),
        ("a100", Facts(device="cuda:0", own_checkpointing="on"), {}, "backward pass"),
        ("a100", Facts(device="cuda:0", lazy=True), {}, "lazy layers"),
    ],
)
def test_it_is_declined_with_the_reason(hardware, machine, facts, more, why):
    asked = SpeedConfig(**({"compile": False} | more | {"cuda_graphs": True}))
    decision = plan(asked, hardware(machine), facts)["cuda_graphs"]
    assert decision.declined
    assert why in decision.reason


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric"])
def test_the_code_is_torchs_own_function(hardware, form):
    asked = SpeedConfig(cuda_graphs=True, compile=False)
    facts = replace(SMALL, optimizers=(OptimizerFacts(devices=("cuda:0",)),))
    text = code(plan(asked.alone(), hardware("a100"), facts), form)
    assert "torch.cuda.make_graphed_callables(" in text
    compile(text, "code", "exec")


# --- what becomes of calls ---


def in_the_same_memory(module: nn.Module, samples: Any, allow_unused_input: bool) -> Callable:
    """In the place of make_graphed_callables: results and gradients lie where they lay before."""
    call, inputs, parameters = module.forward, list(samples), list(module.parameters())
    for _ in range(3):  # as it warms up
        results, _ = tree_flatten(call(*inputs))
    memory = [result.detach().clone() for result in results]
    gradients = [torch.zeros_like(one) for one in (*inputs, *parameters)]

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> Any:
            with torch.no_grad():
                for own, one in zip(inputs, given, strict=False):
                    own.copy_(one)
            with torch.enable_grad():
                ctx.results, ctx.structure = tree_flatten(call(*inputs))
            for own, one in zip(memory, ctx.results, strict=True):
                own.copy_(one.detach())
            return tuple(one.detach() for one in memory)

        @staticmethod
        def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
            asked = [one for one in (*inputs, *parameters) if one.requires_grad]
            pairs = [(r, g) for r, g in zip(ctx.results, upstream, strict=True) if r.requires_grad]
            found = iter(torch.autograd.grad(
                [r for r, _ in pairs], asked, [g for _, g in pairs], allow_unused=True
            ))  # fmt: skip
            given = []
            for own, one in zip(gradients, (*inputs, *parameters), strict=True):
                gradient = next(found) if one.requires_grad else None
                given.append(None if gradient is None else own.copy_(gradient).detach())
            return tuple(given)

    structure = tree_flatten(tuple(memory))[1]
    return lambda *given: tree_unflatten(list(Graph.apply(*given, *parameters)), structure)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each recording was one to those who ask."""
    asked: list[bool] = []

    def record(*given: Any, **more: Any) -> Any:
        asked.append(is_recording())
        return in_the_same_memory(*given, **more)

    module = torch.get_device_module("cpu")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    monkeypatch.setattr(module, "get_rng_state", lambda _: torch.get_rng_state(), raising=False)
    monkeypatch.setattr(
        module, "set_rng_state", lambda state, _: torch.set_rng_state(state), raising=False
    )
    return asked


class Net(nn.Module):
    """A batch norm, which counts, and dropout, which draws; two results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        hidden = torch.nn.functional.dropout(self.norm(self.one(x)).relu(), 0.3, self.training)
        return {"scores": self.two(hidden) * scale, "hidden": hidden}


def trained(loop: Callable[..., list], on: bool) -> tuple[list, str]:
    """What a loop leaves behind, and what was counted."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    layer = Graphed(model, {})
    with CALLS.overriding([(model, layer)] if on else []):
        found = loop(model, optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = [*found, *model.state_dict().values(), *gradients, torch.get_rng_state()]
    return [t.detach().clone() for t in tensors], layer.counted


def data(number: int, rows: int = 6) -> torch.Tensor:
    return torch.rand(rows, 4, generator=torch.Generator().manual_seed(number))


def plainly(model, optimizer):
    kept = []
    for number in range(5):
        out = model(data(number), scale=2.0)
        out["scores"].pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept += [out["scores"], out["hidden"]]
    return kept


def accumulating(model, optimizer):
    for number in range(6):
        model(data(number))["scores"].pow(2).mean().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 3)
    return []


def two_before_one(model, optimizer):
    for number in range(5):
        one, other = model(data(number))["scores"], model(data(number + 9))["scores"]
        (one * other).mean().backward()
        optimizer.step()
    return []


def other_shapes_and_modes(model, optimizer):
    for number in range(8):
        model.train(number % 4 != 3)
        model(data(number, rows=6 - number % 2))["scores"].mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(data(number))
    return []


def freezing_and_loading(model, optimizer):
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(8):
        model.one.requires_grad_(number < 4)
        if number == 6:
            model.load_state_dict(saved, assign=True)
        model(data(number))["scores"].mean().backward()
    return []


def gradients_of_inputs(model, optimizer):
    found = []
    for number in range(4):
        x = data(number).requires_grad_()
        model(x)["scores"].pow(2).mean().backward()
        found.append(x.grad)
    return found


LOOPS = (plainly, accumulating, two_before_one, other_shapes_and_modes, freezing_and_loading,
         gradients_of_inputs)  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_leaves_the_same_behind(loop, recorded):
    expected, _ = trained(loop, on=False)
    found, counted = trained(loop, on=True)
    assert all(map(torch.equal, found, expected))
    assert recorded
    assert all(recorded)
    assert not counted.startswith("0 ")


def test_what_can_not_be_recorded_is_said_and_never_tried_again(recorded, monkeypatch):
    def fails(*given, **more):
        recorded.append(True)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fails)
    model, notes = Net(), {}
    before = model.norm.running_mean.clone()
    with CALLS.overriding([(model, Graphed(model, notes))]):
        for number in range(5):
            model(data(number))
    assert "not permitted" in notes["cuda_graphs"]
    assert recorded == [True]
    assert not torch.equal(model.norm.running_mean, before)


def test_hooks_and_objects_are_seen_as_without_it(recorded):
    model, seen = Net(), []
    layer = Graphed(model, {})
    with CALLS.overriding([(model, layer)]):
        handle = model.two.register_forward_hook(lambda *_: seen.append(1))
        for number in range(4):
            model(data(number))
        handle.remove()
        for _ in range(3):
            with pytest.raises(TypeError):
                model(object())
    assert len(seen) == 4
    assert layer.counted == "0 recorded"


def test_nothing_keeps_a_model_alive(recorded):
    model = Net()
    layer = Graphed(model, {})
    block = CALLS.overriding([(model, layer)])
    block.__enter__()
    for number in range(4):
        model(data(number))["scores"].sum().backward()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    block.__exit__(None, None, None)


@pytest.mark.gpu
def test_on_a_gpu_a_loop_leaves_the_same_behind():
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        config = SpeedConfig(cuda_graphs=on, compile=False).alone()
        with apply_speedups(model, config)[1] as context:
            plainly(lambda x, model=model, **more: model(x.cuda(), **more), optimizer)
            assert not on or "1 recorded" in str(context.changes())
        found.append([tensor.clone() for tensor in model.state_dict().values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
