"""Reports about benchmarks and timed cells: progress, the table of the variants, its lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache

from speedkit_jupyter import machines
from speedkit_jupyter.report import plots
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import (
    AS_BEFORE,
    BLANK,
    Picture,
    Row,
    Section,
    Table,
    Tone,
    banner,
)
from speedkit_jupyter.report.verification_report import change, judged, shown
from speedkit_jupyter.right.accuracy import Accuracy
from speedkit_jupyter.rounds.budget import LONGER
from speedkit_jupyter.rounds.comparison import LOAD_DECIDES, Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.statistics import INTERVAL, Ratio, spread
from speedkit_jupyter.rounds.timing import LEAST_RUNS, Timing
from speedkit_jupyter.support import units
from speedkit_jupyter.support.units import between, count, ratio, seconds, size

TONES: dict[str, Tone] = {
    "faster": "good",
    "accepted": "good",
    "slower": "bad",
    "wrong": "bad",
    "failed": "bad",
}
CHANGES = "changes the results"
# A variant that takes up to 2 % longer is not called slower.
NO_GAIN = 0.98
# For an interval that is wider than this share of its median the headline gives the proven end.
LOOSE = 0.5
# Lines that are shown under the table; urgent ones always are.
SHOWN = 2
# Characters of a reason in the table, and of the user's own expression as a column's name.
SHORT, LONG = 60, 20
WORDS = ("variant", "verdict", "accuracy")
# Columns that leave a narrow text.
LEAVING = ("memory", "first call")
LEGEND = (
    "Median time of one step, device synchronized; speed-up: median of the ratios within each "
    f"round; first call and warm-up apart. Memory: state and the step's peak beyond it. {AS_BEFORE}"
)
# Characters of the bar of progress.
WIDTH = 24
LIVE = ("variant", "speed-up", INTERVAL, "state")


class Urgent(str):
    """A line that is never folded."""

    __slots__ = ()


def comparison_report(comparison: Comparison) -> Document:
    """Return the table of a benchmark, under one line with its answer."""
    about = [
        type(line)(f"{record.name}: {line}")  # an urgent line stays one
        for record in comparison.records
        for line in (*_lines(comparison, record), *_compilations(comparison, record))
    ]
    lines = sorted(
        [*_runner_up(comparison), *about, *_legend(comparison)],
        key=lambda line: not isinstance(line, Urgent),
    )
    open_lines = max(SHOWN, sum(isinstance(line, Urgent) for line in lines))
    ratios = [comparison.ratio(record) for record in comparison.records]
    png = cache(lambda: plots.as_png(plots.speedups(comparison)))
    picture = Picture(png, "Speed-up of each variant with its interval, as in the table")
    content = [
        comparison_table(comparison),
        picture if any(gain and gain.low > 0 for gain in ratios) else None,
        "\n".join(lines[:open_lines]),
        Section("\n".join([*lines[open_lines:], LEGEND]), folded=True),
    ]
    return Document(_headline(comparison), content, comparison.to_dict())


def _headline(comparison: Comparison) -> str:
    environment, baseline, best = comparison.environment, comparison.baseline, comparison.best
    rounds = count(len(baseline.times_s), "round")
    where = f"{environment.get('device')}, torch {environment.get('torch')}, {rounds}"
    if environment.get("planned_for"):
        where += f"; planned {machines.as_for(environment['planned_for'])}"
    if len(comparison.records) == 1 and baseline.times_s:
        text = f"{baseline.name} takes {seconds(spread(baseline.times_s).median_s)} a step"
    elif best is None:
        text = _nothing(comparison)
    else:
        gain = comparison.ratio(best)
        assert gain is not None  # it has won
        text = f"{best.name} is {describe_gain(gain, baseline.name)}"
        text += f"; {change(best.score)}" if best.score and best.changes_model else ""
    return f"{banner(comparison.busy)}{text} ({where})"


def _nothing(comparison: Comparison) -> str:
    """Return why nothing has won: no variant is faster, or a fast one was not checked."""
    text, others = f"Nothing is proven faster than {comparison.baseline.name}", []
    for record in comparison.records:
        verdict = comparison.verdict(record)
        if verdict == "not checked":
            why = record.accuracy.reason if record.accuracy else ""
            return f"{text} and right; {record.name}: not checked: {why}"
        others += [record.name] * (verdict == "other model")
    more = f" with the same results; faster with others: {', '.join(others)}"
    return text + more * bool(others)


def describe_gain(gain: Ratio, baseline: str) -> str:
    """Return `1.23× as fast as baseline, INTERVAL 1.20× to 1.26×`; the baseline's name is given.

    Of a loose interval the proven end is told, since its median is a matter of luck.
    """
    fast = f"as fast as {baseline}"
    if not gain.is_bounded:
        return f"about {ratio(gain.median)} {fast} in {count(gain.pairs, 'round')}"
    loose = gain.low > 1 and not gain.is_precise(LOOSE)
    value = f"at least {ratio(gain.low)}" if loose else ratio(gain.median)
    return f"{value} {fast}, {INTERVAL} {between(gain.low, gain.high)}"


# --- the table ---


def comparison_table(comparison: Comparison) -> Table:
    """Return a row for each variant; variants without times share a row for each reason.

    Columns with nothing in them are left out.
    """
    groups: dict[str, list[Record]] = {}
    for record in comparison.records:
        key = str(id(record)) if _is_timed(comparison, record) else _verdict(comparison, record)
        groups.setdefault(key, []).append(record)
    every = [_cells(comparison, group) for group in groups.values()]
    titles = tuple(title for title in every[0] if any(cells[title] for cells in every))
    rows = []
    for cells, (first, *_) in zip(every, groups.values(), strict=True):
        tone = TONES.get(spoken(comparison, first), "plain")
        rows.append(Row(tuple(cells[title] or BLANK for title in titles), tone))
    numbers = tuple(title for title in titles if title not in WORDS)
    leaving = tuple(title for title in LEAVING if title in titles)
    return Table(titles, rows, numbers, (*WORDS, INTERVAL), leaving)


def _is_timed(comparison: Comparison, record: Record) -> bool:
    return not record.failure and bool(comparison.times_s(record))


def _cells(comparison: Comparison, group: list[Record]) -> dict[str, str]:
    record, baseline = group[0], comparison.baseline
    times_s, memory = comparison.times_s(record), record.memory
    gain = comparison.ratio(record)
    if gain is not None and (not gain.is_bounded or record.same_as_baseline):
        gain = None  # too few rounds to say anything, or nothing that could differ
    cells = {
        "median": seconds(spread(times_s).median_s) if times_s else "",
        "speed-up": ratio(gain.median) if gain else "",
        INTERVAL: f"{ratio(gain.low)} to {ratio(gain.high)}" if gain else "",
        "first call": "" if record.first_call_s is None else seconds(record.first_call_s),
        "memory": size(memory.peak_bytes) if memory and memory.peak_bytes is not None else "",
    }
    if baseline.score is not None:
        name = baseline.score.function
        name = f"{name}()" if name.isidentifier() else name
        after = record.score.after if record.score else None
        cells[_cut(name, LONG)] = "" if after is None else shown(after)
    cells["accuracy"] = _accuracy(record.accuracy)
    if not _is_timed(comparison, record):
        cells = dict.fromkeys(cells, "")
    names = ", ".join(one.name for one in group)
    return {"variant": names, "verdict": _verdict(comparison, record), **cells}


def spoken(comparison: Comparison, record: Record) -> str:
    """Return the verdict in words for users."""
    verdict, gain = comparison.verdict(record), comparison.ratio(record)
    if verdict in ("slower", "same") and gain is not None and gain.median > NO_GAIN:
        return "no gain"
    return CHANGES if verdict == "other model" else verdict


def _accuracy(accuracy: Accuracy | None) -> str:
    """Return the verdict; for rounding with the larger relative error of output and gradients."""
    if accuracy is None:
        return ""
    error, verdict = accuracy.output_error, accuracy.verdict
    if verdict == "other model" and error is not None:
        return f"changed {error:.1g}"
    if verdict == "rounding" and error is not None:
        return f"rounding {max(error, accuracy.gradient_error or 0):.1g}"
    return "as exact" if verdict in ("exact", "rounding") else verdict


def _verdict(comparison: Comparison, record: Record) -> str:
    verdict, gain = spoken(comparison, record), comparison.ratio(record)
    if record.failure:
        return f"{verdict}: {_in_short(record)}"
    if not comparison.times_s(record):
        return record.why_not_measured or "not reached: the budget ended before"
    if verdict != "too noisy":
        return verdict
    if comparison.load_decides(comparison.baseline, record):
        return f"{verdict}: {LOAD_DECIDES}"
    few = gain is None or (math.isinf(gain.high) and not comparison.busy)
    return f"{'too few rounds' if few else verdict}: {LONGER}"


def _reason(record: Record) -> str:
    if not (record.declined and record.declines):
        return record.failure or ""
    if len(record.declines) == 1 and record.name.partition(":")[0] in record.declines:
        return next(iter(record.declines.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in record.declines.items())


def _in_short(record: Record) -> str:
    return _cut(re.split(r"; | \(|\. ", _reason(record))[0], SHORT)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


# --- the lines below ---


def _lines(comparison: Comparison, record: Record) -> Iterator[str]:
    failed, score = record.failure, record.score
    if failed and _in_short(record) != _reason(record):
        yield f"{spoken(comparison, record)}: {_reason(record)}"
    if record.same_as_baseline:
        yield "changes nothing here, so there is nothing to measure"
    words = [k if v is True else f"{k} {units.word(v)}" for k, v in record.applied.items()]
    named = [part.partition(":")[0] for part in record.name.split("+")]
    if words and not failed and words != named and "+".join(words) != record.name:
        yield ", ".join(words)
    if record.is_other_model(comparison.baseline) and not failed:
        yield Urgent(_given_up(record))
    else:
        yield from _errors(record.accuracy)
        if score and not failed and record is not comparison.baseline:
            yield Urgent(judged(score)) if record.is_refused else judged(score)
    if not record.declined:
        yield from (f"{name}: declined: {reason}" for name, reason in record.declines.items())
    for name, note in record.notes.items():
        yield Urgent(f"{name}: {note}") if name == "precision" else f"{name}: {note}"


def _given_up(record: Record) -> str:
    found, told = record.accuracy, CHANGES
    if found is not None and found.verdict != "other model":
        told = f"{found.verdict}: {found.reason}"
    elif found is not None:
        errors = (found.output_error, found.loss_error, found.gradient_error)
        pairs = zip(("output off", "loss", "gradients"), errors, strict=True)
        known = [f"{name} by {error:.2g}" for name, error in pairs if error is not None]
        told += f": {', '.join(known)}" if known else ""
    if record.score is not None:
        return f"{told}; {judged(record.score)}"
    verify = f"`%speedkit verify --plan {record.name}`, or `--accuracy`"
    return f"{told}; its loss or your accuracy decides, not its speed: {verify}"


def _errors(accuracy: Accuracy | None) -> Iterator[str]:
    """Yield the reason of a verdict; for rounding its errors and the baseline's."""
    if accuracy is None:
        return
    if accuracy.reason:
        yield Urgent(f"{accuracy.verdict}: {accuracy.reason}")
    elif accuracy.verdict == "rounding" and accuracy.output_error is not None:
        base = accuracy.baseline_output_error
        told = f"output off by {accuracy.output_error:.1g} (baseline {base:.1g})"
        if accuracy.gradient_error:
            base = accuracy.baseline_gradient_error
            told += f", gradients by {accuracy.gradient_error:.1g} (baseline {base:.1g})"
        yield f"{told}, as its dtype rounds"


