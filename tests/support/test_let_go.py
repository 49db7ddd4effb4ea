"""Models that were measured, planned or shown are freed by reference counting alone."""

import gc
import weakref
from traceback import walk_tb

import pytest
import torch
from torch import nn
from training import is_lowered, training_step

from speedkit_jupyter import SpeedConfig, apply_speedups, benchmark, code, tune, verify
from speedkit_jupyter.plans.applying import preview

ON = {"precision": "bf16", "channels_last": True, "fused_optimizer": True, "threads": 1}
EVERYTHING = SpeedConfig(**ON, sdpa="math", tf32="medium")
VARIANTS = "baseline,bf16,fused_optimizer,channels_last"


class Work:
    def __init__(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.rand(2, 3, 8, 8)
        step = training_step(optimizer, lambda: model(x).square().mean())

        def failing_in_bf16():
            low = is_lowered(model)
            step()
            if low:
                raise ValueError("the step's own")

        self.model, self.optimizer, self.step = model, optimizer, step
        self.failing_in_bf16 = failing_in_bf16

    def references(self) -> list[weakref.ref]:
        return [weakref.ref(one) for one in (self.model, self.model[0].weight, self.optimizer)]


def benchmarked_while_applied(work):
    with apply_speedups(work.model, EVERYTHING, optimizer=work.optimizer)[1]:
        return benchmark(work.step, "baseline,current", budget_s=0.05)


def benchmarked_with_an_error_in_a_variant(work):
    found = benchmark(work.failing_in_bf16, VARIANTS, budget_s=0.05)
    assert found.records[1].failure == "ValueError: the step's own"
    return found


def not_applied(work):
    with pytest.raises(TypeError):
        apply_speedups(work.model, EVERYTHING, optimizer=[work.optimizer, 3])


USES = {
    "not applied": not_applied,
    "previewed": lambda work: preview(work.model, EVERYTHING, [work.optimizer]),
    "benchmarked while applied": benchmarked_while_applied,
    "benchmarked with an error in a variant": benchmarked_with_an_error_in_a_variant,
    "tuned": lambda work: tune(work.step, budget_s=0.1, fresh=True),
}


@pytest.fixture
def no_collector():
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # imports Dynamo, which makes cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_model_is_freed_with_its_last_name(use):
    work = Work()
    references = work.references()
    result = use(work)
    del work
    assert [one() for one in references] == [None] * 3
    del result


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("function", [benchmark, tune, verify])
def test_an_error_that_is_kept_keeps_only_the_frames_of_the_user(function):
    work = Work()
    weight = weakref.ref(work.model[0].weight)
    try:
        function(outside, model=work.model, optimizer=work.optimizer)
    except ValueError as error:
        kept = error
    del work
    assert weight() is None
    *_, (last, _) = walk_tb(kept.__traceback__)
    assert last.f_locals == {"whose": "the user's"}


def outside():
    whose = "the user's"
    raise ValueError(whose)


def test_a_restored_plan_keeps_no_optimizer_and_knows_it_while_it_lives():
    work = Work()
    _, context = apply_speedups(work.model, EVERYTHING, optimizer=work.optimizer)
    context.restore()
    assert list(context.target.optimizers) == [work.optimizer]
    assert "torch.optim.Adam(" in code(context)
    optimizer = weakref.ref(work.optimizer)
    del work.step, work.failing_in_bf16, work.optimizer
    assert optimizer() is None
    assert "torch.optim.Adam(" in code(context)
