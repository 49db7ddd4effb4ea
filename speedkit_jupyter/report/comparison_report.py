"""Reports of a benchmark, of a timed cell, and of a running measurement's progress."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from statistics import median

from speedkit_jupyter import machines
from speedkit_jupyter.report import elements
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.report.verdicts import CHANGES_RESULTS, VERDICT_TONES, verdict_text
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds.budget import LONGER_BUDGET
from speedkit_jupyter.rounds.comparison import DROPPED, LOAD_DECIDES, Comparison, Progress, Record
from speedkit_jupyter.rounds.statistics import INTERVAL, Ratio
from speedkit_jupyter.rounds.timing import LEAST_RUNS, Timing
from speedkit_jupyter.support import units
from speedkit_jupyter.support.units import between, count, ratio, seconds, size

ALMOST = 0.97  # the largest share that a progress bar shows during a measurement
WORDS = ("variant", "verdict", "accuracy")
# Columns that text output leaves out if the table is too wide, beginning with the last.
LEAVING = ("memory", "first call")
LEGEND = (
    "Median time of one step, device synchronized; speed-up: median of the ratios within each "
    "round; first call and warm-up apart. Memory: state and the step's peak beyond it. "
    f"{elements.AS_BEFORE}"
)
LIVE = ("variant", "speed-up", INTERVAL, "state")


class Urgent(str):
    """A remark that is never folded."""


def comparison_report(comparison: Comparison) -> Document:
    """Return a benchmark's report: a headline with the result, the table, and remarks."""
    about = [
        type(line)(f"{record.name}: {line}")  # an Urgent line stays Urgent
        for record in comparison.records
        for line in _lines(comparison, record)
    ]
    lines = [*_legend(comparison), *about]
    urgent = [line for line in lines if isinstance(line, Urgent)]
    others = [line for line in lines if line not in urgent]
    folded = elements.Section("\n".join([*others, LEGEND]), folded=True)
    content = [comparison_table(comparison), "\n".join(urgent), folded]
    return Document(_headline(comparison), content, comparison.to_dict())


def _headline(comparison: Comparison) -> str:
    """Return the headline: the best gain, the only variant's time, or `Nothing is proven …`."""
    environment, baseline, best = comparison.environment, comparison.baseline, comparison.best
    rounds = count(len(baseline.times_s), "round")
    where = f"{environment.get('device')}, torch {environment.get('torch')}, {rounds}"
    if environment.get("planned_for"):
        where += f"; planned {machines.as_for(environment['planned_for'])}"
    if len(comparison.records) == 1 and baseline.times_s:
        text = f"{baseline.name} takes {seconds(median(baseline.times_s))} a step"
    elif best is None or (gain := comparison.ratio(best)) is None:
        text = _nothing(comparison)
    else:
        text = f"{best.name} is {describe_gain(gain, baseline.name)}"
    return f"{elements.banner(comparison.busy)}{text} ({where})"


def _nothing(comparison: Comparison) -> str:
    """Return `Nothing is proven …`, with an unchecked plan or faster plans with other results."""
    text = f"Nothing is proven faster than {comparison.baseline.name}"
    unchecked = [one for one in comparison.records if comparison.verdict(one) == "not checked"]
    if unchecked:
        why = unchecked[0].accuracy.reason if unchecked[0].accuracy else ""
        return f"{text} and right; {unchecked[0].name}: not checked: {why}"
    others = [one.name for one in comparison.records if comparison.verdict(one) == "other model"]
    more = f" with the same results; faster with others: {', '.join(others)}"
    return text + more * bool(others)


def describe_gain(gain: Ratio, baseline: str) -> str:
    """Return `1.23× as fast as baseline`, with the interval if it is bounded."""
    fast = f"as fast as {baseline}"
    if not gain.is_bounded:
        return f"about {ratio(gain.median)} {fast} in {count(gain.pairs, 'round')}"
    return f"{ratio(gain.median)} {fast}, {INTERVAL} {between(gain.low, gain.high)}"


# --- the table ---