def _compilations(comparison: Comparison, record: Record) -> Iterator[str]:
    """Yield the number of graphs, breaks, recompilations, and of steps that pay them back."""
    found = record.compilations
    if found.graphs:
        graphs, breaks = count(found.graphs, "graph"), count(found.breaks, "break")
        text = f"compiled {graphs}, {breaks}, {count(found.recompiles, 'recompile')}"
        if (steps := comparison.break_even_steps(record)) is not None:
            text += f"; its {seconds(record.settling_s)} are paid back after {count(steps, 'step')}"
        yield text
    if found.limit_reached:
        limit = "torch's recompile limit (torch.compiler.config.recompile_limit)"
        yield Urgent(f"fell back to plain PyTorch at {limit}")


def _runner_up(comparison: Comparison) -> list[str]:
    best, runner_up = comparison.best, comparison.runner_up()
    if best is None or runner_up is None or not runner_up[1].is_bounded:
        return []
    second, lead = runner_up
    told = "" if lead.low > 1 else ", so this run does not tell them apart"
    value = f"{ratio(lead.median)} ({between(lead.low, lead.high)})"
    return [f"{best.name} is {value} as fast as {second.name}{told}."]


def _legend(comparison: Comparison) -> Iterator[str]:
    if comparison.dropout_off:
        yield "Dropout was off in the accuracy check: each kernel draws other masks."
    if comparison.skipped_rounds:
        rounds = count(comparison.skipped_rounds, "round")
        yield Urgent(f"{rounds} left out: the GradScaler skipped the optimizer's step in them.")
    if comparison.compiled_rounds:
        rounds = count(comparison.compiled_rounds, "round")
        yield Urgent(f"{rounds} left out: something was compiled in them.")
    said = (banner(comparison.repeats), *(f"{line}." for line in comparison.unrestorable))
    yield from map(Urgent, filter(None, map(str.rstrip, said)))


