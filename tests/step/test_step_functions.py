"""Steps get the right arguments; functions whose call runs none of their code are refused."""

import functools
import warnings

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedContext, StepError, benchmark, tune, verify
from speedkit_jupyter.step.step import step_of

model = nn.Linear(4, 4)
batch = torch.rand(2, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def plain():
    model(batch).sum().backward()
    optimizer.step()


async def coroutine():
    plain()


def generator():
    yield plain()


async def asynchronous_generator():
    yield plain()


class Asynchronous:
    async def __call__(self):
        plain()

    method = __call__


class Working:
    def __call__(self):
        plain()

    method = __call__


runs_it = functools.wraps(coroutine)(lambda: plain())


UNRUN = {
    "async": coroutine,
    "generator": generator,
    "async generator": asynchronous_generator,
    "object": Asynchronous(),
    "method": Asynchronous().method,
    "nested partial": functools.partial(functools.partial(generator)),
    "result": lambda: coroutine(),
    "two arguments": lambda x, y: x,
    "a batch": lambda batch: plain(),
}
TAKEN = {
    "object": Working(),
    "method": Working().method,
    "wrapper": runs_it,
    "list": lambda: list(generator()),
    "expression over results": lambda: (one.sum() for one in [model(batch)]),
    "with a context": lambda ctx: plain(),
}
MEASURES = {
    "benchmark": lambda step: benchmark(step, model=model, budget_s=0.1),
    "tune": lambda step: tune(step, model=model, budget_s=0.1),
    "verify": lambda step: verify(step, "fused_optimizer", model=model, steps=2),
}
CASES = [*(("benchmark", kind) for kind in UNRUN), ("tune", "async"), ("verify", "generator")]


@pytest.mark.parametrize(("way", "kind"), CASES)
def test_a_step_that_does_not_run_is_refused_and_python_does_not_warn(way, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StepError, match=r"never run: write|called with 1|no batch") as told:
            MEASURES[way](UNRUN[kind])
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", TAKEN)
def test_a_step_that_works_is_taken(kind):
    assert benchmark(TAKEN[kind], "baseline,baseline", model=model, budget_s=0.05).records


CONTEXT = object.__new__(SpeedContext)


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        (lambda: (), ()),
        (lambda ctx: (ctx,), (CONTEXT,)),
        (lambda batch="the user's": (batch,), ("the user's",)),
        (lambda *, batch="the user's", **more: (batch, more), ("the user's", {})),
        (lambda *arguments: arguments, (CONTEXT,)),
        (functools.partial(lambda ctx: (ctx,), "bound"), ("bound",)),
    ],
)
def test_what_a_step_is_called_with(step, arguments):
    assert step_of(step, model, optimizer).run(CONTEXT) == arguments
