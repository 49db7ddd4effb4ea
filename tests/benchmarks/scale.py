"""Test tuning and comparing on models of 0.1 to 100 M parameters, with steps of 0.2 ms to 5 s.

Each job runs in a process of its own, with defaults: `tune()`, and `benchmark()` of
`baseline,bf16,fused_optimizer`. A program that was stopped continues when it is started again.
Exits 1 unless each job meets three limits. Timed steps take at least half of the time, compiling
not counted. Checks take at most the time of 10 baseline steps, and of 3 steps for each variant.
Additional memory is at most 500 MB for libraries, and copies of the state: one for each variant of
a race, for the baseline and for the user. Needs Linux, to read the peak memory.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from _program import Row, collected, load_all, parser_of, product
from _shares import noted
from _tables import reported
from _workloads import Workload, classifying, gpt, linear

from speedkit_jupyter import benchmark
from speedkit_jupyter.rounds import clock

COMPARED = "baseline,bf16,fused_optimizer"
# A first comparison and a compiled step load libraries of about LIBRARIES_BYTES.
TIMED, CHECKS, CHECKS_EACH, LIBRARIES_BYTES = 0.5, 10, 3, 500e6


def _texts(width: int, layers: int, batch: int, length: int, words: int) -> Workload:
    x, y = torch.randint(words, (2, batch, length))
    return classifying(gpt(width, layers, words), x, y)


MODELS = {
    "MLP, 0.1 M": partial(linear, 183, 16),
    "MLP, 1 M": partial(linear, 577, 64),
    "MLP, 10 M": partial(linear, 1826, 128),
    "MLP, 100 M": partial(linear, 5774, 64),
    "transformer, 0.1 M": partial(_texts, 64, 2, 4, 32, 100),
    "transformer, 1 M": partial(_texts, 144, 4, 8, 64, 200),
    "transformer, 10 M": partial(_texts, 288, 10, 8, 64, 500),
    "transformer, 100 M": partial(_texts, 768, 14, 8, 128, 1000),
}


def measured(model: str, job: str) -> Row:
    command = [sys.executable, __file__, "--child", model, job]
    found = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    return dict(json.loads(found.splitlines()[-1]))


def child(model: str, job: str) -> Row:
    """Measure one job, after loading the compiler and making the optimizer's state."""
    load_all()
    torch.manual_seed(0)
    work = MODELS[model]()
    step_s = min(clock.timed(work.run, torch.device("cpu")) for _ in range(3))
    state = [one for held in work.optimizer.state.values() for one in held.values()]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_bytes = _peak_bytes()
    with noted() as shares:
        if job == "tune":
            tuning = work.tuned()
            found = [stage.comparison for stage in tuning.stages]
            said = str(tuning.ratio) if tuning.helped else tuning.unclear or "nothing to gain"
            verdicts = {tuning.winner.name: said}
        else:
            found = [benchmark(work.run, COMPARED, model=work.model, optimizer=work.optimizer)]
            verdicts = {one.name: found[0].verdict(one) for one in found[0].records[1:]}
    return {
        "step_s": step_s,
        "total_s": shares.total_s,
        "timed": shares.share(),
        "seconds": shares.seconds,
        "checks_steps": shares.seconds["checks"] / step_s,
        "variants": len({record.name for one in found for record in one.records[1:]}),
        "at_once": max((len(one.records) - 1 for one in found), default=0),
        "state_bytes": sum(one.nbytes for one in (*work.model.parameters(), *state)),
        "peak_bytes": _peak_bytes() - before_bytes,
        "verdicts": verdicts,
    }


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(one.split()[1]) for one in lines if one.startswith("VmHWM"))


def promises(row: Row) -> dict[str, bool]:
    most_bytes = LIBRARIES_BYTES + (2 + row["at_once"]) * row["state_bytes"]
    most_steps, job = CHECKS + CHECKS_EACH * row["variants"], row["job"]
    return {
        f"{job}, under {TIMED:.0%} timed steps": row["timed"] >= TIMED,
        f"{job}, checks take too long": row["checks_steps"] <= most_steps,
        f"{job}, too much memory": row["peak_bytes"] <= most_bytes,
    }


HEAD = ("model", "job", "step", "seconds + compiling", "timed steps", "checks, in steps",
        "variants, at once", "memory beyond, of a copy", "verdicts")  # fmt: skip


def _cells(row: Row) -> list[str]:
    seconds = f"{row['total_s']:.1f} + {row['seconds']['compiling']:.1f}"
    memory = f"{row['peak_bytes'] / 1e6:.0f} of {row['state_bytes'] / 1e6:.0f} MB"
    verdicts = "; ".join(f"{name}: {found}" for name, found in row["verdicts"].items())
    return [row["model"], row["job"], f"{row['step_s'] * 1e3:.3g} ms", seconds,
            f"{row['timed']:.0%}", f"{row['checks_steps']:.1f}",
            f"{row['variants']}, {row['at_once']}", memory, verdicts]  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, "scale.jsonl")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return 0
    keys = product(model=MODELS, job=("tune", "compare"))
    return reported(collected(options, keys, measured, _cells), HEAD, _cells, promises)


if __name__ == "__main__":
    sys.exit(main())
