"""Test whether `tune()` finds the possible gain while two other processes are busy in bursts.

Each of four workloads is tuned twice, with defaults and nothing learned before: next to processes
that multiply matrices in bursts of 0.1 to 1 s, and on the idle machine. A fresh process then
measures the gain of either plan on the idle machine.
Takes about five minutes on two idle cores. The promises are for workloads whose idle plan gains
1.3× or more. Under load, tuning proves the idle plan or one with 0.9 of its gain. It takes at most
2 × 1.1 times the idle budget, without compiling. The gain in a fresh process is in the reported
interval, and the report says that the machine was busy. Exits 1 if a promise is broken.
"""

import sys
from contextlib import nullcontext
from statistics import median
from typing import Any

from _load import bursts
from _program import Row, collected, load_all, parser_of, product
from _side_by_side import in_fresh_process
from _tables import interval, reported
from _timing import interleaved_s, listed
from _workloads import made

from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S, LATEST
from speedkit_jupyter.search.thresholds import ENOUGH_STEPS

NAMES = ("transformer, inference", "tiny MLP, training", "large MLP, training", "CNN, training")
GAIN, FOUND, TIMES_AS_LONG = 1.3, 0.9, 2.0


def main() -> int:
    options = parser_of(__doc__, "busy.jsonl").parse_args()
    rows = collected(options, product(workload=NAMES), measured, str)
    states = [{**row, **row[state], "state": state} for row in rows for state in ("idle", "busy")]
    return reported(states, HEAD, _cells, promises)


def measured(workload: str) -> Row:
    load_all()
    step_s = median(interleaved_s({"step": made(workload).run}, 10)["step"])
    row: Row = {"budget_s": max(DEFAULT_BUDGET_S, ENOUGH_STEPS * step_s)}
    for state, load in (("busy", bursts()), ("idle", nullcontext())):
        with load:
            tuning = made(workload).tuned(fresh=True)
        row[state] = {
            "plan": tuning.winner.name,
            "config": tuning.config.to_dict(),
            "said": listed(tuning.ratio),
            "headline": str(tuning).partition("\n\n")[0],
            "tells_load": "machine was busy" in " ".join(str(tuning).split()),
            "seconds": tuning.seconds - tuning.compiling_s,
            "compiling_s": tuning.compiling_s,
        }
    for state in ("idle", "busy"):
        found = row[state]
        found["fresh"] = found["said"] and in_fresh_process(workload, found["config"])
    return row


def promises(row: Row) -> dict[str, Any]:
    """Return whether each promise holds under load; {} for idle rows and too small idle gains."""
    idle, busy = row["idle"], row["busy"]
    if row["state"] == "idle" or not idle["fresh"] or idle["fresh"][0] < GAIN:
        return {}
    fresh, said = busy["fresh"] or [1.0], busy["said"] or [0.0, 0.0, 0.0]
    is_same = busy["plan"] == idle["plan"]
    longest_s = TIMES_AS_LONG * LATEST * row["budget_s"]
    return {
        f"nothing proven: {busy['headline']}": busy["fresh"],
        f"below {FOUND} of the idle plan's gain": is_same or fresh[0] >= FOUND * idle["fresh"][0],
        f"over {TIMES_AS_LONG:g} times the budget": busy["seconds"] <= longest_s,
        "a fresh process gains something else": said[1] <= fresh[0] <= said[2],
        "the load goes unsaid": busy["tells_load"],
    }


HEAD = ("workload", "machine", "plan", "said", "in a fresh process", "seconds + compiling")


def _cells(row: Row) -> list[str]:
    seconds = f"{row['seconds']:.0f} + {row['compiling_s']:.0f}"
    gains = (interval(row[key]) for key in ("said", "fresh"))
    return [row["workload"], row["state"], row["plan"], *gains, seconds]


if __name__ == "__main__":
    sys.exit(main())
