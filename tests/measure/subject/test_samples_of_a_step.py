"""Samples of a step: the rows that its model is called with."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from speedkit_jupyter.measure.subject.observed import samples_of


class Twice(nn.Module):
    """Calls a part of itself, and takes its rows by a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)

    def forward(self, scale, x=None):
        return self.part(self.part(x)) * scale


NET, OTHER, TWICE = nn.Linear(2, 2), nn.Linear(2, 2), Twice()


def elsewhere():
    NET(torch.ones(4, 2))
    thread = threading.Thread(target=NET, args=(torch.ones(9, 2),))
    thread.start()
    thread.join()


STEPS = {
    "one batch": (lambda: NET(torch.ones(5, 2)), 5),
    "a loop of unequal batches": (lambda: [NET(torch.ones(n, 2)) for n in (4, 4, 1)], 9),
    "two models on one batch": (lambda: OTHER(NET(torch.ones(3, 2))), 3),
    "a model that calls a part that is named too": (lambda: TWICE(2.0, x=torch.ones(6, 2)), 6),
    "no model": (lambda: torch.ones(2), None),
    "another thread": (elsewhere, 4),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_is_what_the_first_called_model_gets(name):
    step, expected = STEPS[name]
    models = [OTHER, NET, TWICE, TWICE.part]
    before = nn.Module.__call__
    assert samples_of(step, models) == expected
    assert nn.Module.__call__ is before


def test_nothing_is_said_where_a_call_gets_no_tensors():
    class Random(nn.Module):
        def forward(self):
            return torch.ones(3)

    model = Random()
    assert samples_of(model, [model]) is None
