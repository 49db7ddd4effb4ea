"""What is recorded, replayed and predicted of the kernels that Inductor has for an H200."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
import torch

from speedkit_jupyter.extras import autotune
from speedkit_jupyter.extras.autotune import api
from speedkit_jupyter.extras.autotune.ranking import LEAST_SEARCHES
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError

SQUARE = (4096, 4096)
PRODUCTS = {
    "mm": (torch.mm, (SQUARE, SQUARE)),
    "addmm": (torch.addmm, ((4096,), SQUARE, SQUARE)),
    "bmm": (torch.bmm, ((8, 1024, 1024), (8, 1024, 1024))),
    "baddbmm": (torch.baddbmm, ((8, 1024, 1024),) * 3),
}
H200 = "NVIDIA-H200-matmul"


def mm(m: int, n: int, k: int):
    return torch.mm, ((m, k), (k, n))


def cost(choice, shape) -> float:
    """Milliseconds by a formula: the tile's own waste, and what is filled of it."""
    given = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", choice.description)}
    if not given:
        return 9.0
    (m, k), (_, n) = shape
    across, down = given["BLOCK_M"], given["BLOCK_N"]
    tiles = -(-m // across) * -(-n // down)
    waves = -(-tiles // 132)
    return waves * k * (across * down + 40 * (across + down)) * 1e-9 * (9 - given["num_warps"])


def searched(lowered, function, shapes) -> list:
    """Lower it, and report timings as Inductor's feedback hook does once kernels were timed."""
    choices = lowered(function, shapes)
    if len(choices) > 1:
        api.current()._measured({one: cost(one, shapes[-2:]) for one in choices})
    return choices


def recorded(lowered, number: int) -> None:
    autotune.record()
    sizes = [(m, n, k) for m in (256, 512, 1024, 2048) for n in (512, 1024, 3072)
             for k in (512, 2048)]  # fmt: skip
    for size in sizes[:number]:
        searched(lowered, *mm(*size))
    autotune.off()


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_replay_leaves_one_of_the_22_kernels(lowered, name):
    autotune.record()
    choices = lowered(*PRODUCTS[name])
    assert len(choices) == 22
    timings = {one: 1.0 + index % 7 for index, one in enumerate(choices)}
    timings[choices[5]] = 0.5
    api.current()._measured(timings)
    [kept] = database.kept("search", H200)
    assert kept.value["problem"]["op"] == name
    counted = autotune.record()  # reads what is stored
    [left] = lowered(*PRODUCTS[name])
    assert left.description == choices[5].description
    assert (counted.replayed, counted.searched) == (1, 0)
    assert len(lowered(*PRODUCTS[name], torch.float16)) == 22  # another search
    assert counted.replayed == 1


def test_an_entry_that_no_longer_matches_the_offer_is_stale(lowered):
    autotune.record()
    choices = searched(lowered, *mm(512, 512, 512))
    tuner = api.current()
    [(key, entry)] = tuner._known.items()
    tuner._known[key] = replace(entry, offered=entry.offered[1:])
    assert len(lowered(*mm(512, 512, 512))) == len(choices)
    assert (tuner.counted.stale, tuner.counted.replayed) == (1, 0)


def test_another_version_of_torch_is_another_search(lowered, monkeypatch):
    autotune.record()
    choices = searched(lowered, *mm(512, 512, 512))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    autotune.record()
    assert len(lowered(*mm(512, 512, 512))) == len(choices)


@pytest.mark.slow
def test_of_shapes_never_seen_few_kernels_are_timed(lowered):
    recorded(lowered, 24)
    model = autotune.train(H200)
    assert model.calibration.top[-1] >= 0.9
    choices = 22
    with autotune.predictions(confidence=0.5) as counted:
        left = searched(lowered, *mm(1536, 1024, 1024))
        assert len(left) <= 3
        assert (counted.predictions, counted.fallbacks) == (1, 0)
        assert counted.mean_confidence >= 0.5
        far = lowered(*mm(65536, 1024, 1024))  # far from all that was recorded
        assert (len(far) >= choices, counted.fallbacks) == (True, 1)
    with autotune.predictions(confidence=1) as counted:
        assert len(lowered(*mm(1536, 1024, 512))) == choices
    assert counted.fallbacks == 1
    with autotune.predictions(confidence=1, fallback=False) as counted:
        assert len(lowered(*mm(1536, 1024, 512))) == 3
    assert api.current() is None


def test_without_enough_searches_nothing_is_predicted(lowered):
    recorded(lowered, 2)
    with pytest.raises(SpeedKitError, match=f"2 whole searches are recorded.*{LEAST_SEARCHES}"):
        autotune.train(H200)
    with autotune.predictions() as counted:
        assert len(lowered(*mm(640, 640, 640))) == 22
    assert (counted.predictions, counted.fallbacks) == (0, 1)


def test_what_is_not_to_be_remembered_is_not_stored(lowered):
    with autotune.predictions(remember=False) as counted:
        searched(lowered, *mm(512, 512, 512))
    assert counted.searched == 1
    assert autotune.models() == []


def test_a_model_is_named_by_the_beginning_of_its_name(lowered):
    recorded(lowered, 1)
    assert [one.name for one in autotune.models()] == [H200]
    assert autotune.use("NVIDIA-H200-matmul") == H200
    assert api.chosen() == H200
    with pytest.raises(ArgumentError, match=r"no recorded model; recorded are: NVIDIA-H200-matmul"):
        autotune.use("NVIDIA-A100-matmul")
    assert api.chosen() == H200  # the error leaves it in force
    autotune.use(None)
    assert api.chosen() is None


def test_entries_that_are_damaged_are_left_out(lowered):
    recorded(lowered, 1)
    (model,) = autotune.models()
    database.keep("ranking", H200, model.versions, {"agreement": "high"})
    search = asdict(model.searches[0])
    database.keep("search", H200, "", {**search, "timings": {}})
    for part in (
        {"output": [3]},
        {"left": 9},
        {"inputs": []},
        {"device": {"name": "", "units": 0}},
    ):
        database.keep("search", H200, str(part), {**search, "problem": search["problem"] | part})
    assert autotune.models() == [model]
    with autotune.predictions() as counted:
        lowered(*mm(512, 512, 512))
    assert api.current() is None
    assert counted.searched == 0


def test_an_error_of_ours_leaves_the_search_to_inductor(lowered, monkeypatch, caplog):
    autotune.record()
    monkeypatch.setattr("speedkit_jupyter.extras.autotune.tuner.problem_of", lambda _: 1 / 0)
    assert len(lowered(*mm(512, 512, 512))) == 22
    assert "ZeroDivisionError" in api.current().problem


def test_a_torch_without_the_hooks_switches_it_off(monkeypatch):
    def gone(*_):
        raise AttributeError(name="add_preprocessing_fn", obj=torch)

    monkeypatch.setattr("speedkit_jupyter.torchglue.inductor.on_autotuning", gone)
    try:
        autotune.record()
        assert "this torch has no torch.add_preprocessing_fn" in api.current().problem
    finally:
        autotune.off()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"confidence": 2}, "confidence must be from 0 to 1"),
        ({"confidence": "high"}, "confidence must be a number"),
        ({"fallback": 1}, "fallback must be True or False"),
    ],
)
def test_options_are_checked(given, line):
    with pytest.raises(SpeedKitError, match=line), autotune.predictions(**given):
        pass
