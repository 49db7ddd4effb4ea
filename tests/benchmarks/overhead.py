"""The cost of SpeedKit itself, and the waits of its panel. Exits 1 where a promise does not hold.

python tests/benchmarks/overhead.py [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable

import torch
from _program import load_all, machine, nothing_kept, printed_by, ratio
from _shares import noted
from _workloads import made

from speedkit_jupyter import Panel, SpeedConfig, apply_speedups
from speedkit_jupyter.machines import devices
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.step.step import Step

CPU = torch.device("cpu")
SEARCHED = "large MLP, training"
LOAD = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
start = time.perf_counter()
shell.run_line_magic("load_ext", "speedkit_jupyter")
print(time.perf_counter() - start)
"""
OPEN = """
import time
import IPython.display
import torch
from torch import nn
model = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(50)], nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
start = time.perf_counter()
from speedkit_jupyter import Panel
Panel(model, optimizer=optimizer)._repr_mimebundle_()
print(time.perf_counter() - start)
"""


def convolutions(linear: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return 50 convolutions, with linear layers that are not to be called, and an optimizer."""
    layers = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(50)]
    model = torch.nn.Sequential(*layers, *(torch.nn.Linear(32, 32) for _ in range(linear)))
    return model, torch.optim.AdamW(model.parameters())


def autocast() -> bool:
    """Compare `ctx.autocast()` with bare `torch.autocast`."""
    _, context = apply_speedups(convolutions(50)[0], SpeedConfig(precision="bf16"))

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

    def ours() -> None:
        for _ in range(10):
            clock.timed(runner.once, CPU)

    # As a user writes it in a cell: the notebook keeps the result until the next one.
    loop = compile("for _ in range(10): out = model(x)", "a loop in a cell", "exec")

    def bare() -> None:
        exec(loop, shell.user_ns)
        devices.synchronize(CPU)

    with runner.applied():
        seconds = clock.timed(bare, CPU) / 10
        found = ratio(ours, bare, rounds=400)
    where = f"a step of {seconds * 1e3:.1f} ms"
    print(f"measured step / bare loop:              {found}  (promise: 1.02; {where})")
    return found.median <= 1.02


def calibrated(model: torch.nn.Module) -> int:
    """Return the batch with which the model takes about a millisecond."""
    batch = 16
    while True:
        x = torch.rand(batch, 256)
        if statistics.median(clock.timed(lambda x=x: model(x), CPU) for _ in range(20)) > 0.0007:
            return batch
        batch *= 2


def apply_and_restore() -> bool:
    """Time both, with a model of a hundred layers; nothing is promised."""
    model, optimizer = convolutions(50)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        apply_speedups(model, optimizer=optimizer)[1].restore()
        times.append(time.perf_counter() - start)
    print(f"apply + restore, 100 layers:            {statistics.median(times) * 1e3:.0f} ms")
    return True


def load_extension() -> bool:
    """Time `%load_ext` in fresh processes in which IPython runs already."""
    median = statistics.median(printed_by(LOAD, times=7))
    print(f"%load_ext:                              {median * 1e3:.0f} ms  (promise: under 150 ms)")
    return median < 0.15


def timed_share() -> bool:
    """Print where the seconds of one search go, without compiling and loading."""
    with nothing_kept():
        load_all()
        with noted() as shares:
            made(SEARCHED).tuned()
    print(f"a search of {shares.total_s:.1f} s ({SEARCHED}): {shares}  (promise: 50% timed steps)")
    return shares.share() >= 0.5


def panel_preview() -> bool:
    """Time from the front end's message to the new table, for each word of two controls."""
    model, optimizer = convolutions()
    panel = Panel(model, optimizer=optimizer)
    times = []
    for _ in range(10):
        for path in ("precision", "channels_last"):
            control = panel.controls[path].input
            for index in (1, 2, 0):
                before = panel.state.value
                start = time.perf_counter()
                control.set_state({"index": index})
                times.append(time.perf_counter() - start)
                assert panel.state.value != before
    median, worst = statistics.median(times), max(times)
    shown = f"{median * 1e3:.0f} ms, at most {worst * 1e3:.0f} ms"
    print(f"panel, toggle to preview:               {shown}  (promise: under 100 ms)")
    return median < 0.1


def panel_open() -> bool:
    """Time the imports and the first drawing, in fresh processes with IPython and torch.

    The fastest counts: the others may have been held up.
    """
    times = printed_by(OPEN, times=9)
    fastest, median = min(times), statistics.median(times)
    shown = f"{fastest * 1e3:.0f} ms, median {median * 1e3:.0f} ms"
    print(f"panel, open with torch loaded:          {shown}  (promise: under 500 ms)")
    return fastest < 0.5


def panel_stop() -> bool:
    """Time from a click on Stop to the restored state, with a plan in force and without."""
    model, optimizer = convolutions()
    x = torch.rand(8, 8, 8, 8)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    panel = Panel(model, optimizer=optimizer, step=step, budget_s=600)
    held = True
    for name in ("nothing applied", "a plan in force"):
        median = statistics.median(asyncio.run(_stopped(panel)) for _ in range(5))
        print(f"panel, stop, {name}:          {median * 1e3:.0f} ms  (promise: about 250 ms)")
        held = held and median < 0.25
        panel.buttons["Apply"].click()
    panel.buttons["Restore"].click()
    return held


async def _stopped(panel: Panel) -> float:
    panel.buttons["Measure"].click()
    await asyncio.sleep(1.5)
    start = time.perf_counter()
    panel.buttons["Stop"].click()
    while not panel.buttons["Stop"].disabled:
        await asyncio.sleep(0)
    return time.perf_counter() - start


PARTS: tuple[Callable[[], bool], ...] = (
    autocast, measured_step, load_extension, timed_share, apply_and_restore, panel_preview,
    panel_open, panel_stop,
)  # fmt: skip


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[one.__name__ for one in PARTS])
    chosen = parser.parse_args().only
    print(machine())
    held = [one() for one in PARTS if chosen in (None, one.__name__)]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
