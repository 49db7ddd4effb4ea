"""Each variant's settings are in force in its timed steps, however the step gets its context."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training import training_step

from speedkit_jupyter import SpeedConfig, apply_speedups, benchmark
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import Sampler

pytestmark = pytest.mark.usefixtures("trusted")

BATCH = torch.rand(4, 3, 6, 6)


class Network(nn.Module):
    """Network that writes torch's settings to a file, because measurements restore attributes."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(64, 2)
        self.file = file

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(self.convolution(x).flatten(1))
        what = {
            "dtype": str(result.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "matmul": torch._C._get_float32_matmul_precision(),
            "math_only": not torch.backends.cuda.flash_sdp_enabled(),
            "channels_last": self.convolution.weight.stride()[1] == 1,
        }
        write(self.file, what)
        return result


def write(file: Path, what: Any) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(what) + "\n")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the file, and `by(name)`, which returns the distinct settings of a variant's steps."""
    file, block = tmp_path / "seen.jsonl", Sampler._block

    def named(sampler: Sampler, runner: Any) -> Any:
        write(file, runner.record.name)
        try:
            return block(sampler, runner)
        finally:
            write(file, "")

    def by(name: str) -> list[dict[str, Any]]:
        found, now = [], ""
        for line in map(json.loads, file.read_text().splitlines()):
            if isinstance(line, str):
                now = line
            elif now == name and line not in found:
                found.append(line)
        return found

    monkeypatch.setattr(Sampler, "_block", named)
    return SimpleNamespace(file=file, by=by)


def loop(network: nn.Module, optimizer: Any, context: Any) -> None:
    """Run one step of the loop that `apply` prints; it uses the scaler in every precision."""
    with context.autocast():
        loss = network(BATCH).pow(2).mean()
    context.grad_scaler.scale(loss).backward()
    context.grad_scaler.step(optimizer)
    context.grad_scaler.update()
    optimizer.zero_grad()


@pytest.fixture(params=["decorated", "as argument", "without", "applied"])
def parts(request: pytest.FixtureRequest, seen: Any) -> Iterator[Any]:
    """Yield a network, an optimizer, and a step that gets its context as `request.param` says."""
    before = torch.get_num_threads(), torch._C._get_float32_matmul_precision()
    network = Network(seen.file)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    config = SpeedConfig(precision="bf16")
    is_applied = request.param in ("applied", "decorated")
    ctx = apply_speedups(network, config, optimizer=optimizer)[1] if is_applied else None
    forward = lambda: network(BATCH)  # noqa: E731
    if request.param == "decorated":
        forward = ctx.sdpa()(ctx.autocast()(forward))
    step = {
        "as argument": lambda ctx: loop(network, optimizer, ctx),
        "applied": lambda: loop(network, optimizer, ctx),
    }.get(request.param, training_step(optimizer, lambda: forward().pow(2).mean()))
    yield SimpleNamespace(network=network, optimizer=optimizer, step=step, before=before)
    if ctx is not None:
        ctx.restore()


@pytest.mark.sampled(2)
@pytest.mark.every_machine
def test_each_variant_runs_as_its_name_says_and_baseline_as_without_speedkit(parts, seen):
    before = parts.before  # an applied plan may change the number of threads
    names = "baseline,bf16,fp16,threads:1,channels_last,sdpa:math"
    given = {"model": parts.network, "optimizer": parts.optimizer, "budget_s": 0.05}
    found = benchmark(parts.step, names, **given)
    as_found = {"dtype": "float32", "threads": before[0], "matmul": before[1]}
    as_found |= {"math_only": False, "channels_last": False}
    assert not {one.name: one.failure for one in found.records if one.failure}
    changes = {
        "baseline": {}, "bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"},
        "channels_last": {"channels_last": True}, "sdpa:math": {"math_only": True},
        "threads:1": {"threads": 1},
    }  # fmt: skip
    for name, change in changes.items():
        assert seen.by(name) == [as_found | change] or (name, before[0]) == ("threads:1", 1), name


@pytest.mark.checked
@pytest.mark.every_machine
@pytest.mark.sampled(4)
def test_the_loss_is_scaled_once_in_fp16_and_never_elsewhere(parts, monkeypatch, made_time):
    gradients: dict[str, list[float]] = {}
    once = Runner.once

    def noting(runner: Runner, *args: Any, **more: Any) -> object:
        handle = parts.network.linear.bias.register_hook(
            lambda g: gradients.setdefault(runner.record.name, []).append(float(g.norm()))
        )
        with handle:
            return once(runner, *args, **more)

    monkeypatch.setattr(Runner, "once", noting)
    given = {"model": parts.network, "optimizer": parts.optimizer}
    benchmark(parts.step, "baseline,bf16,fp16", **given, budget_s=0.05)
    usual = gradients["baseline"][0]
    assert all(0.5 < one / usual < 2 for name in ("baseline", "bf16") for one in gradients[name])
    # The first scales may overflow. Gradients scaled twice would be 2**32 times as large.
    scales = [one / usual for one in gradients["fp16"] if math.isfinite(one) and one > 2 * usual]
    assert scales
    assert all(2.0**6 < one < 2.0**18 for one in scales)


def test_the_context_of_the_user_is_asked_again_after_the_measurement(seen):
    network = Network(seen.file)
    with apply_speedups(network, SpeedConfig(precision="bf16"))[1] as ctx:

        def step() -> torch.Tensor:
            with ctx.autocast():
                return network(BATCH)

        benchmark(step, "baseline,fp16", model=network, budget_s=0.05)
        assert step().dtype == torch.bfloat16
    assert step().dtype == torch.float32
    assert seen.by("baseline")[0]["dtype"] == "float32"
    assert seen.by("fp16")[0]["dtype"] == "float16"


def test_a_second_model_of_the_step_has_a_context_of_its_own(seen):
    one, other = Network(seen.file), Network(seen.file)
    ctx_other = apply_speedups(other, SpeedConfig(precision="bf16"))[1]

    def step() -> torch.Tensor:
        with ctx_other.autocast():
            return one(BATCH) + other(BATCH)

    with ctx_other:
        benchmark(step, "baseline,fp16", model=[one, other], budget_s=0.05)
    assert [inside["dtype"] for inside in seen.by("baseline")] == ["float32"]
    assert [inside["dtype"] for inside in seen.by("fp16")] == ["float16"]
