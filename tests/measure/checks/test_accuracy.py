"""Right variants are not accused; what is odd about a step is said."""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.optimizations.fused_optimizer import FusedOptimizer


def parts(*extra: nn.Module):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), *extra, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.rand(32, 16), torch.randint(10, (32,))

    def step():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def found(step, model, optimizer, variants="baseline,fused_optimizer") -> dict:
    """The last variant's row."""
    comparison = benchmark(step, variants, model=model, optimizer=optimizer, budget_s=0.2)
    return comparison.to_dict()["variants"][-1]


def planted(monkeypatch, wrong) -> None:
    """`fused_optimizer` does something wrong to its target while it is applied."""

    @contextmanager
    def applied(self, decision, target):
        with wrong(target):
            yield

    monkeypatch.setattr(FusedOptimizer, "applied", applied)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("variant", ["fused_optimizer", "bf16", "fp16", "threads:1", "sdpa:math"])
def test_a_right_variant_is_not_accused(variant):
    model, optimizer, step = parts(nn.LayerNorm(64), nn.Dropout(0.5))
    row = found(step, model, optimizer, f"baseline,{variant}")
    assert row["accuracy"]["verdict"] in ("exact", "rounding"), row["accuracy"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("size", "verdict"),
    [(1e-17, "rounding"), (1e-6, "wrong"), (1e-3, "wrong")],
)
def test_of_gradients_that_vanish_only_what_is_no_noise_counts(monkeypatch, size, verdict):
    model, optimizer, _ = parts()
    x = torch.rand(32, 16)

    def step():
        (1e-20 * model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    @contextmanager
    def shifts_gradients(target):
        handle = next(target.model.parameters()).register_hook(lambda one: one + size)
        yield
        handle.remove()

    planted(monkeypatch, shifts_gradients)
    assert found(step, model, optimizer)["accuracy"]["verdict"] == verdict


def test_gradient_clipping_and_accumulation_are_right_under_fp16():
    model, optimizer, _ = parts()
    x, y = torch.rand(32, 16), torch.randint(10, (32,))

    def step():
        for half in (slice(0, 16), slice(16, 32)):
            nn.functional.cross_entropy(model(x[half]), y[half]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    row = found(step, model, optimizer, "baseline,fp16+fused_optimizer")
    assert row["accuracy"]["verdict"] in ("exact", "rounding"), row["accuracy"]


def test_that_dropout_was_off_in_the_check_is_said():
    model, optimizer, step = parts(nn.Dropout(0.5))
    comparison = benchmark(
        step, "baseline,fused_optimizer", model=model, optimizer=optimizer, budget_s=0.1
    )
    assert comparison.dropout_off
    assert "Dropout was off in the accuracy check" in comparison.report().to_html()
    assert model[2].p == 0.5


def test_a_failed_variant_keeps_nothing_of_its_step_alive():
    model, optimizer, _ = parts()
    held: SimpleQueue = SimpleQueue()  # no list: what a step appends is taken back

    class Large:
        """Stands for a tensor in a frame of the failing step."""

    def step():
        large = Large()
        held.put(weakref.ref(large))
        if torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("out of memory")
        return model(torch.rand(2, 16))

    comparison = benchmark(step, "baseline,bf16", model=model, optimizer=optimizer, budget_s=0.1)
    assert "OutOfMemoryError" in comparison.records[1].failure
    seen = [held.get() for _ in range(held.qsize())]
    assert len(seen) > 2
    assert all(one() is None for one in seen)


def test_a_step_that_gives_nan_by_itself_is_not_called_wrong():
    model, optimizer, _ = parts()
    rows = benchmark(
        lambda: (model(torch.rand(2, 16)) * float("nan")).sum().backward(),
        "baseline,sdpa:math",
        model=model,
        optimizer=optimizer,
        budget_s=0.1,
    ).records
    assert {one.accuracy.verdict for one in rows} == {"not checked"}
    assert "not finite" in rows[1].accuracy.reason


@pytest.mark.parametrize("period_s", [0.05, 0.3])
def test_a_whole_number_of_the_clock_is_no_fault_of_a_plan(machine, period_s):
    machine("cpu")
    torch.manual_seed(0)
    model, log = nn.Linear(16, 16), {}
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 16)

    def step() -> torch.Tensor:
        log["phase"] = int(time.time() / period_s)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = benchmark(step, "baseline,fused_optimizer,channels_last", budget_s=1)
    assert "wrong" not in [found.verdict(record) for record in found.records if record.accuracy]
