import math
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import rollout
from speedkit_jupyter.extras.rollouts.api import Rollout
from speedkit_jupyter.extras.rollouts.programs import Way, policy_of, way_of
from speedkit_jupyter.extras.rollouts.way_choice import Drift, WaySearch, compared_steps
from speedkit_jupyter.support.exceptions import ArgumentError, StepError

KIND = "sim" if "sim" in sys.modules else "cuda"
gpu = pytest.mark.gpu if KIND == "cuda" else pytest.mark.usefixtures("recorded_graphs")
POLICIES: dict[str, tuple[Any, Any]] = {
    "autoregressive": ("autoregressive", lambda found, x: found),
    "convex": (("convex", 0.3), lambda found, x: 0.3 * found + 0.7 * x),
    "residual": (("residual", 0.1), lambda found, x: x + 0.1 * found),
    "function": (lambda found, x: found - x, lambda found, x: found - x),
}


def field(width: int = 4) -> nn.Module:
    """Return an operator that maps fields of shape (N, 1, H, W) to the same shape."""
    torch.manual_seed(0)
    inner = (nn.Conv2d(1, width, 3, padding=1), nn.InstanceNorm2d(width), nn.GELU())
    return nn.Sequential(*inner, nn.Conv2d(width, 1, 3, padding=1)).eval()


