"""What SpeedKit itself costs. Exits 1 where a promise does not hold.

python tests/benchmarks/overhead.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
from _ratios import machine, ratio, shown

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.plans.applying import prepare

LOAD = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
shell.run_line_magic("load_ext", "speedkit_jupyter")
print(time.perf_counter() - start)
"""


def hundred_layers() -> torch.nn.Module:
    """50 times a convolution and a linear layer's worth of modules."""
    layers = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(50)]
    layers += [torch.nn.Linear(32, 32) for _ in range(50)]
    return torch.nn.Sequential(*layers)


def autocast_per_step() -> bool:
    """`ctx.autocast()` against bare `torch.autocast`."""
    model = hundred_layers()
    _, context = apply_speedups(model, SpeedConfig(precision="bf16"))

    def ours() -> None:
        with context.autocast():
            pass

    def bare() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pass

    found = ratio(ours, bare, rounds=300, block=100)
    context.restore()
    print(f"ctx.autocast() / torch.autocast:        {shown(found)}  (promise: at most 1.10)")
    return found.median <= 1.10


def measured_step() -> bool:
    """A step of a cell as the benchmark times it, against a bare loop over the same step."""
    from IPython.core.interactiveshell import InteractiveShell

    from speedkit_jupyter.magics.cell import Cell

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
    print(f"measured step / bare loop:              {shown(found)}  (promise: 1.02; {where})")
    return found.median <= 1.02


def calibrated(model: torch.nn.Module) -> int:
    """The batch with which the model takes about a millisecond."""
    batch, device = 16, torch.device("cpu")
    while True:
        x = torch.rand(batch, 256)
        if statistics.median(clock.timed(lambda x=x: model(x), device) for _ in range(20)) > 0.0007:
            return batch
        batch *= 2


def apply_and_restore() -> None:
    """Against one training step of the same model, since that is what a user compares it with."""
    model = hundred_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    times = []
    for _ in range(15):
        start = time.perf_counter()
        apply_speedups(model, optimizer=optimizer)[1].restore()
        times.append(time.perf_counter() - start)
    print(f"apply + restore, 100 layers:            {statistics.median(times) * 1e3:.0f} ms")


def load_extension() -> bool:
    """`%load_ext` in fresh processes in which IPython runs already."""
    times = [
        float(subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True).stdout)
        for _ in range(7)
    ]
    median = statistics.median(times)
    print(f"%load_ext:                              {median * 1e3:.0f} ms  (promise: under 150 ms)")
    return median < 0.15


if __name__ == "__main__":
    print(machine())
    held = [autocast_per_step(), measured_step(), load_extension()]
    apply_and_restore()
    sys.exit(0 if all(held) else 1)
