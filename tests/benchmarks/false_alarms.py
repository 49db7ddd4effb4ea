"""Measure how often `auto` claims a gain where no plan changes anything.

Each trial is a race of 1, 3 or 8 plans on the steps of a loop. The plans are names only: every step
runs the same code, so each claim of a gain is a false alarm. By default the times of the 1,500
steps are made up (scatter, outliers, drift, two states, waves). With `--load quiet` a small network
trains, which takes about two seconds a trial. `--load busy` adds two processes that work in bursts.
A stopped run goes on. Exits 1 if the 95 % interval of false alarms is above 5 % for 1, 3 or 8
plans.
"""

import math
import random
import sys
from collections.abc import Callable
from functools import partial

import torch
from _load import is_above, repeated, share
from _nets import training
from _program import Row, machine, parser_of
from _tables import exit_code, markdown
from _timing import timed
from torch import nn

from speedkit_jupyter.extras.auto.auto import OVERHEAD
from speedkit_jupyter.extras.auto.race import BASELINE, Race

STEPS, STEP_S, PROMISED = 1500, 0.01, 0.05
PLANS = (1, 3, 8)
SWITCH_S = 2e-4


def main() -> int:
    parser = parser_of(__doc__, "false_alarms.jsonl", trials=200)
    parser.add_argument("--load", choices=("made", "quiet", "busy"), default="made")
    options = parser.parse_args()
    number = options.trials * len(PLANS)
    rows = repeated(options, number, partial(trial, load=options.load))
    print(f"{machine()}, {options.load}\n{table(rows)}")
    return exit_code(broken(rows))


def trial(number: int, load: str) -> Row:
    """Run one race, and return a row that says whether it claims a gain."""
    plans = PLANS[number % len(PLANS)]
    noise = [*NOISES][number // len(PLANS) % len(NOISES)]
    step = made_step(noise, number) if load == "made" else real_step()
    race = Race([f"plan {one}" for one in range(plans)], OVERHEAD, seed=number)
    elapsed_s = 0.0
    for _ in range(STEPS):
        seconds, before = step(), race.active
        elapsed_s += seconds
        if race.step_ended(seconds, "all", elapsed_s) != before:
            race.switched(SWITCH_S)
    called_slower = sum("times slower" in why for why in race.reasons.values())
    return {"plans": plans, "noise": noise if load == "made" else load,
            "claims": race.leader != BASELINE, "called_slower": called_slower}  # fmt: skip


def real_step() -> Callable[[], float]:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    x = torch.rand(64, 64)
    step = training(lambda: model(x).square().mean(), torch.optim.AdamW(model.parameters()))
    return lambda: timed(step)[0]


# A noise returns a factor of time from a random generator, a step's number and the seed.
NOISES: dict[str, Callable[[random.Random, int, int], float]] = {
    "scatter": lambda draw, step, seed: draw.lognormvariate(0, 0.05),
    "outliers": lambda draw, step, seed: (
        draw.lognormvariate(0, 0.03) * (1 + 4 * draw.random() * (draw.random() < 0.1))
    ),
    "drift": lambda draw, step, seed: draw.lognormvariate(0, 0.03) * (1 + step % 500 / 1000),
    "two states": lambda draw, step, seed: draw.lognormvariate(0, 0.03) * (
        1.4 if random.Random(f"{seed} {step // 30}").random() < 0.3 else 1.0),
    "waves": lambda draw, step, seed: (
        draw.lognormvariate(0, 0.03) * (1 + 0.2 * math.sin(step / 11 * math.tau))
    ),
}  # fmt: skip


def made_step(noise: str, seed: int) -> Callable[[], float]:
    """Return a function that returns the made-up seconds of the next step."""
    draw, numbers = random.Random(seed), iter(range(STEPS))
    return lambda: STEP_S * NOISES[noise](draw, next(numbers), seed)


# The table, and the promise.


def table(rows: list[Row]) -> str:
    """Return a table of the share of races that claim a gain, by number of plans and by noise."""
    groups = {"all": rows}
    for row in rows:
        for name in (f"{row['plans']} plans", row["noise"]):
            groups.setdefault(name, []).append(row)
    lines = [
        (name, len(some), share([row["claims"] for row in some]),
         sum(row["called_slower"] for row in some))
        for name, some in groups.items()
    ]  # fmt: skip
    return markdown(("", "races", "claim a gain", "plans called slower"), *lines)


def broken(rows: list[Row]) -> list[str]:
    """Return a line for each number of plans with more false alarms than promised."""
    groups = {plans: [row["claims"] for row in rows if row["plans"] == plans] for plans in PLANS}
    return [
        f"{plans} plans: {sum(claims)} of {len(claims)} races claim a gain"
        for plans, claims in groups.items() if is_above(claims, PROMISED)
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
