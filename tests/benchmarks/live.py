"""Compare `auto` on whole loops with the plain loop, tuning first, and the best plan from step one.

For each workload of `oracle.py`, a loop of 2,000 steps or as many as fit in two minutes runs in
three processes. They take turns, so that a change of the machine's speed favors none of them:

1. the loop under `auto()` with nothing learned before; its clock stops during other turns;
2. a quarter of the steps without a plan;
3. `tune()` with its defaults, and a quarter of the steps under its plan.
A turn begins with 30 ms of other work and an untimed step: the system needs some 10 ms to give
each thread of a waiting process its own core, as much as ten steps of a small model.
Exits 1 if a promise is broken: `auto` takes at most 1.03 times as long as the best plan from step
one in 14 of 16 workloads, and in all at most 1.02 times as long as the plain loop, and no longer
than tuning first and then running.
"""

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from _program import Row, collected, load_all, nothing_kept, parser_of, product
from _tables import reported
from _timing import DEVICE, listed, timed, wait
from _workloads import WORKLOADS, Workload, made
from torch.utils.data import DataLoader

from speedkit_jupyter import auto
from speedkit_jupyter.rounds import busy_machine, clock

STEPS, TURNS, PART, WARM = 2000, 40, 4, 5
OF_BEST, OF_PLAIN, MOST_MISSED = 1.03, 1.02, 2


def main() -> int:
    options = parser_of(__doc__, "live.jsonl", seconds=120.0).parse_args()
    keys = product(workload=WORKLOADS)
    rows = collected(options, keys, partial(measured, options.seconds), cells)
    slow = [row["workload"] for row in rows if shares(row)[0] > OF_BEST]
    missed = [f"slower than the best plan: {', '.join(slow)}"] * (len(slow) > MOST_MISSED)
    return reported(rows, HEAD, cells, promises, *missed)


def measured(seconds: float, workload: str) -> Row:
    plain = started(as_written, workload)
    step_s = plain.recv()
    tuned = started(under_tune, workload)
    of_tuning = tuned.recv()
    part = max(min(STEPS, int(seconds / step_s)) // TURNS, 1)
    live = started(under_auto, workload, part)
    live.recv()
    times: dict[str, list[float]] = {"plain_s": [], "tuned_s": [], "live_s": []}
    for _ in range(TURNS):
        for name, other in zip(times, (plain, tuned, live), strict=True):
            other.send(part if other is live else max(part // PART, 1))
            times[name].append(other.recv())
    plain.send(0)  # a process that ends earlier takes time from the others
    tuned.send(0)
    row = {"steps": part * TURNS, **{name: sum(one) / TURNS for name, one in times.items()}}
    return {**row, **of_tuning, **live.recv(), "turns": times}


def started(call: Callable[..., None], *given: Any) -> Connection:
    """Return a connection to a process that runs `call(connection, *given)`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=call, args=(there, *given), daemon=True).start()
    return here


def made_to_loop(name: str) -> Workload:
    """Return a workload with learning rate 0: tiny gradients of a learned batch would be slow."""
    found = made(name, DEVICE)
    for group in found.optimizer.param_groups if found.optimizer is not None else ():
        group["lr"] = 0.0
    return found


def as_written(turns: Connection, workload: str) -> None:
    plain = made_to_loop(workload)
    take_turns(turns, plain.run, lambda: seconds_of(plain.run, 3 * WARM))


def under_tune(turns: Connection, workload: str) -> None:
    load_all()
    tuned = made_to_loop(workload)

    def tune() -> Row:
        with nothing_kept():
            tune_s, tuning = timed(tuned.tuned)
        tuning.apply()
        return {"tune_s": tune_s, "tuned": tuning.winner.name}

    take_turns(turns, tuned.run, tune)


def take_turns(turns: Connection, step: Callable[[], object], first: Callable[[], Any]) -> None:
    """Send the result of `first()`, then a step's seconds for each number of steps until 0."""
    turns.send(first())
    while steps := turns.recv():
        threads_awake()
        step()
        turns.send(seconds_of(step, steps))


def under_auto(turns: Connection, workload: str, part: int) -> None:
    load_all()
    live, lines, begun_s = made_to_loop(workload), list[str](), 0.0
    seconds_of(live.run, WARM)
    turns.send("ready")
    with nothing_kept(), still_clocks() as stand_still, auto(say=lines.append) as running:
        for number in DataLoader(range((part + 1) * TURNS), batch_size=None):  # its length is known
            turn, step = divmod(number, part + 1)
            if step == 0:
                wait()
                if turn:
                    turns.send((time.perf_counter() - begun_s) / part)
                stand_still(turns.recv)
                stand_still(threads_awake)
            elif step == 1:  # the first step of a turn is untimed, as in the other processes
                wait()
                begun_s = time.perf_counter()
            live.run()
        wait()
        turns.send((time.perf_counter() - begun_s) / part)
        found = running.latest.race if running.latest else None
    turns.send(
        {
            "plan": found.leader if found else "",
            "ratio": listed(found.proof) if found else None,
            "lost": found.lost_s / found.elapsed_s if found else 0.0,
            "line": lines[:1],
        }
    )


def threads_awake() -> None:
    ends_s = time.perf_counter() + 0.03
    while time.perf_counter() < ends_s:
        torch.ones(1 << 18).exp()


@contextmanager
def still_clocks() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Yield a function that makes a call while SpeedKit's clocks are stopped."""
    clocks = (clock.now, busy_machine.taken_by_others_s)
    outside = [0.0, 0.0]

    def stand_still(call: Callable[[], Any]) -> None:
        begun = [read() for read in clocks]
        call()
        for number, read in enumerate(clocks):
            outside[number] += read() - begun[number]

    clock.now = busy_machine.now = lambda: clocks[0]() - outside[0]
    busy_machine.taken_by_others_s = lambda: clocks[1]() - outside[1]
    yield stand_still


def seconds_of(step: Callable[[], object], steps: int) -> float:
    """Return the mean seconds of a step in a loop over a DataLoader."""

    def loop() -> None:
        for _ in DataLoader(range(steps), batch_size=None):
            step()

    return timed(loop)[0] / steps


def shares(row: Row) -> tuple[float, float, float]:
    """Return `auto`'s time relative to the best plan, to the plain loop, and to tuning first."""
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
