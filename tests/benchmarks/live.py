"""`auto` on whole loops, against the plain loop, tuning first, and the best plan from step one.

For each workload of `oracle.py`, a loop of 2,000 steps or as many as fit in two minutes:

1. a quarter of the steps as they are written, before and after;
2. all of them under `auto()`, which knows nothing;
3. `tune()` with its defaults, and a quarter of the steps under its plan.

    python tests/benchmarks/live.py [--only NAME] [--file live.jsonl] [--table] [--seconds 120]

Exits 1 where a promise is broken: the loop takes at most 1.03 times as long as with the best plan
from step one in 14 of 16 workloads, never more than 1.02 times as long as the plain loop, and less
than tuning first and then running.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch
from _program import Row, collected, exit_code, load_all, markdown, parser_of
from _workloads import WORKLOADS, Workload, made
from torch.utils.data import DataLoader

from speedkit_jupyter import auto, restore_all
from speedkit_jupyter.machines.devices import synchronize

STEPS, PART, WARM = 2000, 4, 5
OF_BEST, OF_PLAIN, MOST_MISSED = 1.03, 1.02, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "live.jsonl")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the plain loop, at most")
    options = parser.parse_args()
    load_all()
    keys = [{"workload": name} for name in WORKLOADS]
    rows = collected(options, keys, partial(measured, options.seconds), line)
    print(table(rows))
    return exit_code(broken(rows))


def measured(seconds: float, workload: str) -> Row:
    """Measure one workload."""
    plain = made(workload, DEVICE)
    steps = max(min(STEPS, int(seconds / seconds_of(plain, 3 * WARM))), 20)
    part = max(steps // PART, 5)
    before_s = seconds_of(plain, part)
    live, lines = made(workload, DEVICE), list[str]()
    loop(live, WARM)
    begun_s = time.perf_counter()
    with auto(say=lines.append) as running:
        loop(live, steps)
        found = running.latest
        leader, proof = (found.race.leader, found.race.proof) if found else ("", None)
        lost = found.race.lost_s / found.race.elapsed_s if found else 0.0
    live_s = (time.perf_counter() - begun_s) / steps
    tuned = made(workload, DEVICE)
    begun_s = time.perf_counter()
    tuning = tuned.tuned()
    tune_s = time.perf_counter() - begun_s
    tuning.apply()
    tuned_s = seconds_of(tuned, part)
    restore_all()
    after_s = seconds_of(plain, part)
    return {
        "steps": steps,
        "plain_s": (before_s + after_s) / 2,
        "live_s": live_s,
        "tune_s": tune_s,
        "tuned_s": tuned_s,
        "plan": leader,
        "ratio": [proof.median, proof.low, proof.high] if proof else None,
        "tuned": tuning.winner.name,
        "lost": lost,
        "line": lines[:1],
    }


def seconds_of(workload: Workload, steps: int) -> float:
    """Return the seconds of a step, over a loop."""
    loop(workload, WARM)
    begun_s = time.perf_counter()
    loop(workload, steps)
    return (time.perf_counter() - begun_s) / steps


def loop(workload: Workload, steps: int) -> None:
    for _ in DataLoader(range(steps), batch_size=None):  # its length tells what remains
        workload.run()
    synchronize(torch.device(DEVICE))


def shares(row: Row) -> tuple[float, float, float]:
    """Return the loop's time over the best plan's, the plain loop's, and tuning's with its loop."""
    best_s = min(row["tuned_s"], row["plain_s"])
    first = row["tune_s"] / row["steps"] + row["tuned_s"]
    return row["live_s"] / best_s, row["live_s"] / row["plain_s"], row["live_s"] / first


def line(row: Row) -> str:
    best, plain, first = shares(row)
    return (
        f"{row['workload']}: {row['steps']} steps, {best:.2f} of the best plan's time, "
        f"{plain:.2f} of plain, {first:.2f} of tuning first; {row['plan']} / {row['tuned']}"
    )


def table(rows: list[Row]) -> str:
    head: list[Any] = ["workload", "steps", "of best", "of plain", "of tune + run", "auto", "tuned"]
    return markdown(
        head,
        *(
            [row["workload"], row["steps"], *(f"{one:.2f}" for one in shares(row)), row["plan"],
             row["tuned"]]
            for row in rows
        ),
    )  # fmt: skip


def broken(rows: list[Row]) -> list[str]:
    slow = [row["workload"] for row in rows if shares(row)[0] > OF_BEST]
    missed = [f"slower than the best plan: {', '.join(slow)}"] if len(slow) > MOST_MISSED else []
    for row in rows:
        _, plain, first = shares(row)
        if plain > OF_PLAIN:
            missed.append(f"{row['workload']}: {plain:.2f} times as long as plain")
        if first > 1:
            missed.append(f"{row['workload']}: tuning first is quicker")
    return missed


if __name__ == "__main__":
    sys.exit(main())
