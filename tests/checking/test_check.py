"""Right rewrites pass; what is wrong, or cheats, does not."""

from __future__ import annotations

import pytest
import torch
from _rewrites import CHEATS, FAULTS, RIGHT

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
