"""Test `advise()` as a whole: the profile, the observed call, and the rules."""

import re

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, advise, plan
from speedkit_jupyter.extras.advise.advice import Gain, Opportunity, ranked
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search import learning


def test_opportunities_are_ranked_by_gain_and_small_gains_are_left_out():
    gains = [Gain(1.2, 1.3), Gain(1.0, 1.04), Gain(1.5, 7.0)]
    found = [Opportunity("title", "evidence", gain, "remedy", rule="a") for gain in gains]
    assert [one.gain for one in ranked(found, frozenset())] == [gains[2], gains[0]]
    assert [one.gain for one in ranked(found, frozenset("a"))] == [gains[2], gains[0], gains[1]]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"threads": 1}, r"Tuning has proven a plan for this step: threads:1 1\.30× \(.*\)\. "
         "`%speedkit apply net` applies it"),
        ({}, "Tuning proved no plan of switches faster for this step"),
        (None, "The gain of switches .* is measured by %%speedbench --tune"),
    ],
)  # fmt: skip
def test_a_plan_that_tuning_has_proven_is_named_with_the_line_that_applies_it(values, says):
    net = nn.Linear(8, 2)
    if values is not None:
        where, decided = learning.setting([net], Hardware.current()), plan(facts=Facts.read(net))
        task = learning.Task("Linear", ("4x8 float32",))
        name = "threads:1" if values else "baseline"
        learning.store(where, task, decided, values, name, Ratio(1.3, 1.2, 1.4, 50))
    found = advise(lambda: net(torch.ones(4, 8)), budget_s=0.2)
    assert re.search(says, found.report().to_text().replace("\n", " "))
    assert "threads" not in str(found.rows())
