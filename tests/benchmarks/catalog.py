"""What each entry of the catalog is worth: alone, and as a part of the plan that tuning finds.

For each of nine models, entry by entry: every word of it that is available here, interleaved with
baseline, each checked (those that are declined with their reason); then `tune()`, and in fresh
rounds its plan beside the same without each of its parts.

    python tests/benchmarks/catalog.py [--only WORDS] [--budget S] [--device cuda]
                                       [--file catalog.jsonl] [--table]

`--only "ViT, training sdpa"` takes one entry of one model. `--budget` are seconds for each word,
without compiling, and for each part of the winner; tuning has its default, or eight times a shorter
one. With the default all of it takes about two hours on two cores; a stopped run goes on. An entry
that joins CATALOG is there by itself. Exits 1 where what `auto` takes makes a model slower than
0.98 of baseline, or wrong. Needs `pip install transformers` for two of the models; without it they
are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from _program import Row, collected, exit_code, interval, machine, markdown, over, parser_of
from _workloads import Workload, made, models_at_hand

from speedkit_jupyter import Facts, Hardware, plan
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.step.variants import variant
from speedkit_jupyter.support.units import ratio, share

BUDGET_S, TUNING = 10.0, 8
WINNER = "winner"
AT_LEAST = 0.98
# What is kept of each variant's row.
KEPT = ("verdict", "speedup", "low", "high", "accuracy", "peak_bytes", "first_call_s")
HEAD = ("change", "by `auto`", "alone", "peak", "accuracy", "verdict", "in the winner")


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "catalog.jsonl")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for each word")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    keys = [
        {"model": model, "entry": entry, "device": options.device}
        for model in models_at_hand()
        for entry in (*(one.name for one in CATALOG), WINNER)
    ]
    rows = collected(options, keys, partial(one_row, budget_s=options.budget), _line)
    print(tables(rows))
    return exit_code([one for row in rows for one in broken(row)]) if rows else 1


def one_row(model: str, entry: str, device: str, budget_s: float) -> Row:
    """Return an entry on a model, or its winner; what fails is a row that says so."""
    work, row = made(model, device), {"machine": machine(device)}
    try:
        if entry == WINNER:
            return row | winner(work, budget_s)
        return row | alone(work, next(one for one in CATALOG if one.name == entry), budget_s)
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}


def alone(work: Workload, entry: Optimization, budget_s: float) -> Row:
    """Return each word of an entry against baseline."""
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
        baseline, *others = _kept(work.compared(available, budget_s))
        row["baseline_bytes"] = baseline.get("peak_bytes")
        row["measured"] = dict(zip(available, others, strict=True))
    return row


def words(
    entry: Optimization, hardware: Hardware, facts: Facts, taken: str | None
) -> Iterator[str]:
    """Yield words of changes, of what a search would try, and of what `auto` takes, each once."""
    tried = [Candidate({entry.name: one}).name for one in entry.candidates(hardware, facts)]
    seen: list[Any] = []
    for word in dict.fromkeys([*entry.changes(), *tried, *([taken] if taken else [])]):
        value = getattr(variant(word).config, entry.name)
        if value not in seen:
            seen.append(value)
            yield word


def winner(work: Workload, budget_s: float) -> Row:
    """Return what tuning finds, over baseline and over itself without each of its parts."""
    shorter_s = None if budget_s >= BUDGET_S else TUNING * budget_s
    tuning = work.tuned(budget_s=shorter_s, fresh=True)
    whole = tuning.winner
    row = {"plan": whole.name, "tuned_s": tuning.seconds, "without": {}}
    if not whole.values:
        return row
    rests = {name: whole.without(name).name for name in whole.values}
    names = [whole.name, *(name for name in dict.fromkeys(rests.values()) if name != "baseline")]
    found = work.compared(names, budget_s)
    times = {one.name: found.times_s(one) for one in found.records}
    baseline, row["over_baseline"], *_ = _kept(found)
    row["baseline_bytes"] = baseline.get("peak_bytes")
    row["without"] = {name: over(times[rest], times[whole.name]) for name, rest in rests.items()}
    return row


def _kept(found: Comparison) -> list[Row]:
    """Return what is kept of each variant."""
    rows = [{key: row[key] for key in KEPT if row[key] is not None} for row in found.rows()]
    for row, record in zip(rows, found.records, strict=True):
        if not found.times_s(record):
            row["why"] = record.failure or record.why_not_measured or "no time was left for it"
    return rows


def broken(row: Row) -> list[str]:
    """Return the promises that this row breaks: what `auto` takes is no loss, nor wrong."""
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
    """Return Markdown: an overview, and a table for each model."""
    if not rows:
        return "nothing measured yet"
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts = [f"{rows[0]['machine']}, {rows[0]['state']}", markdown(*_overview(rows, models))]
    for model in models:
        lines = _table([row for row in rows if row["model"] == model])
        parts += [f"### {model}", markdown(HEAD, *lines)]
    return "\n\n".join(parts)


def _overview(rows: list[Row], models: list[str]) -> Iterator[list[str]]:
    """Yield speed-ups of every word that is available anywhere, by model; bold: proven."""
    found = {
        (row["model"], word): one for row in rows for word, one in row.get("measured", {}).items()
    }
    best = {row["model"]: row for row in rows if row["entry"] == WINNER}
    yield ["change", *models]
    for word in dict.fromkeys(word for _, word in found):
        yield [f"`{word}`", *(_speed_up(found.get((model, word))) for model in models)]
    plans = (best.get(model, {}).get("plan") for model in models)
    yield ["the winner", *(f"`{one}`" if one else "" for one in plans)]
    yield ["", *(_speed_up(best.get(model, {}).get("over_baseline")) for model in models)]


def _speed_up(found: Row | None) -> str:
    """Return `**1.44×**` where it is proven faster, `0.73×` where slower, else `(1.01×)`."""
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


def _table(rows: list[Row]) -> Iterator[list[str]]:
    """Yield a line for each word; what an entry declines for one reason is one line."""
    best = next((row for row in rows if row["entry"] == WINNER), {})
    for row in rows:
        if row["entry"] == WINNER:
            continue
        part = interval(best.get("without", {}).get(row["entry"]))
        for word, found in row.get("measured", {}).items():
            auto = "yes" if word == row["auto"] else ""
            is_part = word in best.get("plan", "").split("+")
            yield [f"`{word}`", auto, *_cells(row, found), part if is_part else ""]
        if "failed" in row:
            yield [f"`{row['entry']}`", "", "–", "", "", f"failed: {row['failed']}", ""]
        declined = row.get("declined", {})
        for reason in dict.fromkeys(declined.values()):
            names = ", ".join(f"`{word}`" for word, why in declined.items() if why == reason)
            yield [names, "", "–", "", "", reason, ""]
    if best:
        found = best.get("over_baseline", {})
        why = best.get("failed", "leave it as it is")
        cells = _cells(best, found) if found else ["–", "", "", why]
        yield [f"**{best.get('plan', '')}**", "", *cells, "the winner"]


def _cells(row: Row, found: Row) -> list[str]:
    """Return speed-up with its interval, the peak over baseline's, accuracy, verdict."""
    peak, baseline = found.get("peak_bytes"), row.get("baseline_bytes")
    verdict, why = found["verdict"], found.get("why")
    if why:
        verdict = f"{verdict}: {why}" if verdict in ("failed", "declined") else why
    peak_share = share(peak / baseline) if peak and baseline else ""
    return [_speed(found), peak_share, found.get("accuracy", ""), verdict]


def _line(row: Row) -> str:
    if "failed" in row:
        text = f"failed: {row['failed']}"
    elif row["entry"] == WINNER:
        text = f"{row['plan']} {_speed(row.get('over_baseline', {}))}"
    else:
        text = ", ".join(f"{word} {_speed(one)}" for word, one in row["measured"].items())
    return f"{row['model']}, {row['entry']}: {text or 'declined'}"


def _speed(found: Row) -> str:
    return interval([found.get(key) for key in ("speedup", "low", "high")])


if __name__ == "__main__":
    sys.exit(main())
