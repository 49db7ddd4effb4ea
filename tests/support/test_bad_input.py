"""An error that we raise on purpose shows where the user called, and none of our insides."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import speedkit_jupyter as sk
from speedkit_jupyter.support import tracebacks

NET = nn.Linear(4, 2)
X = torch.randn(8, 4)


def _contrast(x: torch.Tensor) -> torch.Tensor:
    scores = NET(x) @ NET(x).T
    return nn.functional.cross_entropy(scores, torch.arange(len(x)))


CALLS = {
    "advise": lambda: sk.advise(lambda: None, budget_s=-1),
    "apply_speedups": lambda: sk.apply_speedups(3),
    "batch_sizes": lambda: sk.batch_sizes(lambda: None, budget_s="long"),
    "benchmark": lambda: sk.benchmark(lambda: NET(X), "bf17"),
    "code": lambda: sk.code(3),
    "micro_batch": lambda: sk.micro_batch(_contrast, 2)(X),
    "plan": lambda: sk.plan(3),
    "profile": lambda: sk.profile(3),
    "SpeedConfig": lambda: sk.SpeedConfig.from_yaml("nowhere.yaml"),
    "tune": lambda: sk.tune(lambda: NET(X), objective="money"),
    "tune_loader": lambda: sk.tune_loader(DataLoader([1, 2]), lambda: None, budget_s=1),
    "verify": lambda: sk.verify(3, steps=-1),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_shows_the_users_line_and_one_of_ours_at_most(name):
    with pytest.raises((sk.SpeedKitError, TypeError)) as caught:
        CALLS[name]()
    ours = [
        frame.f_code
        for frame, _ in traceback.walk_tb(caught.tb)
        if frame.f_globals["__name__"].startswith("speedkit_jupyter")
    ]
    # Those that IPython hides.
    assert set(ours) <= tracebacks._GATES


def test_what_the_users_function_raises_in_a_micro_batch_shows_the_users_frames():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError) as caught:
        sk.micro_batch(broken, 2)(X)
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.tb)]
    assert names[-1] == "broken"
    assert set(names[1:-1]) <= {"call", "<lambda>"}
