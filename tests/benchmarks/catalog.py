"""Measure the gain of each catalog entry alone, and of the plan that tuning finds, on nine models.

For each model and entry, every setting that is available here runs interleaved with the plain model
and is checked. Then `tune()` runs with nothing learned before, and fresh rounds compare its plan
with the plain model and `compile`.
`--only "ViT, training sdpa"` takes one entry of one model, `--only winner` the tuned plans alone.
`--keep` names options that tuning leaves as they are: with `precision,tf32` nothing computes in
less than float32. `--budget` is the time for each setting in seconds, without compiling. Tuning has
its default budget, or eight times a shorter `--budget`. By default the program takes about two
hours on two cores. Exits 1 if the choice of `auto` is slower than 0.98 of the plain model, wrong or
fails. Two of the models need `pip install transformers`.
"""

import sys
from collections.abc import Iterator
from functools import partial

from _program import Row, collected, machine, parser_of, product
from _tables import exit_code, interval, markdown, table
from _timing import DEVICE, over
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
# The columns that a row keeps for each variant.
KEPT = ("verdict", "speedup", "low", "high", "accuracy", "peak_bytes", "first_call_s")
OVER = ("over_baseline", "over_compile")


def main() -> int:
    parser = parser_of(__doc__, "catalog.jsonl", budget=BUDGET_S, device=DEVICE, keep="")
    options = parser.parse_args()
    keep = [one for one in options.keep.split(",") if one]
    entries = (*(one.name for one in CATALOG), WINNER)
    keys = product(model=models_at_hand(), entry=entries, device=[options.device], keep=[keep])
    rows = collected(options, keys, partial(one_row, budget_s=options.budget), _line)
    print(tables(rows))
    return exit_code([one for row in rows for one in broken(row)]) if rows else 1


def one_row(model: str, entry: str, device: str, keep: list[str], budget_s: float) -> Row:
    """Return a model's row for an entry or for the tuned plan; an error is kept as `failed`."""
    work, row = made(model, device), {"machine": machine(device)}
    try:
        if entry == WINNER:
            return row | winner(work, keep, budget_s)
        return row | alone(work, next(one for one in CATALOG if one.name == entry), budget_s)
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}


def alone(work: Workload, entry: Optimization, budget_s: float) -> Row:
    hardware = Hardware.detect().with_gemm()
    facts = Facts.read(work.model, [work.optimizer] if work.optimizer else [])
    by_rule = plan(hardware=hardware, facts=facts)[entry.name]
    taken = Candidate({entry.name: by_rule.value}).name if by_rule.active else None
    declined: dict[str, str] = {}
    available: list[str] = []
    for word in words(entry, hardware, facts, [taken] if taken else []):
        decision = plan(variant(word).config, hardware, facts)[entry.name]
        if decision.active:
            available.append(word)
        elif decision.declined:
            declined[word] = decision.why
    measured = _kept(work.compared(available, budget_s)) if available else {}
    return {"auto": taken, "declined": declined, "measured": measured}


def words(entry: Optimization, hardware: Hardware, facts: Facts, taken: list[str]) -> list[str]:
    """Return a variant's name for each setting: changes, candidates of searches, and `taken`."""
    tried = [Candidate({entry.name: one}).name for one in entry.candidates(hardware, facts)]
    found: dict[str, str] = {}
    for word in (*entry.changes(), *tried, *taken):
        found.setdefault(repr(getattr(variant(word).config, entry.name)), word)
    return list(found.values())


def winner(work: Workload, keep: list[str], budget_s: float) -> Row:
    shorter_s = None if budget_s >= BUDGET_S else TUNING * budget_s
    tuning = work.tuned(budget_s=shorter_s, fresh=True, keep=keep)
    name = tuning.winner.name
    found = work.compared([name, "compile"], budget_s)
    times = {one.name: found.times_s(one) for one in found.records}
    gains = (over(times[one], times[name]) for one in ("baseline", "compile"))
    return {"plan": name, "tuned_s": tuning.seconds, **dict(zip(OVER, gains, strict=True))}


def _kept(found: Comparison) -> dict[str, Row]:
    kept = {}
    for row, record in zip(found.rows()[1:], found.records[1:], strict=True):
        kept[record.name] = {key: row[key] for key in KEPT if row[key] is not None}
        if not found.times_s(record):
            why = record.failure or record.why_not_measured or "no time was left for it"
            kept[record.name]["why"] = why
    return kept


def broken(row: Row) -> list[str]:
    """Return a row's broken promises: `auto`'s choice must not be slower, wrong or failing."""
    found = row.get("measured", {}).get(row.get("auto"))
    if found is None:  # auto takes nothing
        return []
    is_slow = found["verdict"] == "slower" and found["speedup"] < AT_LEAST
    name = f"{row['model']}: auto takes {row['auto']}, which is {found['verdict']}"
    return [name] * (is_slow or found["verdict"] in ("wrong", "failed"))


def tables(rows: list[Row]) -> str:
    """Return Markdown tables of the tuned plans, and of each setting's speed-ups by model."""
    if not rows:
        return "nothing measured yet"
    best = [row for row in rows if "plan" in row]
    timed = ([row[key][0] for row in best if row[key]] for key in OVER)
    means = (f"{gmean(ratios):.2f}×" if ratios else "–" for ratios in timed)
    head = ["model", "plan", "over the plain model", "over torch.compile", "search"]
    last = ["**mean**", "", *means, ""]
    overview = markdown(*_overview(rows))
    return f"{table(best, head, _cells)}\n{markdown(last).splitlines()[0]}\n\n{overview}"


def _overview(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the head, then a row of speed-ups by model for each setting that any model has."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    words = ((row["model"], *one) for row in rows for one in row.get("measured", {}).items())
    found = {(model, word): one for model, word, one in words}
    yield ["change", *models]
    for word in dict.fromkeys(word for _, word in found):
        yield [f"`{word}`", *(_speed_up(found.get((model, word))) for model in models)]


def _speed_up(found: Row | None) -> str:
    """Return `**1.44×**` if proven faster, `0.73×` if slower, `(1.01×)` if unclear, or a word."""
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
    found = [f"{word} {_speed_up(one)}" for word, one in row.get("measured", {}).items()]
    text = ", ".join(found) or row.get("failed") or row.get("plan") or "declined"
    return f"{row['model']}, {row['entry']}: {text}"


if __name__ == "__main__":
    sys.exit(main())
