"""A number that the user names: what counts as one, what is allowed, how sure it is."""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest
import torch

from speedkit_jupyter import StepError
from speedkit_jupyter.right.named_accuracy import Scored, by_its_name, named_accuracy


def evaluate() -> float:
    return 1.0


@pytest.mark.parametrize("given", [0.5, np.float32(0.5), fractions.Fraction(1, 2), (2, 4)])
def test_numbers_and_counts_are_scores(given):
    assert named_accuracy(evaluate).score(given) == 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.tensor(0.5), "evaluate gives Tensor, and not a number"),
        (True, "bool, and not a number"),
        ((5, 4), "tuple, and not a number"),
        ({"eval_loss": 0.5}, "dict, and not a number"),
        (math.nan, "evaluate gives nan"),
        (math.inf, "evaluate gives inf"),
    ],
)
def test_all_else_is_one_line_that_says_what_to_give(given, words):
    with pytest.raises(StepError) as error:
        named_accuracy(evaluate).score(given)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("trainer.evaluate()['eval_loss']", "lower"),
        ("trainer.evaluate()['eval_accuracy']", "higher"),
        ("glossary", "higher"),
        ("1 - error()", "higher"),
    ],
)
def test_which_way_is_better_is_known_by_the_last_name(name, better):
    assert by_its_name(name) == better
    assert named_accuracy(evaluate, name=name).better == better
    assert named_accuracy(evaluate, "lower", name=name).better == "lower"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3,), "must be a function that gives a number, not int"),
        ((evaluate, "more"), "'higher' or 'lower'"),
        ((evaluate, None, -1), "allowed must be a number from 0 on, not -1"),
        ((None, "lower"), "belong to an accuracy"),
    ],
)
def test_what_can_be_no_accuracy_is_refused(arguments, words):
    with pytest.raises(StepError) as error:
        named_accuracy(*arguments)
    assert words in str(error.value)


def test_it_is_called_with_the_model_where_it_takes_one_argument():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert named_accuracy(lambda: 1.0).bound([model, other])() == 1.0
    assert named_accuracy(lambda net: net).bound([model])() is model
    assert named_accuracy(lambda net, batches=3: net).bound([model])() is model
    with pytest.raises(StepError, match="the step has 2 models"):
        named_accuracy(lambda net: net).bound([model, other])
    with pytest.raises(StepError, match=r"takes net, data: give an expression"):
        named_accuracy(lambda net, data: net).bound([model])


def scored(before: float, after: float, **more: object) -> Scored:
    return Scored("evaluate", before, after, **more)


@pytest.mark.parametrize(
    ("found", "lost", "allowed", "accepted"),
    [
        (scored(0.9, 0.89), 0.01, 0.009, False),
        (scored(0.912, 0.902, asked=0.01), 0.01, 0.01, True),  # as decimal fractions are
        (scored(2.0, 2.01, better="lower"), 0.01, 0.02, True),
        (scored(2.0, 2.1, better="lower"), 0.1, 0.02, False),
        (scored(0.0, -0.1), 0.1, 0.0, False),
        (scored(0.9, 0.89, asked=0.0), 0.01, 0.0, False),
    ],
)
def test_what_is_given_up_is_compared_with_what_is_allowed(found, lost, allowed, accepted):
    assert found.lost == pytest.approx(lost)
    assert found.allowed == pytest.approx(allowed)
    assert found.is_accepted is accepted
    assert found.to_dict()["accepted"] is accepted


def test_a_function_that_gave_nothing_accepts_nothing():
    failed = Scored("evaluate", 0.9, None, failure="no")
    assert not failed.is_accepted
    assert failed.to_dict()["lost"] is None
