"""A step captured as a CUDA graph trains like the plain step, or is declined with a reason."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from speedkit_jupyter import make_graphed_step
from speedkit_jupyter.extras.kernels import graphs
from speedkit_jupyter.support.exceptions import ArgumentError

KIND = "sim" if "sim" in sys.modules else "cuda"
gpu = pytest.mark.gpu if KIND == "cuda" else pytest.mark.usefixtures("recorded_graphs")


class Training:
    """A model and its optimizer, trained for one plain step."""

    def __init__(self, device: str = KIND, dropout: float = 0.0, **options: Any) -> None:
        layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(dropout)]
        self.model = nn.Sequential(*layers, nn.Linear(32, 4)).to(device)
        options = {"lr": 1e-2, "capturable": device == KIND, **options}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.device = device
        self.step(*self.batch(0))

    def batch(self, number: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(number)
        x = torch.rand(rows, 16, generator=made).to(self.device)
        return x, torch.randint(4, (rows,), generator=made).to(self.device)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def weights(self) -> list[torch.Tensor]:
        every = [*self.model.parameters(), *self.model.buffers()]
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return [one.detach().clone() for one in (*every, *states)]


close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def test_on_a_cpu_the_step_runs_as_it_is_and_the_reason_is_said_in_a_line():
    training = Training("cpu")
    twin = copy.deepcopy(training)
    with pytest.warns(UserWarning, match="the step runs unchanged: CUDA graphs need inputs and"):
        step = make_graphed_step(training.step, *training.batch(0))
    for number in range(3):
        step(*training.batch(number))
        twin.step(*training.batch(number))
    assert (step.replays, step.plain_calls) == (0, 3)
    assert step.why.endswith("these are on cpu")
    assert all(map(torch.equal, training.weights(), twin.weights()))


@pytest.mark.parametrize(("step", "inputs"), [(None, ()), (torch.relu, (3,)), (torch.relu, ("x",))])
def test_what_is_no_function_or_no_tensor_is_refused(step, inputs):
    with pytest.raises(ArgumentError, match="must be"):
        make_graphed_step(step, *inputs)


def test_how_far_steps_are_apart_is_a_share_of_what_they_change():
    plain = {"weights": [torch.tensor([3.0, 4.0])], "buffers": []}
    found = {"weights": [torch.tensor([3.0, 4.5])], "buffers": []}
    assert graphs._apart(found, plain) == pytest.approx({"weights": 0.1, "buffers": 0.0})
    assert graphs._apart({"weights": [], "buffers": []}, plain)["weights"] == float("inf")


@gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_several_replays_train_as_plain_steps_do(dropout):
    training = Training(dropout=dropout)
    twin, before = copy.deepcopy(training), training.weights()
    step = make_graphed_step(training.step, *training.batch(0))
    assert step.why == ""
    assert all(map(torch.equal, training.weights(), before))
    module = torch.get_device_module(KIND)
    random = module.get_rng_state()
    losses = [step(*training.batch(number)) for number in range(5)]
    module.set_rng_state(random)
    expected = [twin.step(*training.batch(number)) for number in range(5)]
    assert step.replays == 5
    close(losses, expected)
    close(training.weights(), twin.weights())
    close(*([one.grad for one in each.model.parameters()] for each in (training, twin)))


@pytest.mark.gpu
def test_a_call_launches_the_graph_and_runs_no_python():
    training, calls = Training(), []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return training.step(x, y)

    graphed = make_graphed_step(step, *training.batch(0))
    assert (graphed.why, calls) == ("", [])
    with torch.profiler.profile() as seen:
        graphed(*training.batch(1))
        torch.cuda.synchronize()
    assert "cudaGraphLaunch" in {event.name for event in seen.events()}
    assert calls == []


@gpu
def test_a_call_of_another_shape_is_plain_and_replays_go_on_after_it():
    training = Training()
    twin = copy.deepcopy(training)
    step = make_graphed_step(training.step, *training.batch(0))
    for number, rows in enumerate((8, 5, 8)):
        step(*training.batch(number, rows))
        twin.step(*training.batch(number, rows))
    assert (step.replays, step.plain_calls) == (2, 1)
    close(training.weights(), twin.weights())


@gpu
def test_a_learning_rate_in_a_tensor_may_change():
    training = Training(lr=torch.tensor(1e-2, device=KIND))
    twin = copy.deepcopy(training)
    step = make_graphed_step(training.step, *training.batch(0))
    for number in range(4):
        for each, run in ((training, step), (twin, twin.step)):
            each.optimizer.param_groups[0]["lr"].fill_(10.0**-number)
            run(*training.batch(number))
    assert (step.why, step.replays) == ("", 4)
    close(training.weights(), twin.weights())


@gpu
@pytest.mark.parametrize("change", ["lr", "mode", "weights"])
def test_what_the_graph_would_not_see_ends_it_with_a_warning(change):
    training = Training()
    step = make_graphed_step(training.step, *training.batch(0))
    step(*training.batch(1))
    if change == "lr":
        training.optimizer.param_groups[0]["lr"] = 0.5
    elif change == "mode":
        training.model.eval()
    else:
        training.model[0].weight.data = training.model[0].weight.data.clone()
    twin = copy.deepcopy(training)
    with pytest.warns(UserWarning, match="without its graph from now on"):
        step(*training.batch(2))
    twin.step(*training.batch(2))
    assert (step.replays, step.plain_calls) == (1, 1)
    close(training.weights(), twin.weights())


def decaying(training: Training) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        training.optimizer.param_groups[0]["lr"] *= 0.9
        return training.step(x, y)

    return step


def accumulating(training: Training) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        functional.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()

    return step


def reading(training: Training) -> Callable[..., Any]:
    return lambda x, y: training.step(x, y).item()


@gpu
@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (decaying, {}, "off"),
        (accumulating, {}, "off"),
        (reading, {}, "can't be recorded"),
        (lambda training: training.step, {"capturable": False}, "can't be recorded"),
    ],
)
def test_what_a_graph_would_do_otherwise_is_declined_and_the_plain_step_goes_on(make, options, why):
    training = Training(**options)
    twin, before = copy.deepcopy(training), training.weights()
    with pytest.warns(UserWarning, match="no CUDA graph"):
        step = make_graphed_step(make(training), *training.batch(0))
    assert why in step.why
    assert all(map(torch.equal, training.weights(), before))
    step(*training.batch(1))
    assert step.replays == 0
    twin.step(*training.batch(1))
    torch.accelerator.synchronize()


@gpu
def test_an_optimizer_without_state_is_declined():
    training = Training()
    training.optimizer.state.clear()
    with pytest.warns(UserWarning, match="call the plain step once before"):
        make_graphed_step(training.step, *training.batch(0))
