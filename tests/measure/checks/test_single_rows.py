"""A row that is otherwise is seen among many; rows that rounding moves by much accuse nobody.

`tests/benchmarks/planted.py --only rows:` tries all places and nets.
"""

from __future__ import annotations

import pytest
import torch
from _rows import HONEST, ROWS
from planted import examined, judged, word

from speedkit_jupyter.measure.checks.comparing.errors import errors
from speedkit_jupyter.measure.checks.comparing.single_rows import beyond, single_rows
from speedkit_jupyter.measure.checks.comparing.tolerance import Tolerance
from speedkit_jupyter.measure.checks.observing.observation import Observation
from speedkit_jupyter.measure.checks.values.leaves import Leaves

pytestmark = pytest.mark.usefixtures("one_thread")
FAULTS = {f"{one.group}: {one.name}": one for one in ROWS if one.group == "rows"}
BF16 = 2.0**-8


def found(factor, count, shape=(256, 64), dimension=0, tiny=0, width=1.0):
    """Of rows that rounding moves by 4 %, where so many are this many times as large."""
    torch.manual_seed(0)
    reference = torch.randn(shape, dtype=torch.float64)
    reference[:tiny] *= 1e-3
    # What is left after cancelling is off by more of its size.
    scatter = 0.04 * torch.ones(len(reference), *[1] * (len(shape) - 1), dtype=torch.float64)
    scatter[:tiny] *= 20
    noise = [scatter * reference.abs() * torch.randn_like(reference) for _ in range(4)]
    wrong = torch.ones(shape[dimension], dtype=torch.float64)
    wrong[-count:] = factor
    view = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    seen = (reference + noise[0]) * wrong.view(view)
    controls = [single_rows(one, reference) for one in noise[1:]]
    return beyond(single_rows(seen - reference, reference), controls, BF16, 1.0, width)


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("factor", [1.2, 1.5, 2.0, 0.0, -1.0])
@pytest.mark.parametrize(
    ("shape", "dimension"), [((64, 64), 0), ((1024, 64), 0), ((64, 256), 1), ((16, 32, 3, 3), 1)]
)
def test_a_few_rows_that_are_otherwise_are_seen(factor, count, shape, dimension):
    reason = found(factor, count, shape, dimension)
    assert ("row" if dimension == 0 else "column") in reason


@pytest.mark.parametrize("tiny", [0, 3, 128, 255])
@pytest.mark.parametrize("shape", [(256, 64), (256, 8), (256,), (256, 3, 5)])
def test_rounding_alone_is_not_accused(shape, tiny):
    assert not found(1.0, 1, shape, 0, tiny)


@pytest.mark.parametrize("tiny", [3, 128])
def test_a_large_row_is_seen_beside_tiny_ones(tiny):
    assert "row 255" in found(1.5, 1, tiny=tiny)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0, 8), (1, 3)])
def test_what_has_too_few_rows_has_none(shape):
    assert single_rows(torch.zeros(shape), torch.zeros(shape)) is None


@pytest.mark.parametrize("shape", [(5, 7), (9,), (4, 5, 6)])
def test_each_row_has_its_place(shape):
    torch.manual_seed(0)
    reference = torch.randn(shape, dtype=torch.float64)
    rows = single_rows(torch.ones_like(reference), reference)
    for index in range(len(rows.size)):
        words = rows.name(index).split()
        dimension = int(words[-1]) if "dimension" in words else int(words[0] == "column")
        part = reference.select(dimension, int(words[1]))
        assert float(rows.size[index]) == pytest.approx(float(part.square().mean().sqrt()))
        assert float(rows.along[index]) == pytest.approx(float(part.mean()))
    with pytest.raises(IndexError):
        rows.name(len(rows.size))


@pytest.mark.sampled(72)
@pytest.mark.parametrize("name", FAULTS)
def test_wrong_rows_of_gradients_outputs_and_updates_do_not_win(name):
    assert judged(FAULTS[name])["verdict"] in ("wrong", "not checked")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", [one for one in HONEST if one.startswith("rows")])
@pytest.mark.slow
def test_honest_rows_are_not_accused(name):
    torch.manual_seed(1)
    step, model, optimizer, _ = HONEST[name]()
    for record in examined(step, ["bf16", "fp16", "threads:2"], model, optimizer).records:
        assert record.failure or word(record) not in ("wrong", "not reached"), record.accuracy


# --- what is zero in theory ---


def seen(bias, gain=1.0):
    """A layer's gradient, and that of a bias before a norm, which has none in theory."""
    torch.manual_seed(0)
    observation = Observation(outputs=Leaves())
    observation.gradients = [gain * torch.randn(32, 32, dtype=torch.float64), bias]
    return observation


@pytest.mark.parametrize(("off", "accused"), [(6e-4, False), (2e-3, False), (0.5, True)])
def test_one_element_of_what_rounding_left_of_a_zero_accuses_nobody(off, accused):
    """Kernels leave there what they like: `channels_last` ten times as much as the usual layout."""
    draw = torch.Generator().manual_seed(1)
    noise = [2e-5 * torch.randn(32, dtype=torch.float64, generator=draw) for _ in range(4)]
    reference = seen(1e-12 * noise[0])
    tolerance = Tolerance("fp32", [errors(seen(one), reference, frozenset()) for one in noise[1:]])
    bias = noise[0].clone()
    bias[2] = off
    assert bool(tolerance.beyond(errors(seen(bias), reference, frozenset()))) is accused
    assert tolerance.beyond(errors(seen(noise[0], 1.5), reference, frozenset()))


@pytest.mark.parametrize(("times", "accused"), [(34, False), (100, False), (5000, True)])
def test_what_rounding_left_of_a_zero_may_be_many_times_what_it_left_in_a_control(times, accused):
    draw = torch.Generator().manual_seed(1)
    noise = [5e-6 * torch.randn(32, dtype=torch.float64, generator=draw) for _ in range(4)]
    reference = seen(1e-12 * noise[0])
    tolerance = Tolerance("fp32", [errors(seen(one), reference, frozenset()) for one in noise[1:]])
    found = errors(seen(times * noise[0]), reference, frozenset())
    assert bool(tolerance.beyond(found)) is accused
