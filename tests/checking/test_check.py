"""Right rewrites pass; what is wrong, or cheats, does not."""

from __future__ import annotations

import json

import pytest
import torch
from _rewrites import CHEATS, FAULTS, RIGHT, attention, qkv, sdpa

from speedkit_jupyter import check

pytestmark = [pytest.mark.usefixtures("made_time")]
ENOUGH_S = 1e4  # on a clock that moves when it is read


def checked(case, **more):
    sizes = {"small": (1, 2, 16, 16), "odd": (2, 3, 37, 24)}
    return check(
        case.candidate, case.reference, case.inputs, sizes=sizes, budget_s=ENOUGH_S, **more
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_a_right_rewrite_passes(case):
    found = checked(case)
    assert found.passed, found.faults


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_planted_fault_is_found(case):
    found = checked(case)
    assert found.faults
    assert not found.passed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CHEATS, ids=str)
def test_a_cheat_is_found(case):
    with torch.no_grad():
        found = checked(case, gradients=False)
    assert found.faults
    assert not found.passed


def test_what_passed_says_how_fast_and_how_far_off_and_is_json():
    found = check(sdpa, attention, qkv, sizes="small,odd", budget_s=ENOUGH_S)
    data = json.loads(found.to_json())
    assert data["passed"]
    assert data["candidate"] == "partial"
    assert [one["name"] for one in data["sizes"]] == ["small", "odd"]
    for one in data["sizes"]:
        assert one["speed"] == "same"  # on this clock
        assert len(one["reference_times_s"]) == len(one["candidate_times_s"]) > 8
        assert min(one["reference_peak_bytes"], one["candidate_peak_bytes"]) > 0
        assert {a["name"] for a in one["agreements"]} == {
            "output",
            *map("gradient of {}".format, "qkv"),
        }
        assert all(a["excess"] < 0.5 for a in one["agreements"])
    assert found.rows()[0]["speedup"] == 1.0
