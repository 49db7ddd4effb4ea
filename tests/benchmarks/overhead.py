"""What SpeedKit itself costs. Exits 1 where a promise does not hold.

python tests/benchmarks/overhead.py
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from _program import load_all, machine, nothing_kept, printed_by, ratio
from _shares import noted
from _workloads import made

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.step.step import Step

SEARCHED = "large MLP, training"
LOAD = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
shell.run_line_magic("load_ext", "speedkit_jupyter")
print(time.perf_counter() - start)
"""


def hundred_layers() -> torch.nn.Module:
    """Return 50 convolutions and 50 linear layers, which are not to be called."""
    layers = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(50)]
    layers += [torch.nn.Linear(32, 32) for _ in range(50)]
    return torch.nn.Sequential(*layers)


def autocast_per_step() -> bool:
    """Compare `ctx.autocast()` with bare `torch.autocast`."""
    model = hundred_layers()
    _, context = apply_speedups(model, SpeedConfig(precision="bf16"))

    def ours() -> None:
        for _ in range(100):
            with context.autocast():
                pass

    def bare() -> None:
        for _ in range(100):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pass

    found = ratio(ours, bare, rounds=300)
    context.restore()
    print(f"ctx.autocast() / torch.autocast:        {found}  (promise: at most 1.10)")
    return found.median <= 1.10


def measured_step() -> bool:
    """Compare a step of a cell, as the benchmark times it, with a bare loop over it."""
    from IPython.core.interactiveshell import InteractiveShell

    from speedkit_jupyter.notebook.cell import Cell

    shell = InteractiveShell.instance()
    model = torch.nn.Linear(256, 256)
    x = torch.rand(calibrated(model), 256)
    shell.user_ns.update(model=model, x=x)
    cell = Cell(shell, "out = model(x)")
    step = Step(lambda context: cell.run(), [model], names=shell.user_ns, assigned=["out"])
    runner = Runner(step, [prepare(model, None)], Record("baseline"))
    device = torch.device("cpu")

    def ours() -> None:
        for _ in range(10):
            clock.timed(runner.once, device)

    # As a user writes it in a cell: the result is the notebook's, and kept until the next one.
    loop = compile("for _ in range(10): out = model(x)", "a loop in a cell", "exec")

    def bare() -> None:
        exec(loop, shell.user_ns)
        clock.synchronize(device)

    with runner.applied():
        seconds = clock.timed(bare, device) / 10
        found = ratio(ours, bare, rounds=400)
    where = f"a step of {seconds * 1e3:.1f} ms"
    print(f"measured step / bare loop:              {found}  (promise: 1.02; {where})")
    return found.median <= 1.02


def calibrated(model: torch.nn.Module) -> int:
    """Return the batch with which the model takes about a millisecond."""
    batch, device = 16, torch.device("cpu")
    while True:
        x = torch.rand(batch, 256)
        if statistics.median(clock.timed(lambda x=x: model(x), device) for _ in range(20)) > 0.0007:
            return batch
        batch *= 2


def apply_and_restore() -> None:
    """Time both, with a model of a hundred layers."""
    model = hundred_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    times = []
    for _ in range(15):
        start = time.perf_counter()
        apply_speedups(model, optimizer=optimizer)[1].restore()
        times.append(time.perf_counter() - start)
    print(f"apply + restore, 100 layers:            {statistics.median(times) * 1e3:.0f} ms")


def load_extension() -> bool:
    """Time `%load_ext` in fresh processes in which IPython runs already."""
    median = statistics.median(printed_by(LOAD, times=7))
    print(f"%load_ext:                              {median * 1e3:.0f} ms  (promise: under 150 ms)")
    return median < 0.15


def timed_share() -> bool:
    """Print where the seconds of one search go, without compiling and what is done once."""
    with nothing_kept():
        load_all()
        with noted() as shares:
            made(SEARCHED).tuned()
    print(f"a search of {shares.total_s:.1f} s ({SEARCHED}): {shares}  (promise: 50% timed steps)")
    return shares.share() >= 0.5


if __name__ == "__main__":
    print(machine())
    held = [autocast_per_step(), measured_step(), load_extension(), timed_share()]
    apply_and_restore()
    sys.exit(0 if all(held) else 1)