def comparison_table(comparison: Comparison) -> elements.Table:
    """Return the table with a row for each variant, without empty columns."""
    gains = [gain.median for one in comparison.records if (gain := comparison.ratio(one))]
    every, tones, most = list[dict[str, str]](), list[elements.Tone](), max(gains, default=1)
    for record in comparison.records:
        gain, memory = comparison.ratio(record), record.memory
        if gain is not None and (not gain.is_bounded or record.same_as_baseline):
            gain = None  # the gain is too uncertain to show, or 1 by definition
        times_s = [] if record.failure else comparison.times_s(record)
        cells = {
            "median": seconds(median(times_s)) if times_s else "",
            "speed-up": elements.TableCell(ratio(gain.median), share=gain.median / most)
            if gain
            else "",
            INTERVAL: f"{ratio(gain.low)} to {ratio(gain.high)}" if gain else "",
            "first call": "" if record.first_call_s is None else seconds(record.first_call_s),
            "memory": size(memory.peak_bytes) if memory and memory.peak_bytes is not None else "",
        }
        if record.tokens and times_s:
            prompt, token, rate = _of_tokens(record)
            cells |= {"prompt": prompt, "token": token, "tokens/s": rate}
        if name := comparison.accuracy_name:
            cells[_cut(name, 20)] = "" if record.score is None else f"{record.score:.6g}"
        cells["accuracy"] = _accuracy(record.accuracy)
        if not times_s:
            cells = dict.fromkeys(cells, "")
        every.append({"variant": record.name, "verdict": _verdict(comparison, record), **cells})
        tones.append(VERDICT_TONES.get(verdict_text(comparison, record), "plain"))
    titles = tuple(title for title in every[0] if any(cells.get(title) for cells in every))
    rows = [
        elements.Row(tuple(cells.get(title) or elements.BLANK for title in titles), tone)
        for cells, tone in zip(every, tones, strict=True)
    ]
    numbers = tuple(title for title in titles if title not in WORDS)
    leaving = tuple(title for title in LEAVING if title in titles)
    return elements.Table(titles, rows, numbers, (*WORDS, INTERVAL), leaving)


def _of_tokens(record: Record) -> tuple[str, str, str]:
    """Return the prompt's time, a token's median time, and the tokens per second, as text."""
    tokens = record.tokens
    assert tokens is not None
    rate = tokens.tokens / median(record.times_s)
    return seconds(tokens.prompt_s), seconds(tokens.token_s), units.number(rate)


def latency_lines(comparison: Comparison, names: Collection[str]) -> Iterator[str]:
    """Yield a line for each variant in `names`: token times and, if limited, 99th percentile."""
    limit_s = comparison.at_most_s
    for record in comparison.records:
        if record.name not in names or not record.times_s:
            continue
        told = []
        if record.tokens:
            prompt, token, rate = _of_tokens(record)
            told = [f"{prompt} for the prompt, {token} a token, {rate} tokens/s"]
        if limit_s is not None and record.p99_s is not None:
            unit = "tokens" if record.tokens else "steps"
            limit = f"limit {seconds(limit_s)}"
            told += [f"99 % of {unit} take up to {seconds(record.p99_s)} ({limit})"]
        if told:
            yield f"{record.name}: {'; '.join(told)}"


def _accuracy(accuracy: Accuracy | None) -> str:
    """Return the text of the accuracy cell, such as `as exact` or `rounding 1e-05`."""
    if accuracy is None:
        return ""
    error, verdict = accuracy.output_error, accuracy.verdict
    if verdict == "other model" and error is not None:
        return f"changed {error:.1g}"
    if verdict == "rounding" and error is not None:
        return f"rounding {max(error, accuracy.gradient_error or 0):.1g}"
    return "as exact" if verdict in ("exact", "rounding") else verdict


def _verdict(comparison: Comparison, record: Record) -> str:
    """Return the verdict cell's text, with a short reason for a failure, missing times or noise."""
    verdict, gain = verdict_text(comparison, record), comparison.ratio(record)
    if record.failure:
        return f"{verdict}: {_in_short(record)}"
    if not comparison.times_s(record):
        return record.why_not_measured or "not reached: the budget was spent"
    if verdict != "too noisy":
        return verdict
    if comparison.load_decides(comparison.baseline, record):
        return f"{verdict}: {LOAD_DECIDES}"
    few = gain is None or (math.isinf(gain.high) and not comparison.busy)
    return f"{'too few rounds' if few else verdict}: {LONGER_BUDGET}"


