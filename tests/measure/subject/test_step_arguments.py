"""Which functions are given the variant's context, and which are called as they are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedContext
from speedkit_jupyter.measure.subject.from_function import step_of


def takes_nothing():
    return ("called with", ())


def takes_it(ctx):
    return ("called with", (ctx,))


def may_take_it(ctx=None):
    return ("called with", (ctx,))


def has_a_default(batch="the user's"):
    return ("called with", (batch,))


def has_keywords(*, batch="the user's", **more):
    return ("called with", (batch, more))


def takes_any(*arguments):
    return ("called with", arguments)


CONTEXT = object.__new__(SpeedContext)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (takes_nothing, ()),
        (takes_it, (CONTEXT,)),
        (may_take_it, (CONTEXT,)),
        (has_a_default, ("the user's",)),
        (has_keywords, ("the user's", {})),
        (takes_any, (CONTEXT,)),
        (partial(takes_it, "bound"), ("bound",)),
    ],
)
def test_what_a_step_is_called_with(step, arguments):
    model = nn.Linear(2, 2)
    found = step_of(step, model, torch.optim.SGD(model.parameters()))
    assert found.run(CONTEXT) == ("called with", arguments)