def start(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def by_hand(operator: Any, x: torch.Tensor, steps: int, rule: Any) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(steps):
            x = rule(operator(x), x)
    return x


@pytest.mark.parametrize("name", POLICIES)
def test_the_last_state_is_that_of_a_loop_by_hand(name: str) -> None:
    policy, rule = POLICIES[name]
    operator, x = field(), start()
    before = x.clone()
    found = rollout(operator, x, 7, policy)
    assert isinstance(found, Rollout)
    torch.testing.assert_close(found.state, by_hand(operator, x, 7, rule))
    assert torch.equal(x, before)
    assert found.is_complete
    assert found.steps == 7


def test_the_last_state_has_the_dtype_of_the_first() -> None:
    found = rollout(torch.sin, torch.ones(2, 3), 2, lambda found, x: found.double())
    assert found.state.dtype == torch.float32


def test_an_operator_may_write_to_its_input() -> None:
    x = torch.ones(2, 3)
    found = rollout(lambda state: state.mul_(2), x, 4, tune=True, budget_s=1).state
    assert torch.equal(found, torch.full((2, 3), 16.0))
    assert torch.equal(x, torch.ones(2, 3))


class Counting(nn.Linear):
    """A layer that counts its calls in two buffers: one in place, one by a new tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.steps, self.anew = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.anew = self.anew + 1
        return super().forward(x)


def test_trials_are_no_steps_of_an_operator_that_counts_them() -> None:
    operator = Counting()
    rollout(operator, torch.ones(2, 4), 5, tune=True, budget_s=0.5)
    assert operator.steps == operator.anew == 5
    rollout(operator, torch.ones(2, 4), 5, tune=True, budget_s=0.5)
    assert operator.steps == operator.anew == 10
    assert not operator.anew.is_inference()


def test_a_way_that_needs_a_copy_says_why_there_is_none() -> None:
    operator = field()
    operator.lock = threading.Lock()
    with pytest.raises(ArgumentError, match=r"bf16 needs a copy of the operator, which can't"):
        rollout(operator, start(), 2, way="bf16")


@pytest.mark.parametrize("size", [None, 1])
def test_who_gets_a_stream_may_write_to_its_states(size: int | None) -> None:
    x, seen = torch.ones(2, 3), []
    for state in rollout(lambda state: 2 * state, x, 3, every=1, micro_batch=size):
        seen.append(state.max().item())
        state.zero_()
    assert seen == [2, 4, 8]


def test_a_stream_has_every_so_many_states_and_the_last() -> None:
    operator, x = field(), start()
    states = [*rollout(operator, x, 7, ("residual", 0.1), every=3)]
    rule = POLICIES["residual"][1]
    for state, steps in zip(states, (3, 6, 7), strict=True):
        torch.testing.assert_close(state, by_hand(operator, x, steps, rule))
    assert len([*rollout(operator, x, 4, every=1)]) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_micro_batches_make_the_same_states(size: int) -> None:
    operator, x = field(), start()
    whole = rollout(operator, x, 6).state
    torch.testing.assert_close(rollout(operator, x, 6, micro_batch=size).state, whole)


@pytest.mark.parametrize("word", ["bf16", "channels_last"])
def test_each_way_stays_near_float32_and_leaves_the_operator(word: str) -> None:
    operator, x = field(), start()
    before = {name: value.clone() for name, value in operator.state_dict().items()}
    exact = rollout(operator, x, 5, ("residual", 0.05)).state
    found = rollout(operator, x, 5, ("residual", 0.05), way=word)
    assert found.way.name == word
    assert found.state.dtype == torch.float32
    assert (found.state - exact).norm() < 0.02 * exact.norm()
    for name, value in operator.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.stride() == before[name].stride()
    assert [type(one) for one in operator] == [type(one) for one in field()]


def test_bf16_keeps_the_imaginary_part_of_weights() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.polar(torch.ones(4, 5), torch.rand(4, 5)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=8)

    operator, x = Spectral(), torch.rand(4, 8)
    exact = rollout(operator, x, 3).state
    assert (rollout(operator, x, 3, way="bf16").state - exact).norm() < 0.02 * exact.norm()


def test_an_error_of_the_operator_shows_its_lines_and_none_of_ours() -> None:
    class Tired(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return nn.functional.linear(x, torch.eye(3 if self.calls < 4 else 2))

    found = rollout(Tired(), torch.ones(1, 3), 5, every=2)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        list(found)
    names = [entry.name for entry in caught.traceback]
    assert "forward" in names
    assert not {"_states", "advance", "step"} & {*names}


def test_ctrl_c_returns_what_is_done() -> None:
    calls = []

    def operator(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 62:  # call 1 checks the shape; each of 50 parts has 2 steps
            raise KeyboardInterrupt
        return x + 1

    found = rollout(operator, torch.zeros(2), 100)
    assert (found.steps, found.is_complete) == (60, False)
    assert found.state.tolist() == [60.0, 60.0]
    assert "stopped after 60 of 100 steps" in str(found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "autoregresive"}, "Did you mean 'autoregressive'"),
        ({"policy": ("convex", math.nan)}, "policy must be"),
        ({"steps": 0}, "steps must be 1 or more, not 0"),
        ({"every": -1}, "every must be 1 or more"),
        ({"way": "bf61"}, "Did you mean 'bf16'"),
        ({"micro_batch": 0}, "micro_batch must be 1 or more"),
        ({"x0": torch.arange(3)}, "floating-point"),
        ({"x0": torch.ones(0, 3)}, r"elements, not \(0, 3\)"),
        ({"x0": torch.ones(3).to_sparse()}, "not sparse"),
        ({"policy": lambda found, x: None}, "policy.s result must be a Tensor, not NoneType"),
        ({"operator": 3}, "operator must be callable, not int"),
        ({"operator": nn.Linear(3, 2)}, r"a step changes the shape from \(3,\) to \(2,\)"),
        ({"operator": nn.Sequential(nn.Dropout())}, "call eval"),
        ({"way": "bf16"}, "this operator is a function"),
        ({"operator": lambda x: "text"}, "result must be a Tensor, not str"),
    ],
)
def test_what_does_not_fit_is_one_line(options: dict[str, Any], says: str) -> None:
    given = {"operator": torch.sin, "x0": torch.ones(3), "steps": 2, **options}
    with pytest.raises((ArgumentError, StepError), match=says):
        rollout(**given)


def choice_of(operator: Any, x: torch.Tensor, **more: Any) -> WaySearch:
    more = {"steps": 20, "tolerance": 0.01, **more}
    return WaySearch(operator, policy_of("autoregressive"), x, **more)


@pytest.fixture
def faster_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bf16 the only candidate, and nine times as fast on every machine."""
    ratio = SimpleNamespace(median=9.0, low=8.0, high=10.0)
    monkeypatch.setattr(WaySearch, "_candidates", lambda self: ["bf16"])
    monkeypatch.setattr(WaySearch, "_raced", lambda self, program: (ratio, 9.0, 1.0))


@pytest.mark.usefixtures("faster_bf16")
def test_tuning_takes_what_is_faster_and_near() -> None:
    found = rollout(field(), start(), 20, ("residual", 0.01), tune=True, budget_s=5)
    _, trial = found.trials
    assert found.way == trial.way == found.taken.way == Way(("bf16",))
    assert trial.drift.is_whole
    assert found.drift().axes
    assert found.to_json()
    assert "drift" in str(found)


@pytest.mark.usefixtures("faster_bf16")
def test_tuning_refuses_what_drifts() -> None:
    choice = choice_of(field(), start(), tolerance=1e-6)
    choice.run()
    assert choice.trials[1].why_not == "drifts too far"
    assert choice.best.way == Way()


def test_what_one_rounding_moves_may_move_as_far_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """This chaotic map amplifies rounding. Compiled code may drift as far; bf16 may not."""
    monkeypatch.setattr(WaySearch, "_candidates", lambda self: [])
    choice = choice_of(lambda x: 3.9 * x * (1 - x), torch.rand(2, 8), steps=200)
    choice.run()
    assert max(choice.rounding.errors) > 0.1
    assert choice._allowed(way_of("compile", None)) > 0.1
    assert choice._allowed(way_of("bf16+compile", None)) == 0.01


def test_a_way_that_fails_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaySearch, "_candidates", lambda self: ["bf16"])
    choice = choice_of(torch.sin, torch.ones(3))
    choice.run()
    assert choice.trials[1].why_not.startswith("failed: bf16 needs a torch.nn.Module")


