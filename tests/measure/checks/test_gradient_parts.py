"""What is wrong in a part of a packed parameter is seen and its place named; honest parts are not.

`tests/benchmarks/planted.py` tries all kinds and all nets; these are some of each.
"""

from __future__ import annotations

import pytest
import torch
from _packed import HONEST, PACKED
from planted import examined, judged, word

from speedkit_jupyter.measure.checks.comparing.gradient_parts import parts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(64)
@pytest.mark.parametrize("one", PACKED, ids=lambda one: f"{one.group}: {one.name}")
def test_what_is_wrong_in_a_part_of_a_parameter_is_seen(one):
    found = judged(one)
    assert found["verdict"] == "wrong", found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", HONEST)
@pytest.mark.slow
def test_an_honest_packed_parameter_is_not_accused(name):
    torch.manual_seed(1)
    step, model, optimizer, _ = HONEST[name]()
    for record in examined(step, ["bf16", "fp16", "threads:2"], model, optimizer).records[1:]:
        assert record.failure or word(record) in ("exact", "rounding"), record.accuracy


@pytest.mark.parametrize("shape", [(96,), (96, 20), (20, 96), (4, 96, 5), (7, 12), (37, 64), (65,)])
def test_each_part_has_its_place(shape):
    torch.manual_seed(0)
    reference = torch.randn(shape, dtype=torch.float64)
    found = parts(torch.ones_like(reference), reference)
    with pytest.raises(IndexError):
        found.name(len(found.size))
    for index in range(len(found.size)):
        what, first, _, last, *dimension = found.name(index).replace("of dimension ", "").split()
        number = int(dimension[0]) if dimension else int(what == "columns")
        part = reference.narrow(number, int(first), int(last) - int(first) + 1)
        assert float(found.size[index]) == pytest.approx(float(part.square().mean().sqrt()))
        assert float(found.along[index]) == pytest.approx(float(part.mean()))


@pytest.mark.parametrize("shape", [(), (3,), (1, 31), (0, 8), (2, 2, 2)])
def test_what_is_too_small_has_no_parts(shape):
    assert parts(torch.zeros(shape), torch.zeros(shape)) is None
