"""int4: linear layers whose weights have 4 bits."""

from __future__ import annotations

import pytest
from compressed import is_near_on_a_gpu, on, real
from torch import nn

from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.target import Target

pytestmark = pytest.mark.usefixtures("made_time")


@real
def test_rows_that_are_no_whole_groups_multiply_as_before():
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 2))
    entry = named("int4")
    with entry.applied(on("int4"), Target(model)):
        assert entry.observe(Target(model)) == {"model.int4": "0 of 2 linear layers"}
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


@pytest.mark.gpu
@real
def test_on_a_gpu_it_is_near_the_model_and_comes_back():
    is_near_on_a_gpu("int4", 8, 0)
