"""What tuning gains in full float32: over the plain model, and over `torch.compile(model)`.

For each of the catalog's nine models: `tune(keep=("precision", "tf32"))` with its defaults, nothing
learned before; then baseline, the plan and `torch.compile` in fresh, interleaved rounds.

    python tests/benchmarks/full_float32.py [--only MODEL] [--file full_float32.jsonl] [--table]

All of it takes about half an hour on two cores; a stopped run goes on. Exits 1 where oneDNN's
float32 products are at least GAIN times as fast as torch's own and the mean over all models is
below AT_LEAST, over the one or the other; without that there is no such promise. Needs
`pip install transformers` for two of the models; without it they are left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from _program import Row, collected, exit_code, interval, markdown, over, parser_of
from _workloads import made, models_at_hand
from scipy.stats import gmean

from speedkit_jupyter import Hardware

AT_LEAST, GAIN = 1.4, 1.5
# For each variant of the fresh rounds.
BUDGET_S = 20.0
OVER = ("over_baseline", "over_compile")


def main() -> int:
    """Run the program."""
    options = parser_of(__doc__, "full_float32.jsonl").parse_args()
    keys = [{"model": model} for model in models_at_hand()]
    rows = collected(options, keys, measured, lambda row: " | ".join(_cells(row)))
    print(table(rows))
    return exit_code(broken(rows))


def measured(model: str) -> Row:
    """Return one model's plan, in rounds that took no part in finding it."""
    work = made(model)
    begun_s = time.perf_counter()
    found = work.tuned(fresh=True, keep=("precision", "tf32"))
    tuned_s, plan = time.perf_counter() - begun_s, found.winner.name
    comparison = work.compared([plan, "compile"], BUDGET_S)
    times = {record.name: comparison.times_s(record) for record in comparison.records}
    return {
        "gemm": Hardware.detect().with_gemm().cpu.gemm.gain,
        "plan": plan,
        "tuned_s": tuned_s,
        "over_baseline": over(times["baseline"], times[plan]),
        "over_compile": over(times["compile"], times[plan]),
        "verdicts": {record.name: comparison.verdict(record) for record in comparison.records},
    }


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Return geometric means of what was timed."""
    timed = {key: [row[key][0] for row in rows if row[key]] for key in OVER}
    return {key: float(gmean(ratios)) for key, ratios in timed.items() if ratios}


def broken(rows: Sequence[Row]) -> list[str]:
    """Return the promises that do not hold; there is none where torch's products are as fast."""
    if not rows or rows[0]["gemm"] < GAIN:
        return []
    return [
        f"{key.replace('_', ' ')}: {mean:.2f} times as fast in the mean, promised {AT_LEAST}"
        for key, mean in means(rows).items()
        if mean < AT_LEAST
    ]


def table(rows: Sequence[Row]) -> str:
    """Return Markdown."""
    if not rows:
        return "nothing measured yet"
    head = ["model", "plan", "over baseline", "over torch.compile", "search"]
    mean = means(rows)
    last = ["**mean**", "", *(f"{mean.get(key, 0):.2f}×" for key in OVER), ""]
    gain = f"oneDNN's float32 products: {rows[0]['gemm']:.2f} times as fast as torch's own"
    return f"{rows[0]['machine']}\n\n{markdown(head, *map(_cells, rows), last)}\n\n{gain}"


def _cells(row: Row) -> list[str]:
    plan = "leave it as it is" if row["plan"] == "baseline" else f"`{row['plan']}`"
    found = (interval(row[key], "not timed") for key in OVER)
    return [row["model"], plan, *found, f"{row['tuned_s']:.0f} s"]


if __name__ == "__main__":
    sys.exit(main())