# --- a timed cell ---


def timing_report(timing: Timing) -> Document:
    """Return median with its interval, the numbers of `%timeit`, CPU and device time."""
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
    lines = "\n".join(_lines_of_timing(timing))
    return Document(f"{banner(timing.busy)}{headline}", [table, lines], timing.to_dict())


def _lines_of_timing(timing: Timing) -> list[str]:
    said = [banner(timing.repeats).rstrip()] if timing.repeats else []
    said += [f"Precision: {timing.unreached}."] if timing.unreached else []
    device = " Device time is between two CUDA events." if timing.device_s is not None else ""
    lines = [*said, f"CPU time is summed over all cores.{device}"]
    if timing.interval_s is None:
        few = f"Fewer than {LEAST_RUNS} runs" if timing.repeat < LEAST_RUNS else "Such runs"
        lines.append(f"{few} have no {INTERVAL}.")
    return lines


# --- while it runs ---


def live_report(progress: Progress, title: str = "") -> Document:
    """Return the progress for notebooks and the panel; without a title there is no bar."""
    rows = []
    for one in progress.known:
        low, high = one.low or 0.0, math.inf if one.high is None else one.high
        interval = between(low, high) if low and not math.isinf(high) else BLANK
        gain = BLANK if one.speedup is None else ratio(one.speedup)
        rows.append(Row((one.name, gain, interval, one.state), TONES.get(one.state, "plain")))
    table = Table(LIVE, rows, numbers=LIVE[1:3], wraps=LIVE[:1])
    if not title:
        return Document(progress.text, [table])
    return Document(f"{bar(progress.done)} {title}", [progress.text, table])


def live_line(progress: Progress, title: str) -> str:
    """Return the progress in one line for a terminal, with the best variant so far."""
    faster = {s.name: s.speedup or 0.0 for s in progress.known if s.state == "faster"}
    best = max(faster, key=lambda name: faster[name], default=None)
    is_said = "best so far" in progress.text  # by a search
    ahead = "" if best is None or is_said else f"; best so far: {best} {ratio(faster[best])}"
    return f"{bar(progress.done)} {title}: {progress.text}{ahead}"


def bar(done: float) -> str:
    """Return a bar `██████░░░░`; it is never full while something runs."""
    filled = min(round(done * WIDTH), WIDTH - 1)
    return f"{'█' * filled}{'░' * (WIDTH - filled)}"
