"""The gain of each entry of the catalog alone, and of the plan that tuning finds, on nine models.

For each model, entry by entry: every word of the entry that is available here, interleaved with the
plain model and checked. Then `tune()` with nothing learned before, and in fresh rounds its plan
next to the plain model and `compile`.

    python tests/benchmarks/catalog.py [--only WORDS] [--keep precision,tf32] [--budget S]
                                       [--device cuda] [--file catalog.jsonl] [--table]

`--only "ViT, training sdpa"` takes one entry of one model, `--only winner` the tuned plans alone.
`--keep` names options that tuning leaves as they are: with `precision,tf32` nothing computes in
less than float32. `--budget` are seconds for each word, without compiling; tuning has its default,
or eight times a shorter budget. With the default all of it takes about two hours on two cores; a
stopped run goes on. Exits 1 where the choice of `auto` makes a model slower than 0.98 of the plain
model, or wrong. Needs `pip install transformers` for two of the models; without it they are left
out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from _program import Row, collected, exit_code, interval, machine, markdown, over, parser_of
from _workloads import Workload, made, models_at_hand
from scipy.stats import gmean

from speedkit_jupyter import Facts, Hardware, plan
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.step.variants import variant
from speedkit_jupyter.support.units import ratio

BUDGET_S, TUNING = 10.0, 8
WINNER = "winner"
AT_LEAST = 0.98
# The columns that a row keeps of each variant.
KEPT = ("verdict", "speedup", "low", "high", "accuracy", "peak_bytes", "first_call_s")
OVER = ("over_baseline", "over_compile")


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "catalog.jsonl")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for each word")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", default="", help="options that tuning leaves as they are")
    options = parser.parse_args()
    keep = [one for one in options.keep.split(",") if one]
    keys = [
        {"model": model, "entry": entry, "device": options.device, "keep": keep}
        for model in models_at_hand()
        for entry in (*(one.name for one in CATALOG), WINNER)
    ]
    rows = collected(options, keys, partial(one_row, budget_s=options.budget), _line)
    print(tables(rows))
    return exit_code([one for row in rows for one in broken(row)]) if rows else 1


def one_row(model: str, entry: str, device: str, keep: list[str], budget_s: float) -> Row:
    """Return an entry on a model, or its winner; a failure is a row with the error."""
    work, row = made(model, device), {"machine": machine(device)}
    try:
        if entry == WINNER:
            return row | winner(work, keep, budget_s)
        return row | alone(work, next(one for one in CATALOG if one.name == entry), budget_s)
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}


def alone(work: Workload, entry: Optimization, budget_s: float) -> Row:
    """Return each word of an entry compared with the plain model."""
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
    measured = _kept(work.compared(available, budget_s)) if available else {}
    return {"auto": taken, "declined": declined, "measured": measured}


def words(
    entry: Optimization, hardware: Hardware, facts: Facts, taken: str | None
) -> Iterator[str]:
    """Yield words of changes, of a search's candidates, and of the choice of `auto`, each once."""
    tried = [Candidate({entry.name: one}).name for one in entry.candidates(hardware, facts)]
    seen: list[Any] = []
    for word in dict.fromkeys([*entry.changes(), *tried, *([taken] if taken else [])]):
        value = getattr(variant(word).config, entry.name)
        if value not in seen:
            seen.append(value)
            yield word


def winner(work: Workload, keep: list[str], budget_s: float) -> Row:
    """Return the tuned plan, over the plain model and over `compile`, in fresh rounds."""
    shorter_s = None if budget_s >= BUDGET_S else TUNING * budget_s
    tuning = work.tuned(budget_s=shorter_s, fresh=True, keep=keep)
    name = tuning.winner.name
    found = work.compared([name, "compile"], budget_s)
    times = {one.name: found.times_s(one) for one in found.records}
    gains = (over(times[one], times[name]) for one in ("baseline", "compile"))
    return {"plan": name, "tuned_s": tuning.seconds, **dict(zip(OVER, gains, strict=True))}


def _kept(found: Comparison) -> dict[str, Row]:
    """Return the kept columns of each variant, by its name."""
    kept = {}
    for row, record in zip(found.rows()[1:], found.records[1:], strict=True):
        kept[record.name] = {key: row[key] for key in KEPT if row[key] is not None}
        if not found.times_s(record):
            why = record.failure or record.why_not_measured or "no time was left for it"
            kept[record.name]["why"] = why
    return kept


def broken(row: Row) -> list[str]:
    """Return the promises that this row breaks: the choice of `auto` is no loss, nor wrong."""
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
    """Return Markdown: the speed-ups of every word by model, and the tuned plans."""
    if not rows:
        return "nothing measured yet"
    best = [row for row in rows if "plan" in row]
    timed = ([row[key][0] for row in best if row[key]] for key in OVER)
    means = (f"{gmean(ratios):.2f}×" if ratios else "–" for ratios in timed)
    head = ["model", "plan", "over the plain model", "over torch.compile", "search"]
    last = ["**mean**", "", *means, ""]
    parts = [f"{rows[0]['machine']}, {rows[0]['state']}", markdown(*_overview(rows))]
    return "\n\n".join([*parts, markdown(head, *map(_cells, best), last)])


def _overview(rows: list[Row]) -> Iterator[list[str]]:
    """Yield speed-ups of every word that is available anywhere, by model; bold: proven."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    found = {
        (row["model"], word): one for row in rows for word, one in row.get("measured", {}).items()
    }
    yield ["change", *models]
    for word in dict.fromkeys(word for _, word in found):
        yield [f"`{word}`", *(_speed_up(found.get((model, word))) for model in models)]


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


def _cells(row: Row) -> list[str]:
    plan = "leave it as it is" if row["plan"] == "baseline" else f"`{row['plan']}`"
    found = (interval(row[key], "not timed") for key in OVER)
    return [row["model"], plan, *found, f"{row['tuned_s']:.0f} s"]


def _line(row: Row) -> str:
    if "failed" in row:
        text = f"failed: {row['failed']}"
    elif row["entry"] == WINNER:
        text = f"{row['plan']} {interval(row[OVER[0]])}"
    else:
        text = ", ".join(f"{word} {_speed_up(one)}" for word, one in row["measured"].items())
    return f"{row['model']}, {row['entry']}: {text or 'declined'}"


if __name__ == "__main__":
    sys.exit(main())
