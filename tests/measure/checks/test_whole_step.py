"""The accuracy check sees whole steps: each optimizer step, what comes after it, every call, what
is written down, and later steps. `tests/benchmarks/_whole.py` has all kinds, these are some.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from _whole import WHOLE
from planted import word
from torch import nn

from speedkit_jupyter.measure.checks.comparing.wording import differ, misspelt, tokens
from speedkit_jupyter.measure.checks.judging import controls
from speedkit_jupyter.measure.checks.observing.observation import (
    MOST_CALLS,
    MOST_SAMPLED,
    Calls,
    Observation,
)
from speedkit_jupyter.measure.checks.observing.observer import MOST_STRETCHES, observing
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.variants import variant

CHOSEN = {
    "bf16": (
        "GAN, the generator the other way", "epoch, AdamW, the rate", "LBFGS",
        "metric after the step", "moving average", "written to a dict", "text",
        "calls 12 to 20 of 40", "from the second step on", "optimizer state",
    ),
    "sdpa:math": (
        "gradient accumulation", "sharpness-aware", "meta-learning", "by hand",
        "evaluation after the step", "written to a list", "list of words, alone",
        "unrolled and trained", "cached weights",
    ),
}  # fmt: skip
CASES = [one for one in WHOLE if one.name in CHOSEN[one.group.partition(", ")[2]]]


def named(one):
    return f"{one.group}: {one.name}"


def checked(make):
    """The verdict on the plan, from the accuracy check alone, whatever the load."""
    torch.manual_seed(1)
    step, model, optimizer, plan = make()
    bench = Benchmark(step_of(step, model, optimizer), [variant("baseline"), variant(plan)], 60)
    run = bench.run()
    for progress in run:
        if progress.text.startswith("memory of"):
            break
    run.close()
    return bench.result().records[1]


@pytest.mark.sampled(19)
@pytest.mark.parametrize("one", CASES, ids=named)
def test_a_fault_after_the_beginning_is_seen_and_the_same_step_without_it_is_not_accused(one):
    found = checked(one.make)
    assert word(found) in ("wrong", "not checked"), found.accuracy
    assert found.accuracy.reason
    honest = checked(one.honest)
    assert word(honest) in ("exact", "rounding"), honest.accuracy


@pytest.mark.slow
def test_the_reason_says_which_step_and_after_how_many_optimizer_steps():
    reasons = {one.name: checked(one.make).accuracy.reason for one in CASES if one.name in
               ("GAN, the generator the other way", "from the second step on")}  # fmt: skip
    assert reasons["GAN, the generator the other way"].startswith("after 1 optimizer step: ")
    assert reasons["from the second step on"].startswith("in step 2: ")


@pytest.mark.slow
def test_where_the_controls_end_early_nothing_honest_is_accused(monkeypatch):
    monkeypatch.setattr(controls, "WHOLE", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer, x = torch.optim.AdamW(model.parameters(), 1e-2), torch.randn(32, 16)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    assert word(checked(lambda: (step, model, optimizer, "bf16"))) == "rounding"
    assert word(checked(lambda: (step, model, optimizer, "fused_optimizer"))) == "exact"
    late = next(one for one in CASES if one.name == "from the second step on")
    assert checked(late.make).accuracy.reason.startswith("in step 2: ")


def epochs(count, lead=None, steps=2, spoil=0.0):
    """The course of steps that take `count` optimizer steps each."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with observing([model], (), lambda: 1.0, lead=lead) as observer:
        for _ in range(steps):
            for _ in range(count):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                with torch.no_grad():
                    model.weight.add_(spoil)
                optimizer.step()
            observer.step_ended(None, list)
    return observer.course


def test_each_stretch_begins_where_the_baselines_did():
    lead = epochs(3)
    assert lead.ends == [5, 10]
    other = epochs(3, lead, spoil=1.0)
    assert other.ends == lead.ends
    for number in (1, 2, 5, 6):
        ours, theirs = other.stretches[number], lead.stretches[number]
        assert all(map(torch.equal, ours.gradients, theirs.gradients)), number
    assert lead.stretches[1].place == (0, 1)
    assert lead.stretches[6].place == (1, 1)


def test_of_very_many_stretches_some_are_kept_spread_over_all():
    lead = epochs(100, steps=1)
    inner = [number for number, one in lead.stretches.items() if not one.role]
    assert len(inner) <= MOST_STRETCHES + 1
    assert inner[0] == 0
    assert max(b - a for a, b in pairwise(inner)) <= 16
    assert lead.ends == [102]
    assert epochs(100, lead, steps=1).stretches.keys() == lead.stretches.keys()


@pytest.mark.parametrize("count", [3, 17, 40, 3000])
def test_of_all_calls_something_is_kept_of_very_many_some(count):
    calls = Calls()
    for index in range(count):
        calls.add((torch.tensor(index),), {}, torch.full((500,), float(index)), 2**20)
    assert calls.count == count
    assert len(calls.kept) <= min(count, MOST_CALLS + MOST_SAMPLED)
    firsts = [float(one.results.numbers[0].flatten()[0]) for one in calls.kept]
    assert firsts == sorted(set(firsts))
    assert firsts[-1] == count - 1
    if count <= MOST_SAMPLED:
        assert len(firsts) == count
    else:
        assert max(b - a for a, b in pairwise(firsts)) <= 8


@pytest.mark.parametrize(
    ("one", "other", "count", "off"),
    [
        ("a cat sat", "a cat sat", 0, False),
        ("a cat sat", "a dog sat", 1, False),
        ("a cat sat here", "a sat here", 1, False),
        ("loss 0.1234", "loss 0.1235", 0, False),
        ("loss 0.1234", "loss 0.2234", 0, True),
        ("loss -1.5e-03", "loss 1.5e-03", 0, True),
        ("step 3", "step 4", 1, False),
    ],
)
def test_words_are_counted_and_written_numbers_measured(one, other, count, off):
    found = differ(*(_tokens(each) for each in (one, other)))
    assert found[0] == count
    assert (found[1] > 0) is off


def _tokens(text):
    seen = Observation()
    seen.outputs.add(text)
    return tokens(seen)


def test_words_that_the_control_changes_too_accuse_nobody():
    texts = ["float32 " * 20, "bfloat16 " * 20, "float64 " * 20]
    seen = [Observation() for _ in texts]
    for one, text in zip(seen, texts, strict=True):
        one.outputs.add(text)
    baseline, variant_, control = seen
    assert misspelt(variant_, baseline, [], "bf16")
    assert not misspelt(variant_, baseline, [control], "bf16")


def test_gradients_that_lay_there_are_not_taken_for_what_a_step_wrote_down():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()

    def step():
        model(torch.ones(1, 2)).sum().backward()  # in place
        model.zero_grad()

    with step_of(step).isolated() as visit:
        step()
        assert list(visit.state.changed()) == []
