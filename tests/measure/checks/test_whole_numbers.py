"""Whole numbers are judged by how much they differ too, where their size means anything.

`tests/benchmarks/planted.py --only counts: classes:` tries all kinds of results.
"""

from __future__ import annotations

import pytest
import torch
from _rows import HONEST, ROWS
from planted import examined, judged, word
from torch import nn

from speedkit_jupyter.measure.checks.comparing.whole_numbers import beyond, differing
from speedkit_jupyter.measure.checks.values import leaves

pytestmark = pytest.mark.usefixtures("one_thread")
FAULTS = {f"{one.group}: {one.name}": one for one in ROWS if one.group == "counts"}


def off(reference, *others):
    """What is off in each of these."""
    wanted = torch.tensor(reference)
    return [differing([torch.tensor(other)], [wanted]) for other in others]


def verdict(reference, seen, *controls, precision="bf16"):
    mine, *known = off(reference, seen, *controls)
    told = [beyond(mine, known, precision, True, surely) for surely in (False, True)]
    return "wrong" if told[1] else "doubtful" if told[0] else "right"


@pytest.mark.parametrize(
    ("seen", "controls", "found"),
    [
        (35, (36, 41, 38, 37), "right"),
        (477, (36, 41, 38, 37), "wrong"),
        (98, (36, 41, 38, 37), "wrong"),
        (477, (36, 39, 39), "doubtful"),  # one control alone may show the number of a class
        (40, (39, 39, 39), "doubtful"),
        (39, (39, 39, 39), "right"),
        (9, (812, 40, 377, 39), "doubtful"),  # of what goes anywhere nothing can be told
    ],
)
def test_a_single_number_is_judged_by_what_the_controls_are_off_by(seen, controls, found):
    assert verdict(39, seen, *controls) == found


@pytest.mark.parametrize(("seen", "found"), [(40, "doubtful"), (44, "wrong")])
def test_float32_moves_a_single_number_by_one_at_most(seen, found):
    assert verdict(39, seen, 39, precision="fp32") == found


def test_an_image_that_is_brighter_is_wrong_and_one_that_is_rounded_is_not():
    torch.manual_seed(0)
    image = torch.randint(20, 230, (64, 64))
    noise = [torch.randint(-1, 2, image.shape) for _ in range(4)]
    controls = [(image + one).tolist() for one in noise[1:]]
    assert verdict(image.tolist(), (image + noise[0]).tolist(), *controls) == "right"
    assert verdict(image.tolist(), (image + 4).tolist(), *controls) != "right"
    assert verdict(image.tolist(), (image * 1.1).long().tolist(), *controls) == "wrong"


@pytest.mark.parametrize(("count", "found"), [(4, "right"), (120, "wrong")])
def test_of_classes_how_many_differ_counts_and_not_by_how_much(count, found):
    torch.manual_seed(0)
    classes = torch.randint(1000, (512,))

    def moved(many):
        other = classes.clone()
        where = torch.randperm(512)[:many]
        other[where] = torch.randint(1000, (many,))
        return other.tolist()

    assert verdict(classes.tolist(), moved(count), moved(3), moved(5), moved(2)) == found


def test_where_most_differ_all_may_not():
    torch.manual_seed(0)
    order = torch.arange(2000)
    half = order.clone()
    half[:1000] = order[:1000].flip(0)
    assert verdict(order.tolist(), half.tolist(), half.roll(1).roll(-1).tolist()) == "right"
    assert verdict(order.tolist(), order.flip(0).tolist(), half.tolist()) == "wrong"


def test_whole_numbers_keep_their_sign():
    assert [int(one) for one in leaves.of([-1, 2**63 - 1, -(2**63), True]).exact] == [
        -1, 2**63 - 1, -(2**63), 1,
    ]  # fmt: skip
    assert len(leaves.of([2**70 + 1, -(2**70)]).exact) == 2


@pytest.mark.sampled(35)
@pytest.mark.parametrize("name", FAULTS)
def test_whole_numbers_that_are_off_by_much_do_not_win(name):
    assert judged(FAULTS[name])["verdict"] in ("wrong", "not checked")


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", [one for one in HONEST if not one.startswith("rows")])
def test_honest_whole_numbers_are_not_accused(name):
    torch.manual_seed(1)
    step, model, optimizer, _ = HONEST[name]()
    records = examined(step, ["bf16", "threads:2"], model, optimizer).records
    assert records[0].accuracy.verdict in ("exact", "rounding"), records[0].accuracy
    assert all(word(one) in ("exact", "rounding", "not checked") for one in records[1:])
    assert word(records[2]) == "exact", records[2].accuracy


ASKING = {
    "contiguous": lambda z: (z, z.is_contiguous()),
    "strides": lambda z: {"z": z, "strides": z.stride()},
    "in words": lambda z: (z, f"contiguous: {z.is_contiguous()}"),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_a_layout_is_asked_for_is_no_wrong_result(name):
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 8, 3), torch.randn(4, 3, 8, 8)
    record = examined(lambda: ASKING[name](model(x).detach()), ["channels_last"], model).records[1]
    assert word(record) == "not checked", record.accuracy
    assert "how its tensors lie in memory: Tensor." in record.accuracy.reason


def test_a_wrong_result_is_wrong_though_a_layout_is_asked_for():
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 8, 3), torch.randn(4, 3, 8, 8)

    def step():
        out = model(x).detach()
        return out * (1 if out.is_contiguous() else 2), out.is_contiguous()

    assert word(examined(step, ["channels_last"], model).records[1]) == "wrong"