def _reason(record: Record) -> str:
    if not (record.declined and record.declines):
        return record.failure or ""
    if len(record.declines) == 1 and record.name.partition(":")[0] in record.declines:
        return next(iter(record.declines.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in record.declines.items())


def _in_short(record: Record) -> str:
    return _cut(re.split(r"; | \(|\. ", _reason(record))[0], 60)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


# --- the lines below ---


def _lines(comparison: Comparison, record: Record) -> Iterator[str]:
    """Yield remarks about a variant: failure, changes, accuracy, declined options, notes."""
    failed, found = record.failure, record.accuracy
    if failed and _in_short(record) != _reason(record):
        yield f"{verdict_text(comparison, record)}: {_reason(record)}"
    if record.same_as_baseline:
        yield "changes nothing here, so there is nothing to measure"
    words = [k if v is True else f"{k} {units.word(v)}" for k, v in record.applied.items()]
    named = [part.partition(":")[0] for part in record.name.split("+")]
    text = ", ".join(words)
    is_said = len(words) == len(named) and all(part in text for part in named)
    if words and not failed and not is_said:
        yield Urgent(text)
    if late := comparison.exceeds(record):
        yield Urgent(late)
    if record.is_other_model(comparison.baseline) and not failed:
        yield Urgent(_given_up(record))
    elif found is not None and found.reason:
        yield Urgent(f"{found.verdict}: {found.reason}")
    if not record.declined:
        yield from (f"{name}: declined: {reason}" for name, reason in record.declines.items())
    for name, note in record.notes.items():
        yield Urgent(f"{name}: {note}") if name == "precision" else f"{name}: {note}"
    compiled = record.compilations
    if compiled.graphs:
        text = f"compiled {count(compiled.graphs, 'graph')}"
        if (steps := comparison.break_even_steps(record)) is not None:
            paid = f"its {seconds(record.settling_s)} are paid back after {count(steps, 'step')}"
            text = Urgent(f"{text}; {paid}")
        yield text
    if compiled.limit_reached:
        limit = "torch's recompile limit (torch.compiler.config.recompile_limit)"
        yield Urgent(f"fell back to plain PyTorch at {limit}")


def _given_up(record: Record) -> str:
    found, told = record.accuracy, CHANGES_RESULTS
    if found is not None and found.verdict != "other model":
        told = f"{found.verdict}: {found.reason}"
    elif found is not None:
        errors = (found.output_error, found.loss_error, found.gradient_error)
        pairs = zip(("output off", "loss", "gradients"), errors, strict=True)
        known = [f"{name} by {error:.2g}" for name, error in pairs if error is not None]
        told += f": {', '.join(known)}" if known else ""
    verify = f"`%speedkit verify --plan {record.name}`, or `--accuracy`"
    return f"{told}; its loss or your accuracy decides, not its speed: {verify}"


def _legend(comparison: Comparison) -> Iterator[str]:
    """Yield remarks about the whole benchmark, such as omitted rounds or unrestorable state."""
    if comparison.dropout_off:
        yield "Dropout was off in the accuracy check: each kernel draws other masks."
    reasons = {
        "the GradScaler skipped the optimizer's step in them": comparison.skipped_rounds,
        "something was compiled in them": comparison.compiled_rounds,
    }
    for reason, number in reasons.items():
        if number:
            yield Urgent(f"{count(number, 'round')} left out: {reason}.")
    said = (elements.banner(comparison.repeats), *(f"{line}." for line in comparison.unrestorable))
    yield from map(Urgent, filter(None, map(str.rstrip, said)))


# --- a timed cell ---


def timing_report(timing: Timing) -> Document:
    """Return a timed cell's report: the median, its interval, and the numbers of `%timeit`."""
    runs = f"{count(timing.repeat, 'run')}, {count(timing.loops, 'loop')} each"
    if not timing.all_runs:
        return Document(f"Nothing was timed ({runs})")
    ends, digits = timing.interval_s, timing.precision
    values = {"best": timing.best, "worst": timing.worst, "first call": timing.first_call_s}
    interval = " to ".join(seconds(end, digits) for end in ends) if ends else elements.BLANK
    cells = {
        "median": seconds(timing.median_s, digits),
        INTERVAL: interval,
        "mean ± std. dev.": f"{seconds(timing.average, digits)} ± {seconds(timing.stdev, digits)}",
    }
    cells |= {name: seconds(one, digits) for name, one in values.items() if one is not None}
    table = elements.Table(tuple(cells), [tuple(cells.values())], numbers=tuple(cells))
    within = f", {INTERVAL} {interval}" if ends else ""
    headline = f"{cells['median']} per loop{within} ({runs})"
    needed = f"No {INTERVAL}: it needs {LEAST_RUNS} runs or more, and less noise."
    lines = [elements.banner(timing.repeats).rstrip(), "" if ends else needed]
    return Document(f"{elements.banner(timing.busy)}{headline}", [table, *lines], timing.to_dict())


# --- while it runs ---


def live_report(progress: Progress, title: str = "") -> Document:
    """Return a report of the progress: a table of the variants and, with a `title`, a bar."""
    known = progress.known
    rows = [_live_row(known, record) for record in known.records] if known else []
    table = elements.Table(LIVE, rows, numbers=LIVE[1:3], wraps=LIVE[:1])
    if not title:
        return Document(progress.text, [table])
    # The bar is never full while a measurement runs, even if the budget is exceeded.
    return Document(title, [elements.Meter(min(progress.done, ALMOST), progress.text), table])


def _live_row(comparison: Comparison, record: Record) -> elements.Row:
    gain, state = comparison.ratio(record), verdict_text(comparison, record)
    if record.same_as_baseline:
        gain, state = None, "changes nothing"
    elif gain is None:
        state = state if record is comparison.baseline or record.failure else "waiting"
    elif len(record.times_s) < len(comparison.baseline.times_s):
        state = DROPPED
    elif state in ("too noisy", "not checked"):
        state = "measuring"
    interval = between(gain.low, gain.high) if gain and gain.is_bounded else elements.BLANK
    cells = (record.name, ratio(gain.median) if gain else elements.BLANK, interval, state)
    return elements.Row(cells, VERDICT_TONES.get(state, "plain"))
