"""In a step with several models, each model gets the parts of a plan that fit it."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from training import drained, training_step

from speedkit_jupyter import SpeedConfig, apply_speedups, benchmark, tune
from speedkit_jupyter.step.step import step_of

X = torch.rand(4, 16)
pytestmark = [
    pytest.mark.usefixtures("trusted"),
    pytest.mark.filterwarnings("ignore::speedkit_jupyter.step.step.StateWarning"),
]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def adam(*models: nn.Module) -> Any:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], 1e-3)


Made = tuple[Callable[[], Any], list[Any], dict[str, Any]]


def distilled() -> Made:
    student, teacher = net(), net().requires_grad_(False)
    optimizer = adam(student)
    step = training_step(optimizer, lambda: (student(X) - teacher(X)).pow(2).mean())
    return step, [optimizer], {}


def taught(named_first: bool) -> Made:
    """Return a distillation step; the teacher is first by variable name or in the list `model`."""
    a_teacher, student = net().requires_grad_(False), net()
    optimizer = adam(student)
    step = training_step(optimizer, lambda: (a_teacher(X) - student(X)).pow(2).mean())
    return step, [optimizer], {} if named_first else {"model": [a_teacher, student]}


def adversarial() -> Made:
    drawing, judging = net(), net()
    of_drawing, of_judging = adam(drawing), adam(judging)

    def step() -> None:
        training_step(of_judging, lambda: judging(drawing(X).detach()).pow(2).mean())()
        training_step(of_drawing, lambda: judging(drawing(X)).mean())()

    return step, [of_drawing, of_judging], {}


KINDS = {
    "distilled": distilled,
    "teacher first": lambda: taught(False),
    "teacher found first": lambda: taught(True),
    "adversarial": adversarial,
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizers_part_is_applied_to_the_models_that_have_one(kind):
    step, optimizers, given = KINDS[kind]()
    seen: SimpleQueue[Any] = SimpleQueue()

    def watched() -> None:
        seen.put(tuple(optimizer.param_groups[0]["fused"] for optimizer in optimizers))
        step()

    found = benchmark(watched, "baseline,fused_optimizer", budget_s=0.1, **given)
    baseline, fused = found.records
    assert not fused.failure
    assert fused.applied == {"fused_optimizer": True}
    assert fused.declines == {}
    number = len(optimizers)
    assert {*drained(seen)} == {(None,) * number, (True,) * number}
    assert all(optimizer.param_groups[0]["fused"] is None for optimizer in optimizers)
    assert not baseline.applied


def test_a_wrapped_model_that_is_not_named_is_a_bystander():
    named, wrapped = net(), nn.DataParallel(net())
    step = step_of(lambda: named(X) + wrapped(X), named)
    assert ([*step.models], [*step.bystanders]) == ([named], [wrapped.module])


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["first", "last"])
def test_convolutions_of_any_model_are_laid_out_and_offered(order):
    convolutional, plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), nn.Linear(4 * 36, 2)
    images, seen = torch.rand(2, 3, 8, 8), SimpleQueue[Any]()

    def step() -> torch.Tensor:
        seen.put(convolutional[0].weight.stride()[1] == 1)
        result: torch.Tensor = plain(convolutional(images))
        return result

    models = [convolutional, plain][order]
    found = benchmark(step, "baseline,channels_last", model=models, budget_s=0.1)
    assert found.records[1].applied == {"channels_last": True}
    assert {*drained(seen)} == {True, False}
    tuning = tune(step, model=models, budget_s=0.1, fresh=True)
    assert "channels_last" in " ".join([*tuning.tried.plans, *tuning.rejected])


def test_each_model_keeps_its_own_plan_in_the_variant_current():
    first, second = net(), net()
    optimizer = adam(second)
    _, context = apply_speedups(
        second, SpeedConfig.from_dict({"fused_optimizer": True}).alone(), optimizer=optimizer
    )
    step = training_step(optimizer, lambda: second(first(X)).pow(2).mean())
    found = benchmark(step, "baseline,current", model=[first, second], budget_s=0.1)
    assert found.records[1].applied == {"fused_optimizer": True}
    context.restore()
