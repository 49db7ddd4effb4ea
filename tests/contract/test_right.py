"""Test docs/contract.md, "Right": a variant that computes wrong values never wins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.rounds.comparison import Comparison, Record

# This plan changes no result of the net. The step detects the plan, and is wrong only under it.
PLAN = "sdpa:math"
RIGHT, WRONG = ("exact", "rounding"), ("wrong", "not checked")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 5))


def step_with(fault: str) -> tuple[Callable[[], Any], nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(24, 12), torch.randint(5, (24,))

    def step() -> Any:
        bad = "" if torch.backends.cuda.flash_sdp_enabled() else fault  # in the variant alone
        optimizer.zero_grad()
        out = model(x)
        if bad == "gradients":
            out.register_hook(lambda gradient: gradient * 1.2)
        loss = nn.functional.cross_entropy(out, y)
        (loss * 1.1 if bad == "loss" else loss).backward()
        optimizer.step()
        with torch.no_grad():
            if bad == "updates":
                model[0].weight.add_(1e-3)
            if bad == "buffers":
                model[1].running_mean.mul_(1.5)
        out = out.detach()
        return {
            "outputs": out * 1.03, "scale": out * 1.01, "bias": out + 0.01 * out.std(),
            "shapes": out[:-1], "dtypes": out.half(),
            "finiteness": out.masked_fill(out == out.max(), float("nan")),
            "integers": (out.argmax(1) + 1) % 5, "strings": "done wrongly",
            "numbers": float(out.sum()) * 1.05,
        }.get(bad, {"integers": out.argmax(1), "strings": "done", "numbers": float(out.sum())}.get(
            fault, out))  # fmt: skip

    return step, model, optimizer


def compared(fault: str, variants: str = f"baseline,{PLAN}") -> Comparison:
    step, model, optimizer = step_with(fault)
    return benchmark(step, variants, model=model, optimizer=optimizer, budget_s=0.2)


def verdict(record: Record) -> str:
    assert record.accuracy is not None, record.failure
    return record.accuracy.verdict


@pytest.mark.long
@pytest.mark.parametrize(
    "what",
    ["outputs", "scale", "bias", "loss", "gradients", "updates", "buffers",
     "shapes", "dtypes", "finiteness", "integers", "strings", "numbers"],
)  # fmt: skip
def test_what_differs_is_seen_and_does_not_win(what: str) -> None:
    comparison = compared(what)
    record = comparison.records[1]
    assert verdict(record) in WRONG, record.accuracy
    assert comparison.verdict(record) not in ("faster", "same")
    assert record.accuracy is not None
    reason, number = record.accuracy.reason, record.accuracy.output_error
    assert "\n" not in reason
    assert 0 < len(reason) < 200
    if what in ("outputs", "gradients", "integers"):
        assert number is not None
        assert any(map(str.isdigit, reason))


def test_what_is_right_is_called_so() -> None:
    for record in compared("", f"baseline,{PLAN},bf16,fused_optimizer").records:
        assert verdict(record) in RIGHT, record.accuracy


def test_the_tolerance_is_what_rounding_to_the_variants_precision_costs_this_step() -> None:
    (lowered, plain) = compared("outputs", f"baseline,bf16,{PLAN}").records[1:]
    assert lowered.accuracy
    assert plain.accuracy
    # bf16 rounds 2**16 times as coarsely as float32, so rounding explains a larger error.
    assert lowered.accuracy.explained_output > 100 * plain.accuracy.explained_output  # type: ignore[operator]
    assert verdict(lowered) == "rounding"
    assert lowered.accuracy.output_error < 10 * lowered.accuracy.explained_output  # type: ignore[operator]
    assert verdict(plain) == "wrong"


def test_what_cannot_be_compared_is_not_checked_and_never_wins() -> None:
    model, x = net().eval(), torch.randn(24, 12)

    def step() -> None:
        with torch.no_grad():
            model.forward(x)  # forward() runs no hooks, and the step has no result

    comparison = benchmark(step, f"baseline,{PLAN}", model=model, budget_s=0.2)
    record = comparison.records[1]
    assert verdict(record) == "not checked"
    assert comparison.verdict(record) == "not checked"