def test_drift_of_a_law_is_extrapolated_with_a_margin() -> None:
    steps = compared_steps(100)
    assert len(steps) > 30
    assert steps[-1] == 100
    linear = Drift(400, steps, [1e-5 * step for step in steps])
    assert linear.largest == pytest.approx(2 * 4e-3, rel=0.05)
    growing = Drift(200, steps, [1e-6 * math.exp(0.05 * step) for step in steps])
    assert growing.largest == pytest.approx(2 * 1e-6 * math.exp(10), rel=0.05)
    assert Drift(100, steps, [1e-3] * len(steps)).largest == 1e-3


def test_drift_that_can_not_be_known_is_infinite() -> None:
    assert Drift(10**6, [1, 2, 3, 4], [1e-9] * 4).largest == math.inf
    assert Drift(2, [1, 2], [1e-9, math.nan]).largest == math.inf


@pytest.mark.compile
def test_compiled_steps_are_those_of_the_loop() -> None:
    operator, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    found = rollout(operator, x, 5, ("convex", 0.5), way="compile").state
    torch.testing.assert_close(found, rollout(operator, x, 5, ("convex", 0.5)).state)


@gpu
@pytest.mark.parametrize("way", ["cuda_graph", "bf16+channels_last+cuda_graph"])
def test_a_cuda_graph_makes_the_same_states(way: str) -> None:
    operator, x = field().to(KIND), start().to(KIND)
    exact = rollout(operator, x, 20, ("residual", 0.01)).state
    states = [*rollout(operator, x, 20, ("residual", 0.01), way=way, every=5)]
    assert len(states) == 4
    assert (states[-1] - exact).norm() < 0.01 * exact.norm()
    assert not torch.equal(states[0], states[1])


@gpu
def test_states_in_main_memory_pass_through_the_gpu_in_parts() -> None:
    operator, x = field().to(KIND), start()
    found = rollout(operator, x, 10, ("residual", 0.01), micro_batch=2, way="cuda_graph").state
    assert found.device.type == "cpu"
    exact = rollout(operator, x.to(KIND), 10, ("residual", 0.01)).state
    torch.testing.assert_close(found, exact.cpu(), rtol=1e-3, atol=1e-3)
