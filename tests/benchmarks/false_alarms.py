"""How often `auto` claims a gain where no plan changes anything.

Each trial is a race of 1, 3 or 8 plans on the steps of a loop. The plans are names only: every step
runs the same code, so each claim of a gain is a false alarm. The loop is a small network that
trains for 1,500 steps; `made` steps take made-up times instead (scatter, bursts, drift, two
states), which is quick and needs no quiet machine.

    python tests/benchmarks/false_alarms.py [--load made|quiet|busy] [--trials 200]

A real trial takes about two seconds; a stopped run goes on. `busy` keeps both cores busy in bursts
with other processes. Exits 1 where more than 5 % of the races claim a gain.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from _load import bursts
from _program import Row, append, exit_code, machine, parser_of, read
from scipy import stats
from torch import nn

from speedkit_jupyter.extras.auto.controller import OVERHEAD
from speedkit_jupyter.extras.auto.race import BASELINE, Race

STEPS, STEP_S, PROMISED = 1500, 0.01, 0.05
PLANS = (1, 3, 8)
SWITCH_S = 2e-4


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "false_alarms.jsonl")
    parser.add_argument("--load", choices=("made", "quiet", "busy"), default="made")
    parser.add_argument("--trials", type=int, default=200)
    options = parser.parse_args()

    def done() -> list[Row]:
        return [row for row in read(options.file) if row["load"] == options.load]

    torch.set_num_threads(1)  # two threads that wait for one another would measure the scheduler
    if not options.table:
        with bursts() if options.load == "busy" else nullcontext():
            for number in range(len(done()), options.trials * len(PLANS)):
                row = trial(number, options.load)
                append(options.file, {"load": options.load, **row})
    print(f"{machine()}, {options.load}")
    print(table(done()))
    return exit_code(broken(done()))


def trial(number: int, load: str) -> Row:
    """Run one race, and return whether it claims a gain."""
    plans = PLANS[number % len(PLANS)]
    noise = NOISES[number // len(PLANS) % len(NOISES)]
    step = made_step(noise, number) if load == "made" else real_step()
    race = Race([f"plan {one}" for one in range(plans)], OVERHEAD, seed=number)
    elapsed_s = 0.0
    for _ in range(STEPS):
        seconds, before = step(), race.active
        elapsed_s += seconds
        if race.step_ended(seconds, "all", elapsed_s) != before:
            race.switched(SWITCH_S)
    called_slower = sum("times slower" in why for why in race.reasons.values())
    claims = race.leader != BASELINE
    kind = noise.__name__ if load == "made" else load
    return {"plans": plans, "noise": kind, "claims": claims, "called_slower": called_slower}


def real_step() -> Callable[[], float]:
    """Return a function that makes a training step, and returns its seconds."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.rand(64, 64)

    def step() -> float:
        begun_s = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begun_s

    return step


# Made-up noise: each takes the number of the step and returns the factor of its time.


def scatter(draw: random.Random, step: int, seed: int) -> float:
    """Return a factor that scatters by 5 %."""
    return draw.lognormvariate(0, 0.05)


def outliers(draw: random.Random, step: int, seed: int) -> float:
    """Return a factor of which one in ten is up to 5."""
    return draw.lognormvariate(0, 0.03) * (1 + 4 * draw.random() * (draw.random() < 0.1))


def drift(draw: random.Random, step: int, seed: int) -> float:
    """Return a factor that grows by half in 500 steps, and falls back."""
    return draw.lognormvariate(0, 0.03) * (1 + step % 500 / 1000)


def two_states(draw: random.Random, step: int, seed: int) -> float:
    """Return a factor that is 1 or 1.4 for about 30 steps at a time."""
    is_slow = random.Random(f"{seed} {step // 30}").random() < 0.3
    return draw.lognormvariate(0, 0.03) * (1.4 if is_slow else 1.0)


def waves(draw: random.Random, step: int, seed: int) -> float:
    """Return a factor that swings by a fifth each 11 steps."""
    return draw.lognormvariate(0, 0.03) * (1 + 0.2 * math.sin(step / 11 * math.tau))


NOISES = (scatter, outliers, drift, two_states, waves)


def made_step(noise: Callable[[random.Random, int, int], float], seed: int) -> Callable[[], float]:
    """Return a function that returns the made-up seconds of the next step."""
    draw, numbers = random.Random(seed), iter(range(STEPS))
    return lambda: STEP_S * noise(draw, next(numbers), seed)


# The table, and the promise.


def table(rows: list[Row]) -> str:
    """Return the races that claim a gain, by the number of plans and by the noise."""
    lines = [f"{'':14}{'races':>6}  {'claim a gain':24}{'plans called slower':>20}"]
    for key in ("plans", "noise"):
        for value in sorted({row[key] for row in rows}, key=str):
            some = [row for row in rows if row[key] == value]
            slower = sum(row["called_slower"] for row in some)
            shown = f"{value} plans" if key == "plans" else value
            lines.append(f"{shown:14}{len(some):>6}  {share(some):24}{slower:>20}")
    return "\n".join([*lines, f"{'all':14}{len(rows):>6}  {share(rows)}"])


def share(rows: list[Row]) -> str:
    """Return `3.0 % [0.6, 8.5]`, after Clopper and Pearson."""
    count = sum(row["claims"] for row in rows)
    interval = stats.binomtest(count, len(rows)).proportion_ci()
    return f"{count / len(rows):.1%} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def broken(rows: list[Row]) -> list[str]:
    """Return the groups of races in which false alarms are surely more than promised."""
    problems = []
    for plans in PLANS:
        claims = [row["claims"] for row in rows if row["plans"] == plans]
        if claims and stats.binomtest(sum(claims), len(claims)).proportion_ci().low > PROMISED:
            problems.append(f"{plans} plans: {sum(claims)} of {len(claims)} races claim a gain")
    return problems


if __name__ == "__main__":
    sys.exit(main())
