"""What each entry of the catalog is worth: alone, and as a part of the plan that tuning finds.

For each of nine models, entry by entry: every word of it that is available here, interleaved with
baseline, each checked (those that are declined with their reason); then `tune()`, and in fresh
rounds its plan beside the same without each of its parts.

    python tests/benchmarks/catalog.py [--only MODEL] [--entry NAME] [--budget S] [--device cuda]
                                       [--file catalog.jsonl] [--table]

`--budget` are seconds for each word, without compiling, and for each part of the winner; tuning has
its default, or eight times a shorter one. With the default all of it takes about two hours on two
cores. What is done is appended to the file with the state of the code (the commit), so that a run
can be stopped and goes on where it was; what another state has measured is measured anew. `--table`
only prints the newest state, as Markdown. An entry that joins CATALOG is there by itself. Exits 1
where what `auto` takes makes a model slower than 0.98 of baseline, or wrong. Needs
`pip install transformers` for two of the models; without it they are left out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _catalog_models import MODELS, made
from _kept import Row, append, line_of, nothing_kept, read, state_of_code
from _ratios import machine
from _workloads import Workload

from speedkit_jupyter import Facts, Hardware, benchmark, plan, tune
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.statistics import paired_ratio
from speedkit_jupyter.measure.subject.variants import variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.report.units import ratio
from speedkit_jupyter.support.words import share
from speedkit_jupyter.tuning.candidates import Candidate

BUDGET_S, TUNING = 10.0, 8
WINNER = "winner"
AT_LEAST = 0.98
# What is kept of each variant's row.
KEPT = ("verdict", "speedup", "low", "high", "accuracy", "peak_bytes", "first_call_s")
NEED_TRANSFORMERS = ("BERT, training", "GPT-2, inference")


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--entry", help=f"this one alone, or {WINNER}")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for each word")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--file", type=Path, default=Path("catalog.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    options = parser.parse_args()
    if not options.table:
        _measure(options)
    rows = newest(read(options.file), options.device)
    print(tables(rows))
    return 0 if rows and not [one for row in rows for one in broken(row)] else 1


def _measure(options: argparse.Namespace) -> None:
    """Whatever this state of the code has not measured yet."""
    state = state_of_code()
    done = {
        (row["model"], row["entry"]) for row in newest(read(options.file), options.device, state)
    }
    names = [options.entry] if options.entry else [*(entry.name for entry in CATALOG), WINNER]
    for model in models_at_hand(options.only):
        missing = [name for name in names if (model, name) not in done]
        with nothing_kept():
            for name in missing:
                start = time.perf_counter()
                row = one_row(model, name, options.device, options.budget)
                row |= {"state": state, "machine": machine(options.device)}
                row |= {"device": options.device, "seconds": time.perf_counter() - start}
                append(options.file, row)
                print(f"{row['seconds']:4.0f} s  {_line(row)}", flush=True)


def models_at_hand(only: str) -> Iterator[str]:
    for name in MODELS:
        if only.lower() not in name.lower():
            continue
        if name in NEED_TRANSFORMERS and not find_spec("transformers"):
            print(f"{name}: left out, it needs `pip install transformers`")
            continue
        yield name


def one_row(model: str, name: str, device: str, budget_s: float) -> Row:
    """An entry on a model, or its winner; what fails is a row that says so."""
    work = made(model, device)
    row: Row = {"model": model, "entry": name}
    try:
        if name == WINNER:
            return row | winner(work, budget_s)
        return row | alone(work, next(one for one in CATALOG if one.name == name), budget_s)
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}


def alone(work: Workload, entry: Optimization, budget_s: float) -> Row:
    """Each word of an entry against baseline."""
    hardware = Hardware.detect().with_gemm()
    facts = Facts.read(work.model, [work.optimizer] if work.optimizer else [])
    by_rule = plan(hardware=hardware, facts=facts)[entry.name]
    taken = Candidate({entry.name: by_rule.value}).name if by_rule.active else None
    declined: dict[str, str] = {}
    available: list[str] = []
    for word in words(entry, hardware, facts, taken):
        decision = plan(variant(word).config, hardware, facts)[entry.name]
        if decision.active:
            available.append(word)
        elif decision.declined:
            declined[word] = decision.why
    if not available and not declined:
        declined[entry.name] = by_rule.why
    row = {"effect": entry.effect.name, "auto": taken, "declined": declined, "measured": {}}
    if available:
        baseline, *others = _kept(_benchmark(work, available, budget_s))
        row["baseline_bytes"] = baseline.get("peak_bytes")
        row["measured"] = dict(zip(available, others, strict=True))
    return row


def words(
    entry: Optimization, hardware: Hardware, facts: Facts, taken: str | None
) -> Iterator[str]:
    """Those that name a change, those that a search would try, and what `auto` takes; each value
    once.
    """
    tried = [Candidate({entry.name: one}).name for one in entry.candidates(hardware, facts)]
    seen: list[Any] = []
    for word in dict.fromkeys([*entry.changes(), *tried, *([taken] if taken else [])]):
        value = getattr(variant(word).config, entry.name)
        if value not in seen:
            seen.append(value)
            yield word


def winner(work: Workload, budget_s: float) -> Row:
    """What tuning finds, over baseline and over itself without each of its parts."""
    shorter_s = None if budget_s >= BUDGET_S else TUNING * budget_s
    step, optimizer = _step(work), work.optimizer or ()
    tuning = tune(step, model=work.model, optimizer=optimizer, budget_s=shorter_s, fresh=True)
    whole = tuning.winner
    row = {"plan": whole.name, "tuned_s": tuning.seconds, "without": {}}
    if not whole.values:
        return row
    rests = {name: whole.without(name).name for name in whole.values}
    names = [whole.name, *(name for name in dict.fromkeys(rests.values()) if name != "baseline")]
    found = _benchmark(work, names, budget_s)
    times = {one.name: found.times_s(one) for one in found.records}
    baseline, row["over_baseline"], *_ = _kept(found)
    row["baseline_bytes"] = baseline.get("peak_bytes")
    row["without"] = {name: _ratio(times[rest], times[whole.name]) for name, rest in rests.items()}
    return row


def _benchmark(work: Workload, names: list[str], budget_s: float) -> Comparison:
    return benchmark(
        _step(work),
        ",".join(["baseline", *names]),
        model=work.model,
        optimizer=work.optimizer or (),
        budget_s=budget_s * len(names),
    )


def _step(work: Workload) -> Any:
    return lambda: work.step(work.model, work.optimizer)


def _kept(found: Comparison) -> list[Row]:
    """What is kept of each variant."""
    rows = [{key: row[key] for key in KEPT if row[key] is not None} for row in found.rows()]
    for row, record in zip(rows, found.records, strict=True):
        if not found.times_s(record):
            row["why"] = record.failure or record.why_not_measured or "no time was left for it"
    return rows


def _ratio(first: list[float], second: list[float]) -> list[float] | None:
    pairs = min(len(first), len(second))
    if not pairs:
        return None
    found = paired_ratio(first[:pairs], second[:pairs])
    return [found.median, found.low, None if math.isinf(found.high) else found.high]


# What it comes to.


def newest(rows: list[Row], device: str, state: str | None = None) -> list[Row]:
    """The last row of each model and entry in one state of the code, the newest by default."""
    here = [row for row in rows if row["device"] == device]
    state = state or (here[-1]["state"] if here else None)
    last = {(row["model"], row["entry"]): row for row in here if row["state"] == state}
    return sorted(last.values(), key=lambda row: [*MODELS].index(row["model"]))


def broken(row: Row) -> list[str]:
    """The promises that this row breaks: `auto` takes only what is never a loss, nor wrong."""
    found = row.get("measured", {}).get(row.get("auto"))
    if found is None:  # nothing is taken
        return []
    name = f"{row['model']}: auto takes {row['auto']}, which"
    if found["verdict"] in ("wrong", "failed"):
        return [f"{name} is {found['verdict']}"]
    if found["verdict"] == "slower" and found["speedup"] < AT_LEAST:
        return [f"{name} makes it {found['speedup']:.2f} times as fast"]
    return []


def tables(rows: list[Row]) -> str:
    """Markdown: a table for each model."""
    if not rows:
        return "nothing measured yet"
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = [rows[0]["machine"], "", *_overview(rows, models)]
    for model in models:
        lines += ["", f"### {model}", "", *_table([row for row in rows if row["model"] == model])]
    problems = [one for row in rows for one in broken(row)]
    ends = [f"{len(models)} of {len(MODELS)} models in one state of the code: {rows[0]['state']}"]
    return "\n".join([*lines, "", *(problems or ["every promise holds"]), *ends])


def _overview(rows: list[Row], models: list[str]) -> Iterator[str]:
    """Speed-ups of every word that is available anywhere, by model; what is proven is bold."""
    found = {
        (row["model"], word): one for row in rows for word, one in row.get("measured", {}).items()
    }
    best = {row["model"]: row for row in rows if row["entry"] == WINNER}
    yield line_of(["change", *models])
    yield line_of(["---"] * (1 + len(models)))
    for word in dict.fromkeys(word for _, word in found):
        yield line_of([f"`{word}`", *(_speed_up(found.get((model, word))) for model in models)])
    plans = (
        f"`{best[model]['plan']}`" if best.get(model, {}).get("plan") else "" for model in models
    )
    yield line_of(["the winner", *plans])
    over = (best.get(model, {}).get("over_baseline") for model in models)
    yield line_of(["", *(_speed_up(one) for one in over)])


def _speed_up(found: Row | None) -> str:
    """`**1.44×**` where it is proven faster, `0.73×` where slower, `(1.01×)` where neither."""
    if found is None:
        return ""
    if found.get("speedup") is None:
        return "far slower" if "far slower" in found.get("why", "") else "–"
    text = ratio(found["speedup"])
    if found["verdict"] in ("wrong", "failed"):
        return found["verdict"]
    if found["verdict"] == "faster":
        return f"**{text}**"
    is_slower = found.get("high") is not None and found["high"] < 1
    return text if is_slower or found["speedup"] < 0.5 else f"({text})"


HEAD = ("change", "by `auto`", "alone", "peak", "accuracy", "verdict", "in the winner")


def _table(rows: list[Row]) -> Iterator[str]:
    """A line for each word; what an entry declines for one reason is one line."""
    best = next((row for row in rows if row["entry"] == WINNER), {})
    yield line_of([*HEAD])
    yield line_of(["---"] * len(HEAD))
    for row in rows:
        if row["entry"] == WINNER:
            continue
        part = _interval(best.get("without", {}).get(row["entry"]))
        for word, found in row.get("measured", {}).items():
            auto = "yes" if word == row["auto"] else ""
            is_part = word in best.get("plan", "").split("+")
            yield line_of([f"`{word}`", auto, *_cells(row, found), part if is_part else ""])
        for text, names in _by_reason(row):
            yield line_of([names, "", "–", "", "", text, ""])
    if best:
        found = best.get("over_baseline", {})
        why = best.get("failed", "leave it as it is")
        cells = _cells(best, found) if found else ["–", "", "", why]
        yield line_of([f"**{best.get('plan', '')}**", "", *cells, "the winner"])


def _by_reason(row: Row) -> Iterator[tuple[str, str]]:
    if "failed" in row:
        yield f"failed: {row['failed']}", f"`{row['entry']}`"
    names: dict[str, list[str]] = {}
    for word, reason in row.get("declined", {}).items():
        names.setdefault(reason, []).append(f"`{word}`")
    for reason, some in names.items():
        yield reason, ", ".join(some)


def _cells(row: Row, found: Row) -> list[str]:
    """Speed-up with its interval, the peak over baseline's, accuracy, verdict."""
    peak, baseline = found.get("peak_bytes"), row.get("baseline_bytes")
    verdict, why = found["verdict"], found.get("why")
    if why:
        verdict = f"{verdict}: {why}" if verdict in ("failed", "declined") else why
    return [
        _interval(_speed(found)),
        share(peak / baseline) if peak and baseline else "",
        found.get("accuracy", ""),
        verdict,
    ]


def _interval(found: list[float | None] | None) -> str:
    if not found or found[0] is None:
        return "–"
    median, low, high = found
    if high is None:
        return f"{ratio(median)}, too few rounds"
    return f"{ratio(median)} [{low:.2f}, {high:.2f}]"


def _line(row: Row) -> str:
    """As it is found."""
    if "failed" in row:
        text = f"failed: {row['failed']}"
    elif row["entry"] == WINNER:
        text = f"{row['plan']} {_interval(_speed(row.get('over_baseline', {})))}"
    else:
        measured = [f"{word} {_interval(_speed(one))}" for word, one in row["measured"].items()]
        text = ", ".join(measured) or "declined"
    return f"{row['model']}, {row['entry']}: {text}"


def _speed(found: Row) -> list[float | None]:
    return [found.get(key) for key in ("speedup", "low", "high")]


if __name__ == "__main__":
    sys.exit(main())
