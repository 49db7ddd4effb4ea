"""What is examined of a compiled variant is compiled whole, as in the rounds, not in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedkit_jupyter.measure.rounds.confinement import patched

pytestmark = pytest.mark.compile


class Dropping(nn.Module):
    """Compiled anew for the check, where dropout is off."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2)

    def forward(self, x):
        """(N, 4) to (N, 2)."""
        return self.second(self.drop(torch.relu(self.first(x))))


def test_what_is_compiled_while_calls_are_watched_has_no_breaks():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model, seen = Dropping(), []

    def make(call):
        def observed(module, *args, **kwargs):
            seen.append(type(module).__name__)
            return call(module, *args, **kwargs)

        return observed

    model._compiled_call_impl = torch.compile(lambda x: model._call_impl(x), backend="eager")
    model(torch.ones(2, 4))
    before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    model.drop.eval()
    with patched(nn.Module, "__call__", make):
        result = model(torch.ones(2, 4))
    after = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
    assert seen == ["Dropping"]
    assert torch.allclose(result, model._call_impl(torch.ones(2, 4)))
    torch._dynamo.reset()
