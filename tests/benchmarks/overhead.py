"""Measure how long SpeedKit itself and its panel take. Exits with 1 if a promise is broken."""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from _nets import training
from _program import load_all, machine, nothing_kept, plain_parser
from _shares import noted
from _timing import interleaved_s, ratio, timed
from _workloads import made
from IPython.core.interactiveshell import InteractiveShell

from speedkit_jupyter import Panel, SpeedConfig, apply_speedups
from speedkit_jupyter.machines import devices
from speedkit_jupyter.notebook.cell import Cell
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.comparison import Record
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


def printed_by(code: str, times: int) -> list[float]:
    """Return the number that this code prints in each of several fresh processes."""
    run = [sys.executable, "-c", code]
    return [float(subprocess.check_output(run, text=True, stderr=subprocess.DEVNULL))
            for _ in range(times)]  # fmt: skip


def took(
    name: str, times: list[float], most_s: float, middle: Callable[..., float] = statistics.median
) -> bool:
    """Print `middle(times)`, minimum and maximum; return whether the middle is below `most_s`."""
    shown, low, high = (f"{1e3 * one:.0f} ms" for one in (middle(times), min(times), max(times)))
    return said(name, f"{shown}, {low} to {high}", middle(times) < most_s, f"{1e3 * most_s:g} ms")


def said(name: str, found: object, holds: bool, promise: str) -> bool:
    """Print a figure next to its promise, and return `holds`."""
    print(f"{name + ':':40}{found}  (promise: {promise})")
    return holds


def convolutions(linear: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of 50 convolutions and `linear` Linear layers, and its optimizer."""
    layers = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(50)]
    model = torch.nn.Sequential(*layers, *(torch.nn.Linear(32, 32) for _ in range(linear)))
    return model, torch.optim.AdamW(model.parameters())


def autocast() -> bool:
    _, context = apply_speedups(convolutions(50)[0], SpeedConfig(precision="bf16"))

    def entered(autocast: Callable[[], AbstractContextManager[object]]) -> None:
        for _ in range(100):
            with autocast():
                pass

    bare = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    calls = {"ours": partial(entered, context.autocast), "torch": partial(entered, bare)}
    medians = {name: statistics.median(one) for name, one in interleaved_s(calls, 300).items()}
    context.restore()
    added_us, torch_us = 1e4 * (medians["ours"] - medians["torch"]), 1e4 * medians["torch"]
    found = f"{added_us:.2f} µs more than torch's {torch_us:.1f} µs"
    return said("ctx.autocast()", found, added_us < 1, "1 µs, a thousandth of a step of 1 ms")


def measured_step() -> bool:
    """Compare a cell's step, as the benchmark times it, with a bare loop of the same code."""
    shell = InteractiveShell.instance()
    model = torch.nn.Linear(256, 256)
    shell.user_ns.update(model=model, x=torch.rand(calibrated(model), 256))
    cell = Cell(shell, "out = model(x)")
    step = Step(lambda context: cell.run(), [model], names=shell.user_ns, assigned=["out"])
    runner = Runner(step, [prepare(model, None)], Record("baseline"))

    def ours() -> None:
        for _ in range(10):
            clock.timed(runner.once, CPU)

    # The loop as users write it in a cell: the namespace keeps each result until the next one.
    loop = compile("for _ in range(10): out = model(x)", "a loop in a cell", "exec")

    def bare() -> None:
        exec(loop, shell.user_ns)
        devices.synchronize(CPU)

    with runner.applied():
        seconds = clock.timed(bare, CPU) / 10
        found = ratio(ours, bare, rounds=400)
    promise = f"1.02; a step of {seconds * 1e3:.1f} ms"
    return said("measured step / bare loop", found, found.median <= 1.02, promise)


def calibrated(model: torch.nn.Module) -> int:
    """Return a batch size with which a call of the model takes about a millisecond."""
    batch = 16
    while True:
        x = torch.rand(batch, 256)
        if statistics.median(clock.timed(lambda x=x: model(x), CPU) for _ in range(20)) > 0.0007:
            return batch
        batch *= 2


def apply_and_restore() -> bool:
    model, optimizer = convolutions(50)
    both = lambda: apply_speedups(model, optimizer=optimizer)[1].restore()  # noqa: E731
    return took("apply + restore, 100 layers", [timed(both)[0] for _ in range(15)], 0.5)


def load_extension() -> bool:
    """Time `%load_ext` in fresh processes that already run IPython."""
    return took("%load_ext", printed_by(LOAD, times=7), 0.15)


def timed_share() -> bool:
    """Print where the seconds of one search go, without compiling and loading."""
    with nothing_kept():
        load_all()
        with noted() as shares:
            made(SEARCHED).tuned()
    name = f"a search of {shares.total_s:.1f} s ({SEARCHED})"
    return said(name, shares, shares.share() >= 0.5, "50% timed steps")


def panel_preview() -> bool:
    """Time each option of two controls, from the front end's message to the new table."""
    model, optimizer = convolutions()
    panel = Panel(model, optimizer=optimizer)
    times = []
    for _ in range(10):
        for path in ("precision", "channels_last"):
            control = panel.controls[path].input
            for index in (1, 2, 0):
                before = panel.state.value
                times.append(timed(partial(control.set_state, {"index": index}))[0])
                assert panel.state.value != before
    return took("panel, toggle to preview", times, 0.1)


def panel_open() -> bool:
    """Time the imports and the first drawing, in fresh processes with IPython and torch.

    The fastest process counts, because other programs may have delayed the rest.
    """
    return took("panel, open with torch loaded", printed_by(OPEN, times=9), 0.5, middle=min)


def panel_stop() -> bool:
    """Time from a click on Stop to the restored state, with a plan in force and without."""
    model, optimizer = convolutions()
    x = torch.rand(8, 8, 8, 8)
    step = training(lambda: model(x).sum(), optimizer)
    panel = Panel(model, optimizer=optimizer, step=step, budget_s=600)
    held = True
    for name in ("nothing applied", "a plan in force"):
        times = [asyncio.run(_stopped(panel)) for _ in range(5)]
        held &= took(f"panel, stop, {name}", times, 0.25)
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
    parser = plain_parser(__doc__)
    parser.add_argument("--only", choices=[one.__name__ for one in PARTS])
    chosen = parser.parse_args().only
    print(machine())
    held = [one() for one in PARTS if chosen in (None, one.__name__)]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
