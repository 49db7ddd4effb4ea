"""Measure the gain of each speed-up in a rollout: 500 steps of a CNN on fields of 128 x 128.

Each line adds one speed-up. Speeds are relative to the plain loop (no_grad, float32), measured in
interleaved blocks. Drift is measured over all steps if the budget allows it, else extrapolated.
`auto` is the choice of `rollout(tune=True)`. Exits 1 if its drift is unknown or at least 1 %, or
if its speed at batch 1 is below the goal: 8 on GPUs, 2.5 on CPUs with bf16 units, 1.5 on others.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial

import torch
from _program import Row, collected, parser_of, product
from _tables import exit_code, interval, markdown
from _timing import DEVICE, interleaved_s, over
from torch import nn

from speedkit_jupyter.extras.rollouts.api import Rollout, drifted
from speedkit_jupyter.extras.rollouts.programs import Program, Way, policy_of, way_of
from speedkit_jupyter.extras.rollouts.way_choice import WaySearch, has_bf16
from speedkit_jupyter.support import units

POLICIES = {"autoregressive": "autoregressive", "residual": ("residual", 0.002),
            "convex": ("convex", 0.1)}  # fmt: skip
TOLERANCE = 0.01


class Block(nn.Module):
    """Two convolutions with InstanceNorm and GELU, and a shortcut. Keeps the shape (N, C, H, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = (nn.Conv2d(width, width, 3, padding=1), nn.InstanceNorm2d(width), nn.GELU())
        self.inner = nn.Sequential(*half, *copy.deepcopy(half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def operator(width: int = 32, blocks: int = 2) -> nn.Module:
    """Return a neural operator on fields: (N, 1, H, W) to the same shape."""
    inner = (Block(width) for _ in range(blocks))
    stem, head = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((1, width), (width, 1)))
    return nn.Sequential(stem, *inner, head).eval().to(DEVICE)


def main() -> int:
    options = parser_of(
        __doc__, "rollout.jsonl", batches="1,8,64", policies="residual", steps=500, size=128,
        rounds=15, budget=60.0,
    ).parse_args()  # fmt: skip
    policies, batches = options.policies.split(","), map(int, options.batches.split(","))
    keys = product(policy=policies, batch=batches, steps=[options.steps], size=[options.size])
    work = partial(measured, rounds=options.rounds, budget_s=options.budget)
    rows = collected(options, keys, work, lambda row: (row["policy"], row["batch"], row["auto"]))
    for row in rows:
        print(f"\n{row['policy']}, batch {row['batch']}, plain step {units.seconds(row['step_s'])}")
        print(markdown(("", "over the plain loop", "drift"), *map(cells, row["ways"])))
    goal = 8.0 if DEVICE == "cuda" else 2.5 if has_bf16(torch.device(DEVICE)) else 1.5
    autos = [(row, row["ways"][-1]) for row in rows]
    broken = [f"batch {row['batch']}: {interval(auto['speed'])}, the goal is {goal}"
              for row, auto in autos if row["batch"] == 1 and auto["speed"][0] < goal]  # fmt: skip
    broken += [f"batch {row['batch']}: drift {auto['drift']}" for row, auto in autos
               if auto["largest"] is None or auto["largest"] >= TOLERANCE]  # fmt: skip
    return exit_code(broken)


def cumulative() -> list[Way]:
    """Return the plain way, and ways that each add one speed-up to the way before."""
    low = ["bf16", "channels_last"] if has_bf16(torch.device(DEVICE)) else ["channels_last"]
    words = [*low, "compile", *(["cuda_graph"] if DEVICE == "cuda" else [])]
    return [Way(), *(way_of("+".join(words[: n + 1]), None) for n in range(len(words)))]


def measured(policy: str, batch: int, steps: int, size: int, rounds: int, budget_s: float) -> Row:
    net, rule = operator(), policy_of(POLICIES[policy])
    x = torch.randn(batch, 1, size, size, device=DEVICE)
    choice = WaySearch(net, rule, x, steps, TOLERANCE, budget_s, runs=1000)
    choice.run()
    tuned = Rollout(x, steps, choice.best.way, TOLERANCE, steps, trials=choice.trials)
    ways = [*cumulative(), tuned.way]
    programs = [Program(net, rule, way) for way in ways]
    block = max(int(0.05 / max(tuned.trials[0].step_s or 1.0, 1e-6)), 1)
    runs: dict[int, Callable[[], object]] = {-1: partial(plain_loop, net, rule, x, block)}
    runs |= {at: partial(one.advance, x, block) for at, one in enumerate(programs)}
    times = interleaved_s(runs, rounds)
    drifts = [choice.drift_of(one) for one in programs]
    names = ["plain", *(f"+ {way.words[-1]}" for way in ways[1:-1]), f"auto: {tuned.way.name}"]
    speeds = (over(times[-1], times[at]) for at in range(len(ways)))
    return {
        "step_s": sorted(times[-1])[rounds // 2] / block,
        "auto": tuned.way.name,
        "report": str(tuned),
        "ways": [
            {"name": name, "speed": speed, "drift": drifted(drift), **drift.to_dict()}
            for name, speed, drift in zip(names, speeds, drifts, strict=True)
        ],
    }


@torch.no_grad()
def plain_loop(net: nn.Module, rule: Callable[..., torch.Tensor], x: torch.Tensor, steps: int):
    for _ in range(steps):
        x = rule(net(x), x)


def cells(row: Row) -> tuple[str, ...]:
    return row["name"], interval(row["speed"]), row["drift"]


if __name__ == "__main__":
    sys.exit(main())
