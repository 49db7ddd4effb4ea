"""The report of a timed cell."""

from __future__ import annotations

from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import BLANK, Table, banner
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.rounds.timing import LEAST_RUNS, Timing
from speedkit_jupyter.support.units import count, seconds


def timing_report(timing: Timing) -> Document:
    """Return median with its interval, what `%timeit` prints, CPU and device time."""
    runs = f"{count(timing.repeat, 'run')}, {count(timing.loops, 'loop')} each"
    if not timing.all_runs:
        return Document(f"Nothing was timed ({runs})")
    ends, digits = timing.interval_s, timing.precision
    values = {
        "best": timing.best,
        "worst": timing.worst,
        "CPU time": timing.cpu_s,
        "device time": timing.device_s,
        "first call": timing.first_call_s,
    }
    interval = " to ".join(seconds(end, digits) for end in ends) if ends else BLANK
    mean = f"{seconds(timing.average, digits)} ± {seconds(timing.stdev, digits)}"
    cells = {"median": seconds(timing.median_s, digits), INTERVAL: interval}
    cells["mean ± std. dev."] = mean
    cells |= {name: seconds(one, digits) for name, one in values.items() if one is not None}
    table = Table(tuple(cells), [tuple(cells.values())], numbers=tuple(cells))
    within = f", {INTERVAL} {interval}" if ends else ""
    headline = f"{cells['median']} per loop{within} ({runs})"
    lines = "\n".join(_lines(timing))
    return Document(f"{banner(timing.busy)}{headline}", [table, lines], timing.to_dict())


def _lines(timing: Timing) -> list[str]:
    said = [banner(timing.repeats).rstrip()] if timing.repeats else []
    said += [f"Precision: {timing.unreached}."] if timing.unreached else []
    device = " Device time lies between two CUDA events." if timing.device_s is not None else ""
    lines = [*said, f"CPU time is summed over all cores.{device}"]
    if timing.interval_s is None:
        few = f"Fewer than {LEAST_RUNS} runs" if timing.repeat < LEAST_RUNS else "Such runs"
        lines.append(f"{few} have no {INTERVAL}.")
    return lines
