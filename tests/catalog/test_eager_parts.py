"""What can't be compiled is left out, as few classes as possible, and everything is put back."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups
from speedkit_jupyter.catalog.properties.eager_parts import EagerParts
from speedkit_jupyter.support.source_lines import Spot

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("made_time")]


def kind(name):
    """A class of its own, whose instances compute the same."""

    def forward(self, x):
        return x + 1

    code = forward.__code__.replace(co_name=name)
    own = type(forward)(code, forward.__globals__, f"{name}.forward")
    own.__qualname__ = f"{name}.forward"
    return type(name, (nn.Module,), {"forward": own})


@pytest.fixture
def model():
    return nn.Sequential(*(kind(name)() for name in "ABCDEF"))


def left_out(model):
    return {type(part).__name__ for part in model.modules() if "forward" in part.__dict__}


@pytest.mark.parametrize("culprits", ["A", "C", "F", "DE"])
def test_halving_ends_at_the_fewest_that_are_enough(model, culprits):
    parts, attempts = EagerParts([model]), 0
    with parts.in_force():
        while True:
            attempts += 1
            if left_out(model) >= set(culprits):
                if not parts.narrow():
                    break
            else:
                assert parts.try_next()
        assert left_out(model) >= set(culprits)
        assert len(left_out(model)) == len(culprits) or culprits == "DE"
        assert attempts < 9
    assert left_out(model) == set()


def test_where_all_would_be_left_out_nothing_is_tried_any_more(model):
    parts = EagerParts([model])
    with parts.in_force():
        assert parts.try_next()
        assert parts.try_next()
        assert not parts.try_next()


def test_a_line_names_the_part_that_has_it(model):
    code = type(model[3]).forward.__code__
    parts = EagerParts([nn.Sequential(model[3])])
    with parts.in_force():
        line = Spot(code.co_filename, code.co_firstlineno + 1)
        assert parts.blame([Spot("elsewhere.py", 3), line]) == line
        assert "forward" in model[3].__dict__
        assert parts.names == "`D.forward`"
        twin = copy.deepcopy(model[3])
        assert twin.forward.__self__ is twin
        assert parts.blame([Spot("elsewhere.py", 3)]) is None
    assert "forward" not in model[3].__dict__


class Backward(torch.autograd.Function):
    """Can be compiled forward; its backward pass fails in Inductor, where a test breaks erfinv."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.erfinv(grad / 10)


class Odd(nn.Module):
    """The part whose backward pass can't be compiled."""

    def forward(self, x):
        return Backward.apply(x)


class Plain(nn.Linear):
    """A part that can be compiled."""

    def forward(self, x):
        return super().forward(x)


@pytest.mark.slow
def test_an_error_of_the_backward_pass_without_a_line_is_found_by_halving(monkeypatch):
    from torch._inductor.lowering import lowerings

    def broken(*args, **kwargs):
        raise NotImplementedError("no code for erfinv")

    monkeypatch.setitem(lowerings, torch.ops.aten.erfinv.default, broken)
    torch._dynamo.reset()
    model = nn.Sequential(Plain(4, 4), Odd(), Plain(4, 4))
    plain = model(torch.ones(2, 4))
    with apply_speedups(model, SpeedConfig(compile=True))[1] as context:
        with pytest.warns(UserWarning, match="no code for erfinv"):
            model(torch.ones(2, 4)).sum().backward()
        for _ in range(5):
            result = model(torch.ones(2, 4))
            result.sum().backward()
        torch.testing.assert_close(result, plain)
        assert not model._compiled_call_impl.code.failed
        assert "; `Odd.forward` can't be compiled" in context.plan["compile"].reason
        assert left_out(model) == {"Odd"}
    assert left_out(model) == set()
    torch._dynamo.reset()


class Broken(nn.Module):
    """What fullgraph forbids."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


def test_where_compiling_is_required_its_error_is_raised(machine):
    torch._dynamo.reset()
    model, values = Broken(), {"enabled": True, "fullgraph": True, "required": True}
    with (
        apply_speedups(model, SpeedConfig(compile=values))[1],
        pytest.raises(Exception, match="graph_break"),
    ):
        model(torch.ones(2))
    machine("one_core")
    values["scope"] = "blocks"
    with pytest.raises(SpeedKitError, match="compile is required: it has no repeated blocks"):
        apply_speedups(model, SpeedConfig(compile=values))
    with suppress(AttributeError):
        assert model._compiled_call_impl is None
