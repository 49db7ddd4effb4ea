"""Search plans whose parts help or hurt one another, with speed-ups measured on real steps."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.compile import Compile
from speedkit_jupyter.catalog.gemm import Gemm
from speedkit_jupyter.catalog.malloc import Malloc
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.support import database
from speedkit_jupyter.torchglue import heap

pytestmark = [pytest.mark.usefixtures("trusted"), pytest.mark.long]

# Speed-ups over the plain model, measured by `oracle.py` on 2 cores with AVX512_BF16.
RESNET = {
    "bf16+fused_optimizer": 1.70, "bf16+channels_last+fused_optimizer+compile": 1.40,
    "fused_optimizer": 1.32, "bf16": 1.29, "bf16+fused_optimizer+compile": 1.29,
    "bf16+channels_last+fused_optimizer": 1.23, "bf16+channels_last": 1.16, "bf16+compile": 1.14,
    "channels_last": 1.08, "channels_last+fused_optimizer": 1.05,
}  # fmt: skip
TRANSFORMER = {
    "gemm:onednn+fused_optimizer": 1.42, "bf16+fused_optimizer": 1.32, "gemm:onednn": 1.31,
    "bf16": 1.19, "fused_optimizer": 1.08, "bf16+fused_optimizer+compile": 1.08,
    "gemm:onednn+fused_optimizer+compile": 1.03, "tf32:medium+fused_optimizer": 0.92,
    "tf32:medium": 0.88,
}  # fmt: skip
LINEAR = {
    "tf32:medium+fused_optimizer+malloc": 6.5, "tf32:medium+fused_optimizer+malloc+compile": 6.9,
    "gemm:onednn+fused_optimizer+malloc": 6.0, "bf16+fused_optimizer+malloc": 5.5,
    "bf16+fused_optimizer+malloc+compile": 5.5, "fused_optimizer+malloc": 3.9,
    "tf32:medium+malloc": 2.5, "bf16+malloc": 2.2, "gemm:onednn+malloc": 2.1, "malloc": 2.0,
}  # fmt: skip
VIT = {"bf16+fused_optimizer+compile:model": 1.35, "bf16+fused_optimizer": 1.25,
       "bf16+fused_optimizer+compile": 1.22}  # fmt: skip
BLOCKS_LEAD = {"compile:model": 1.35, "compile": 1.25}
BLOCKS_TIE_WITH_NOTHING = {"compile:model": 1.2, "compile": 0.98}
BLOCKS_LOSE = VIT | {"bf16+fused_optimizer+compile": 1.0}
ALL_BUT_COMPILE = [entry.name for entry in CATALOG if entry.name != "compile"]
LSTM = {"bf16+fused_optimizer": 1.005, "bf16": 1.005, "fused_optimizer": 1.0}


@pytest.fixture
def searched(made_time, monkeypatch) -> Callable[..., Tuning]:
    """Return `searched(speedups, step_s)`, which searches plans with these speed-ups ± 2 %."""
    in_force, applied = SimpleQueue[str](), Runner.applied  # a list would be restored
    in_force.put("baseline")
    monkeypatch.setenv("SPEEDKIT_HARDWARE", "cpu_avx512_bf16")

    def swap(name: str) -> str:
        before = in_force.get()
        in_force.put(name)
        return before

    def noting(runner: Runner) -> ExitStack:
        stack = applied(runner)
        stack.callback(swap, swap(runner.record.name))
        return stack

    @contextmanager
    def in_name_alone(self: Any, *given: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(Runner, "applied", noting)

    def make(speedups, step_s, convolves=False, whole_s=0.0, keep=()) -> Tuning:
        monkeypatch.setattr("speedkit_jupyter.search.search.whole_model_s", lambda facts: whole_s)
        offered = {word for plan in speedups for word in plan.split("+")}
        for entry, word in ((Compile, "compile"), (Gemm, "gemm:onednn"), (Malloc, "malloc")):
            values = ("onednn" if entry is Gemm else True,) * (word in offered)
            monkeypatch.setattr(entry, "candidates", lambda *_, values=values: values)
            monkeypatch.setattr(entry, "applied", in_name_alone)

        def seconds() -> float:
            in_force.put(plan := in_force.get())
            plan = "malloc" if plan == "baseline" and heap.is_kept() else plan
            usual = 1.0 if plan == "baseline" else 0.9
            # Noise is seeded by the clock, which no measurement restores.
            return step_s / speedups.get(plan, usual) * random.Random(clock.now()).gauss(1, 0.02)

        layers = [nn.Conv2d(1, 1, 1) for _ in range(2 * convolves)]
        network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2))
        optimizer, x = torch.optim.AdamW(network.parameters()), torch.rand(2, 1, 4, 4)

        def step() -> None:
            made_time.sleep(seconds())
            network(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        search = PlanSearch(step_of(step, network, optimizer), keep=keep)
        list(search.run())
        return search.result()

    return make


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("grid", "step_s", "best"),
    [(RESNET, 0.065, "bf16+fused_optimizer"), (TRANSFORMER, 0.0145, "gemm:onednn+fused_optimizer"),
     (LINEAR, 0.3, "tf32:medium+fused_optimizer+malloc")],
    ids=["the strongest leads only compiled", "two are near", "tf32 in the place of bf16"],
)  # fmt: skip
def test_the_best_plan_of_a_grid_of_real_speed_ups_is_found(searched, grid, step_s, best):
    tuning = searched(grid, step_s, convolves=grid is RESNET)
    assert tuning.winner.name.removesuffix("+compile") == best
    assert grid is not RESNET or tuning.seconds < 10.5


def test_a_search_ends_early_where_nothing_is_to_be_gained(searched):
    tuning = searched(LSTM, 0.002)
    assert not tuning.helped
    assert tuning.seconds < 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("grid", "step_s", "keep"), [(VIT, 0.1, ()), (BLOCKS_LEAD, 0.1, ()),
    (BLOCKS_LEAD, 0.3, ALL_BUT_COMPILE), (BLOCKS_TIE_WITH_NOTHING, 0.3, ()),
    (BLOCKS_TIE_WITH_NOTHING, 0.1, ALL_BUT_COMPILE)],
)  # fmt: skip
def test_the_whole_model_wins_where_its_blocks_tie_with_plain_or_lead(searched, grid, step_s, keep):
    tuning = searched(grid, step_s, whole_s=12.0, keep=keep)
    assert tuning.winner.name == next(iter(grid))
    assert tuning.config.compile.scope == "model"
    (learned,) = database.learned()
    assert learned.value["values"]["compile"] == {"enabled": True, "scope": "model"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("grid", "whole_s"), [(BLOCKS_LOSE, 12.0), (VIT, 0.0), (VIT, 45.0)])
def test_the_whole_model_is_not_compiled_where_that_can_not_pay(searched, grid, whole_s):
    tuning = searched(grid, 0.1, whole_s=whole_s)
    assert tuning.winner.name == "bf16+fused_optimizer"
    raced = {record.name for stage in tuning.stages for record in stage.comparison.records}
    assert not any("compile:model" in name for name in raced)
    said = [why for name, why in tuning.rejected.items() if "compile:model" in name]
    why = "compiling the whole model takes about 45 s: --budget 45 tries it"
    assert said == [why] * (whole_s == 45.0)
