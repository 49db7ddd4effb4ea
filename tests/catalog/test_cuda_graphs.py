"""Test `cuda_graphs`, which records calls or runs them as usual. A stand-in records on CPUs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, code, plan
from speedkit_jupyter.catalog.cuda_graphs import Graphed
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.catalog.model_changes.calls import CALLS
from speedkit_jupyter.torchglue.confinement import is_recording


def test_the_code_is_torchs_own_function(hardware):
    facts = Facts(device="cuda:0", linears=8, optimizers=(OptimizerFacts(devices=("cuda:0",)),))
    decided = plan(SpeedConfig(cuda_graphs=True).alone(), hardware("a100"), facts)
    text = code(decided)
    assert "torch.cuda.make_graphed_callables(" in text
    compile(text, "code", "exec")
    with pytest.raises(SpeedKitError, match="--as torch"):
        code(decided, "transformers")
    asked = SpeedConfig(cuda_graphs=True, distributed="ddp")
    assert plan(asked, hardware("a100"), replace(facts, processes=2))["cuda_graphs"].declined


def in_the_same_memory(call, samples, allow_unused_input):
    """Stand in for torch's recording: each call overwrites the same results and gradients."""
    assert is_recording()
    keys = list(call(*samples))
    results = {key: one.detach().clone() for key, one in call(*samples).items()}
    gradients = [torch.zeros_like(one) for one in samples]

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            for own, one in zip(samples, given, strict=True):
                if own.data_ptr() != one.data_ptr():
                    own.data.copy_(one)
            with torch.enable_grad():
                ctx.made = call(*samples)
            return tuple(results[key].copy_(ctx.made[key].detach()).detach() for key in keys)

        @staticmethod
        def backward(ctx, *upstream):
            asked = [one for one in samples if one.requires_grad]
            made = torch.autograd.grad(list(ctx.made.values()), asked, upstream, allow_unused=True)
            found = iter(made)
            new = [next(found) if one.requires_grad else None for one in samples]
            pairs = zip(gradients, new, strict=True)
            return tuple(None if one is None else own.copy_(one).detach() for own, one in pairs)

    return lambda *given: dict(zip(keys, Graph.apply(*given), strict=True))


def fails(*args, **more):
    raise RuntimeError("operation not permitted")


class Net(nn.Module):
    """Model with batch norm, dropout, an unused weight and two results."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x, *, mask=None):
        hidden = nn.functional.dropout(self.norm(self.one(x)).relu(), 0.3, self.training)
        return {"scores": self.two(hidden if mask is None else hidden * mask), "hidden": hidden}


class Swapping(Net):
    """Model that exchanges a buffer with another tensor in each call."""

    other = torch.zeros(8)

    def forward(self, x, *, mask=None):
        self.other, self.norm.running_mean = self.norm.running_mean, self.other
        return super().forward(x, mask=mask)


def trained(on):
    """Train in train and eval mode, with graphs if `on`; return results, gradients and state."""
    torch.manual_seed(0)
    model, kept = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1)
    layer = Graphed(model, {})
    with CALLS.overriding([(model, layer)] if on else []):
        for number in range(12):
            x = torch.rand(6, 4, requires_grad=True)
            out = model(x, mask=torch.ones(6, 8))
            out["scores"].pow(2).mean().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number > 6)
            model.train(number % 5 != 4)
            kept += [out["scores"], x.grad, model(torch.rand(number % 2 + 2, 4))["hidden"]]
            assert layer._replays > 0 or not on or number < 4
    assert "_compiled_call_impl" not in vars(model)
    return [t.detach().clone() for t in (*kept, *model.state_dict().values())]


def test_a_loop_leaves_the_same_behind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", in_the_same_memory)
    expected, found = trained(on=False), trained(on=True)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("kind", "record", "why"),
    [(Net, fails, "not permitted"), (Swapping, in_the_same_memory, "replaces weights or buffers")],
)
def test_hooks_and_failures_leave_calls_as_usual(monkeypatch, kind, record, why):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    model, notes, seen = kind(), {}, []
    with CALLS.overriding([(model, Graphed(model, notes))]):
        handle = model.two.register_forward_hook(lambda *_: seen.append(1))
        for _ in range(3):
            model(torch.rand(6, 4))
        assert len(seen) == 3
        assert not notes
        handle.remove()
        for _ in range(3):
            model(torch.rand(6, 4))
    assert why in notes["cuda_graphs"]


def test_a_backward_pass_after_another_replay_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", in_the_same_memory)
    model = Net()
    with CALLS.overriding([(model, Graphed(model, {}))]):
        _, second, third = (model(torch.rand(6, 4))["scores"].sum() for _ in range(3))
        with pytest.raises(SpeedKitError, match="leave cuda_graphs out"):
            second.backward()
        third.backward()
