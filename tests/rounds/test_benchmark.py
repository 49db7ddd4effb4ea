"""Benchmark steps whose layout, length or scale varies, and variants that fail in the rounds."""

from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from training import drained, is_lowered, training_step

from speedkit_jupyter import benchmark
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import variant

pytestmark = pytest.mark.usefixtures("trusted")


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.rand(2, 3, 9, 9)


@pytest.mark.sampled(2)
@pytest.mark.checked
@pytest.mark.parametrize("trained_before", [False, True])
def test_in_every_block_optimizer_state_and_gradients_lie_like_their_weights(trained_before):
    network, x = convolutions()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    seen: SimpleQueue[Any] = SimpleQueue()  # measurements don't restore queues

    def step() -> None:
        for p in network.parameters():
            tensors = [p.grad, *optimizer.state.get(p, {}).values()]
            found = {one.stride() for one in tensors if one is not None and one.dim()}
            seen.put((p.stride() if p is network[0].weight else None, found - {p.stride()}))
        network(x).pow(2).mean().backward()
        optimizer.step()

    if trained_before:
        step()
    names = "baseline,channels_last,channels_last+fused_optimizer"
    comparison = benchmark(step, names, model=network, optimizer=optimizer, budget_s=0.2)
    layouts, mispaired = zip(*drained(seen), strict=True)
    assert not any(mispaired)
    assert len({*layouts} - {None}) == 2
    assert all(one.accuracy.verdict in ("exact", "rounding") for one in comparison.records)


def small() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return network, torch.optim.SGD(network.parameters(), 0.01), torch.rand(4, 8)


def test_a_variant_whose_scaler_skips_every_step_fails():
    network, optimizer, x = small()
    # The loss is finite in float32 but too large for float16.
    step = training_step(optimizer, lambda: (network(x) * 1e20).sum())
    names = "baseline,fp16,sdpa:math"
    found = benchmark(step, names, model=network, optimizer=optimizer, budget_s=1)
    baseline, fp16, math = found.records
    assert "skipped every optimizer step" in fp16.failure
    assert fp16.times_s == []
    assert found.best is not fp16
    assert len(baseline.times_s) == len(math.times_s) > 0


def test_a_round_in_which_the_scaler_skips_does_not_count(made_time):
    network, optimizer, x = small()
    calls: SimpleQueue[int] = SimpleQueue()

    def loss() -> torch.Tensor:
        halved = is_lowered(network)
        if halved:
            calls.put(1)
            made_time.sleep(made_time.perf_counter() * 7919 % 0.02)  # noise keeps the rounds going
        overflows = halved and calls.qsize() % 9 == 0
        return (network(x) * (1e30 if overflows else 1.0)).sum()

    step = training_step(optimizer, loss)
    comparison = benchmark(step, "baseline,fp16", model=network, optimizer=optimizer, budget_s=2)
    assert comparison.records[1].failure is None
    assert len(comparison.baseline.times_s) == len(comparison.records[1].times_s) > 0
    assert comparison.skipped_rounds > 0
    assert "left out: the GradScaler skipped" in repr(comparison)


@pytest.mark.parametrize("unsteady", ["baseline", "bf16"])
def test_a_step_that_gets_slower_with_each_call_makes_no_plan_faster(made_time, unsteady):
    network, optimizer, x = small()
    count = [0]  # grows like a replay buffer, a curriculum, or a cache of keys
    disturbed: SimpleQueue[float] = SimpleQueue()
    for seconds in (0.02, 0.0, 0.03, 0.0, 0.02, 0.0):  # these delays lengthen one warm-up
        disturbed.put(seconds)

    def loss() -> torch.Tensor:
        count[0] += 1
        made_time.sleep(1e-3 * count[0])
        if is_lowered(network) == (unsteady == "bf16") and not disturbed.empty():
            made_time.sleep(disturbed.get())
        return network(x).square().mean()

    step = training_step(optimizer, loss)
    found = benchmark(step, "baseline,bf16", model=network, optimizer=optimizer, budget_s=2)
    ratio = found.ratio(found.records[1])
    assert ratio is not None
    assert ratio.median == pytest.approx(1, abs=0.01)


def test_a_variant_that_fails_in_the_rounds_is_a_row_and_the_others_go_on(made_time):
    network, optimizer, x = small()
    calls: SimpleQueue[int] = SimpleQueue()

    def step(ctx: Any) -> None:
        if ctx.plan["sdpa"].active:
            calls.put(1)
            made_time.sleep(made_time.perf_counter() * 7919 % 0.02)  # noise keeps the rounds going
            if calls.qsize() > 40:
                raise RuntimeError("out of memory")
        network(x).sum().backward()

    names = "baseline,sdpa:math,fused_optimizer"
    comparison = benchmark(step, names, model=network, optimizer=optimizer, budget_s=9)
    baseline, failing, other = comparison.records
    assert failing.failure == "RuntimeError: out of memory"
    assert comparison.verdict(failing) == "failed"
    assert len(baseline.times_s) == len(other.times_s) > 0


def test_where_a_schedule_ends_within_a_block_each_step_begins_anew():
    network, _, x = small()
    calls = [0]

    def step() -> None:
        calls[0] += 1
        if calls[0] > 4:  # a warm-up makes at most 4 calls, a block more
            raise ValueError("tried to step 5 times")
        network(x).sum().backward()

    found = benchmark(step, "baseline,sdpa:math", model=network, budget_s=1)
    assert "a call that follows others raises ValueError: tried to step 5 times" in found.repeats
    assert all(record.times_s and not record.failure for record in found.records)


def test_the_benchmark_says_beforehand_how_long_it_takes_and_whether_that_is_enough():
    network, optimizer, x = small()
    step = Step(lambda context: network(x), [network], [optimizer])
    variants = [*map(variant, ("baseline", "sdpa:math"))]
    said = [one.text for one in Benchmark(step, variants, 1e-6).run()]
    assert any(text.endswith("warming up sdpa:math (2 of 2)") for text in said)
    assert any(text.startswith("one step takes ") for text in said)
    warned = next(n for n, text in enumerate(said) if "short for a clear answer" in text)
    assert "--budget" in said[warned]
    assert warned < next(n for n, text in enumerate(said) if text.startswith("round 1"))
