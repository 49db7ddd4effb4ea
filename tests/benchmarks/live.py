"""`auto` on whole loops, against the plain loop, tuning first, and the best plan from step one.

For each workload of `oracle.py`, a loop of 2,000 steps or as many as fit in two minutes:

1. a quarter of the steps as they are written, before and after;
2. all of them under `auto()`, which knows nothing;
3. `tune()` with its defaults, and a quarter of the steps under its plan.
Exits 1 where a promise is broken: the loop takes at most 1.03 times as long as with the best plan
from step one in 14 of 16 workloads, never more than 1.02 times as long as the plain loop, and less
than tuning first and then running.
"""

from __future__ import annotations

import sys
from functools import partial

from _program import Row, collected, load_all, parser_of, product
from _tables import reported
from _timing import DEVICE, listed, timed, wait
from _workloads import WORKLOADS, Workload, made
from torch.utils.data import DataLoader

from speedkit_jupyter import auto, restore_all
from speedkit_jupyter.extras.auto.race import Race

STEPS, PART, WARM = 2000, 4, 5
OF_BEST, OF_PLAIN, MOST_MISSED = 1.03, 1.02, 2


def main() -> int:
    options = parser_of(__doc__, "live.jsonl", seconds=120.0).parse_args()
    load_all()
    keys = product(workload=WORKLOADS)
    rows = collected(options, keys, partial(measured, options.seconds), cells)
    slow = [row["workload"] for row in rows if shares(row)[0] > OF_BEST]
    missed = [f"slower than the best plan: {', '.join(slow)}"] * (len(slow) > MOST_MISSED)
    return reported(rows, HEAD, cells, promises, *missed)


def measured(seconds: float, workload: str) -> Row:
    plain = made(workload, DEVICE)
    steps = max(min(STEPS, int(seconds / seconds_of(plain, 3 * WARM))), 20)
    part = max(steps // PART, 5)
    before_s = seconds_of(plain, part)
    live, lines = made(workload, DEVICE), list[str]()
    loop(live, WARM)
    live_s, found = timed(lambda: under_auto(live, steps, lines))
    tuned = made(workload, DEVICE)
    tune_s, tuning = timed(tuned.tuned)
    tuning.apply()
    tuned_s = seconds_of(tuned, part)
    restore_all()
    after_s = seconds_of(plain, part)
    return {
        "steps": steps,
        "plain_s": (before_s + after_s) / 2,
        "live_s": live_s / steps,
        "tune_s": tune_s,
        "tuned_s": tuned_s,
        "plan": found.leader if found else "",
        "ratio": listed(found.proof) if found else None,
        "tuned": tuning.winner.name,
        "lost": found.lost_s / found.elapsed_s if found else 0.0,
        "line": lines[:1],
    }


def under_auto(workload: Workload, steps: int, lines: list[str]) -> Race | None:
    with auto(say=lines.append) as running:
        loop(workload, steps)
        return running.latest.race if running.latest else None


def seconds_of(workload: Workload, steps: int) -> float:
    """Return the seconds of a step, over a loop."""
    loop(workload, WARM)
    return timed(lambda: loop(workload, steps))[0] / steps


def loop(workload: Workload, steps: int) -> None:
    for _ in DataLoader(range(steps), batch_size=None):  # its length tells what remains
        workload.run()
    wait()


def shares(row: Row) -> tuple[float, float, float]:
    """Return the loop's time over the best plan's, the plain loop's, and tuning's with its loop."""
    best_s = min(row["tuned_s"], row["plain_s"])
    first = row["tune_s"] / row["steps"] + row["tuned_s"]
    return row["live_s"] / best_s, row["live_s"] / row["plain_s"], row["live_s"] / first


HEAD = ("workload", "steps", "of best", "of plain", "of tune + run", "auto", "tuned")


def cells(row: Row) -> list[object]:
    figures = (f"{one:.2f}" for one in shares(row))
    return [row["workload"], row["steps"], *figures, row["plan"], row["tuned"]]


def promises(row: Row) -> dict[str, bool]:
    _, plain, first = shares(row)
    return {
        f"{plain:.2f} times as long as plain": plain <= OF_PLAIN,
        "tuning first is quicker": first <= 1,
    }


if __name__ == "__main__":
    sys.exit(main())
