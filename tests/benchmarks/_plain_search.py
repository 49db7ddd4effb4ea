"""Search plans in sixty lines of plain torch, as users might, for comparison with `tune()`."""

import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from _workloads import Backward, made

# Each turn keeps the faster half. Turn n (from 0) times STEPS * 2**n steps and TURN_S * 2**n s.
TURNS, STEPS, TURN_S = 4, 2, 0.2
# Gradients (for inference, results) may be off by this share of their norm.
TOLERATED = 0.1


class Found(NamedTuple):
    plan: str
    step: Callable[[], object]
    speedup: float
    seconds: float  # without compiling_s
    compiling_s: float


class Trial:
    """One combination of options, on its own copy of a workload."""

    def __init__(self, name: str, device: str, *parts: str) -> None:
        self.parts, self.device, self.work, self.step_s = parts, device, made(name, device), 0.0
        self.model, self.optimizer = self.work.model, self.work.optimizer
        if "channels_last" in parts:
            self.model.to(memory_format=torch.channels_last)
        if "fused" in parts:
            lr = self.optimizer.defaults["lr"]
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, fused=True)
        if "compile" in parts:
            self.model = torch.compile(self.model)

    def step(self, *backward: Backward) -> Any:
        with torch.autocast(self.device, torch.bfloat16, enabled="bf16" in self.parts):
            return self.work.step(self.model, self.optimizer, *backward)

    def timed(self, steps: int = 1, seconds: float = 0.0) -> float:
        times, end_s = [], time.perf_counter() + seconds
        while len(times) < steps or time.perf_counter() < end_s:
            begun_s = time.perf_counter()
            self.step()
            if self.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun_s)
        self.step_s = median(times)
        return self.step_s

    def shown(self, weights: dict[str, Any]) -> torch.Tensor:
        """Return a step's gradients at these weights as one vector, or in inference its results."""
        self.work.model.load_state_dict(weights)
        found, held = [], [*self.work.model.parameters()]
        results = self.step(lambda loss: found.extend(torch.autograd.grad(loss, held)))
        return torch.cat([one.float().flatten() for one in found or [results]])


def plain_search(name: str, device: str = "cpu") -> Found:
    """Search all combinations of bf16, channels_last, a fused optimizer and compile."""
    begun_s, compiling_s, work = time.perf_counter(), 0.0, made(name, device)
    has_images = any(isinstance(one, torch.nn.Conv2d) for one in work.model.modules())
    parts = ["bf16"] + ["channels_last"] * has_images + ["fused"] * bool(work.optimizer)
    switches = ([(), (part,)] for part in (*parts, "compile"))
    racing = [Trial(name, device, *sum(some, ())) for some in itertools.product(*switches)]
    for trial in racing:
        compiling_s += trial.timed() * ("compile" in trial.parts)
    plain, ranks, turn = racing[0], racing, 0
    while len(racing) > 1 and turn < TURNS:
        racing.sort(key=lambda trial, n=2**turn: trial.timed(STEPS * n, TURN_S * n))
        racing, ranks, turn = racing[: len(racing) // 2], racing + ranks[len(racing) :], turn + 1
    weights = work.model.state_dict()
    exact, seen = plain.shown(weights), ((one, one.shown(weights)) for one in ranks)
    best = next(one for one, it in seen if (it - exact).norm() <= TOLERATED * exact.norm())
    plan, took_s = "+".join(best.parts) or "baseline", time.perf_counter() - begun_s
    return Found(plan, best.step, plain.step_s / best.step_s, took_s - compiling_s, compiling_s)
