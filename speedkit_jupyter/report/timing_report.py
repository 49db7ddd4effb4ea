"""Reports about a step that was timed as it stands."""

from __future__ import annotations

from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.measure.results.timing import LEAST_RUNS, Timing
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table
from speedkit_jupyter.report.units import seconds
from speedkit_jupyter.support.words import count

# As `%timeit`: a slowest run this many times the fastest hints at a cache, or at other work.
SUSPICIOUS, LEAST_S = 4, 1e-6


def timing_report(timing: Timing) -> Document:
    """Return median with its interval, what `%timeit` prints, CPU and device time."""
    digits = timing.precision
    runs = f"{count(timing.repeat, 'run')}, {count(timing.loops, 'loop')} each"
    if not timing.all_runs:
        return Document(f"Nothing was timed ({runs})")
    interval = timing.interval_s
    between = " to ".join(seconds(end, digits) for end in interval) if interval else "–"
    device = timing.device_s
    cells = {
        "median": seconds(timing.median_s, digits),
        INTERVAL: between,
        "mean ± std. dev.": f"{seconds(timing.average, digits)} ± {seconds(timing.stdev, digits)}",
        "best": seconds(timing.best, digits),
        "worst": seconds(timing.worst, digits),
        "CPU time": seconds(timing.cpu_s, digits),
    }
    if device is not None:
        cells["device time"] = seconds(device, digits)
    if timing.first_call_s is not None:
        cells["first call"] = seconds(timing.first_call_s, digits)
    table = Table(tuple(cells), (Row(tuple(cells.values())),), numbers=tuple(cells))
    detail = f", {INTERVAL} {between}" if interval else ""
    headline = f"{cells['median']} per loop{detail} ({runs})"
    sections = [Section(table), Section("\n".join(_lines(timing)))]
    return Document(headline, tuple(sections), timing.to_dict())


def _lines(timing: Timing) -> list[str]:
    said = [f"{line[:1].upper()}{line[1:]}." for line in (timing.busy, timing.repeats) if line]
    said += [f"Precision: {timing.unreached}."] if timing.unreached else []
    lines = [*said, "CPU time is summed over all cores."]
    if timing.device_s is not None:
        lines[-1] += " Device time lies between two CUDA events."
    if timing.interval_s is None:
        lines.append(f"Fewer than {LEAST_RUNS} runs have no {INTERVAL}.")
    if timing.best > 0 and timing.worst > max(SUSPICIOUS * timing.best, LEAST_S):
        lines.append(
            f"The slowest run took {timing.worst / timing.best:.1f} times as long as the fastest: "
            "a cache, or another program. %%speedbench --compare holds out against such a machine."
        )
    if timing.compile_time > 0.1:
        lines.append(f"Python took {seconds(timing.compile_time)} to compile the cell.")
    return lines
