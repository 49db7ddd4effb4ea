"""Measure the seconds from torch's import to the first compiled step, without and with a cache.

A transformer of 6 layers (d = 256) makes a step of training or inference in a fresh process, with
torch.compile or SpeedKit. A cold start has empty folders, a warm start the files of an earlier run.
`idle` is SpeedKit's warm start in a notebook whose kernel imported the compiler while it was idle.
Exits 1 if SpeedKit's cold start takes more than half of torch's, its warm start more than torch's
warm start, or `idle` more than 0.06 of torch's cold start.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from _program import Row, collected, parser_of, product
from _tables import reported

RESULTS = "tests/benchmarks/results/cold_start_cpu.jsonl"
# In a row, the first column may be at most this share of the second.
PROMISES = (
    ("speedkit_cold_s", "torch_cold_s", 0.5),
    ("speedkit_idle_s", "torch_cold_s", 0.06),
    ("speedkit_warm_s", "torch_warm_s", 1.0),
)
NAMES = ("torch_cold_s", "torch_warm_s", "speedkit_cold_s", "speedkit_warm_s", "speedkit_idle_s")
PROGRAM = """
import sys, time
import torch
from _nets import Block
who, job, when = sys.argv[1:]
if when == "idle":
    from speedkit_jupyter.torchglue import dynamo as torch_private
    torch_private.import_compiler()
if torch.cuda.is_available():
    torch.set_default_device("cuda")
    torch.zeros(1)  # makes CUDA's context
begun_s = time.perf_counter()
blocks = (Block(256, 4, causal=True) for _ in range(6))
model = torch.nn.Sequential(*blocks, torch.nn.LayerNorm(256))
x = torch.rand(8, 64, 256)
optimizer = torch.optim.AdamW(model.train(job == "training").parameters())
if who == "speedkit":
    from speedkit_jupyter import SpeedConfig, apply_speedups
    context = apply_speedups(model, SpeedConfig(compile=True).alone(), optimizer=optimizer)[1]
    run = model
else:
    run = torch.compile(model)
with torch.set_grad_enabled(job == "training"):
    out = run(x)
if job == "training":
    out.square().mean().backward()
    optimizer.step()
if torch.cuda.is_available():
    torch.cuda.synchronize()
print(time.perf_counter() - begun_s)
"""


def seconds(who: str, job: str, when: str, folder: Path) -> float:
    """Return the seconds of one start, in a process that keeps its compiled code in this folder."""
    kept = {"SPEEDKIT_DATA": "data", "TMPDIR": "tmp"}  # torch's cache is in TMPDIR
    for name in kept.values():
        (folder / name).mkdir(exist_ok=True, parents=True)
    environment = {name: value for name, value in os.environ.items() if "INDUCTOR" not in name}
    environment |= {name: str(folder / one) for name, one in kept.items()}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, who, job, when]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measured(step: str, rounds: int) -> Row:
    """Return the median seconds of each kind of start. Each round makes every kind once."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as empty:
            for name in NAMES:  # a warm start follows its cold start
                who, when = name.removesuffix("_s").split("_")
                times[name].append(seconds(who, step, when, Path(empty, who)))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    options = parser_of(__doc__, RESULTS, rounds=3).parse_args()

    def cells(row: Row) -> list[str]:
        return [row["step"], *(f"{row[name]:.2f}" for name in NAMES)]

    keys = product(step=("training", "inference"))
    rows = collected(options, keys, partial(measured, rounds=options.rounds), cells)
    return reported(rows, ("", *NAMES), cells, promises)


def promises(row: Row) -> dict[str, bool]:
    return {
        f"{one} is {row[one] / row[other]:.2f} of {other}, promised {most}":
            row[one] <= most * row[other]
        for one, other, most in PROMISES
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
