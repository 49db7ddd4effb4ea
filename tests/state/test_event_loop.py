"""Measure in an event loop: whenever other code gets a turn, the user's state is in place."""

import asyncio
import queue
from typing import Any

import pytest
import torch
from torch import nn
from training import Training

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.notebook.panel.background_run import BackgroundRun
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.state import measurement_guard
from speedkit_jupyter.step.step import Step, step_of
from speedkit_jupyter.step.variants import variant

# Two equal variants get no early verdict, so the run is still going when the test's cell runs.
UNSETTLED = "baseline,baseline,channels_last"


def state(training: Training) -> Any:
    plan = applied_to(training.model)
    return training.state(), plan, plan and plan.active


def benchmark(training, names="baseline,channels_last", budget_s=0.3) -> Benchmark:
    return Benchmark(step_of(training.step), [*map(variant, names.split(","))], budget_s)


def run_with(engine: Any, other: Any, most_turns: int = 10_000) -> BackgroundRun:
    """Run an engine in an event loop; call `other(turn)` at each turn, like a user's cell."""
    turns = []

    def told(run: BackgroundRun) -> None:
        if run.state == "running" and len(turns) < most_turns:
            turns.append(None)
            other(len(turns) - 1)

    async def main() -> BackgroundRun:
        run = BackgroundRun(engine, told)
        run.start()
        while run.state == "running":
            await asyncio.sleep(0)
        return run

    run = asyncio.run(main())
    assert turns, "no turn was given up"
    assert measurement_guard.in_progress() is None
    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Training, None),
        (lambda: Training(fused=True), {"channels_last": True, "sdpa": "math"}),
        (Training, {"precision": "bf16", "threads": 2}),
        (lambda: Training(torch.optim.SGD, momentum=0.9), {}),
    ],
)
def test_whenever_a_turn_is_given_up_everything_is_in_place(make, plan):
    training = make()
    if plan is not None:
        apply_speedups(training.model, SpeedConfig(**plan), optimizer=training.optimizer)
    before, seen = state(training), []
    engine = benchmark(training, "baseline,channels_last,bf16", 0.4)
    run = run_with(engine, lambda turn: seen.append(state(training) == before))
    assert run.state == "done", run.message
    assert seen
    assert all(seen)
    assert state(training) == before
    assert run.result.records[1].times_s
    restored(training.model)


def restored(model: nn.Module) -> None:
    while (applied := applied_to(model)) is not None:
        applied.restore()


CELLS: dict[str, tuple[Any, str]] = {
    "a training step": (lambda n: n.step(), " changed"),
    "a value through .data": (
        lambda n: n.model[0].weight.data.mul_(2), "0.weight changed"
    ),
    "a hook": (lambda n: n.model.register_forward_hook(lambda *a: None), "_forward_hooks"),
    "a learning rate": (lambda n: n.optimizer.param_groups[0].update(lr=0.5), "param_groups"),
    "a plan applied": (lambda n: apply_speedups(n.model), "a plan was applied or restored"),
    "a plan restored": (lambda n: restored(n.model), "a plan was applied or restored"),
    "a setting of torch": (lambda n: torch.set_num_threads(2), "torch's settings"),
}  # fmt: skip
PLANNED = ("a training step", "a value through .data", "a plan applied", "a plan restored")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("what", "plan"),
    [
        *((what, None) for what in CELLS if what != "a plan restored"),
        *((what, {"channels_last": True}) for what in PLANNED),
    ],
)
def test_what_a_cell_changes_meanwhile_ends_the_run_and_stays(changing_flags, what, plan):
    change, message = CELLS[what]
    training = Training(fused=True)
    if plan:
        apply_speedups(training.model, SpeedConfig(**plan).alone(), optimizer=training.optimizer)
    after: list[Any] = []

    def cell(turn: int) -> None:
        if turn == 3:
            change(training)
            after.append(state(training))

    run = run_with(benchmark(training, UNSETTLED, budget_s=20), cell)
    assert run.state == "failed"
    assert message in run.message
    assert "The change stays" in run.message
    assert state(training) == after[0]
    restored(training.model)


def test_random_numbers_drawn_meanwhile_stay_drawn_and_do_not_end_the_run():
    training = Training()
    drawn: list[torch.Tensor] = []
    run = run_with(benchmark(training), lambda turn: drawn.append(torch.rand(3)), most_turns=3)
    assert run.state == "done", run.message
    after = torch.rand(3)
    assert not any(torch.equal(after, one) for one in drawn)
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn)


@pytest.mark.parametrize("make", [iter, lambda batches: (one for one in batches)])
def test_an_iterator_gives_a_cell_what_it_would_have_given(make):
    training = Training()
    names: dict[str, Any] = {"it": make([torch.full((2, 2, 5, 5), float(i)) for i in range(50)])}
    next(names["it"])

    def step(context: Any) -> None:
        training.model(next(names["it"])).sum().backward()

    measured = Step(step, [training.model], [], names=names, iterators=["it"])
    engine, drawn = Benchmark(measured, [*map(variant, ("baseline", "channels_last"))], 0.3), []
    run = run_with(engine, lambda turn: drawn.append(float(next(names["it"])[0, 0, 0, 0])), 1)
    assert run.state == "done", run.message
    assert drawn == [1.0]
    assert float(next(names["it"])[0, 0, 0, 0]) == 2.0


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_of_the_step_ends_the_run_with_one_line(error):
    training = Training()
    before, calls = state(training), queue.SimpleQueue()  # a queue is not restored

    def step() -> None:
        training.step()
        calls.put(1)
        if calls.qsize() > 20:
            raise error

    run = BackgroundRun(Benchmark(step_of(step), [variant("baseline")], 5), lambda run: None)
    run.start()  # without an event loop, start() runs to the end
    assert run.state == ("failed" if isinstance(error, ValueError) else "stopped")
    assert run.message == ("the step raised ValueError: mine" if run.state == "failed" else "")
    assert state(training) == before
