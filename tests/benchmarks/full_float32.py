"""What tuning gains in full float32: over the plain model, and over `torch.compile(model)`.

For each of the catalog's nine models: `tune(keep=("precision", "tf32"))` with its defaults, nothing
learned before; then baseline, the plan and `torch.compile` in fresh, interleaved rounds.

    python tests/benchmarks/full_float32.py [--only MODEL] [--file full_float32.jsonl] [--table]

All of it takes about half an hour on two cores. Each model is appended to the file with the state
of the code (the commit), so that a run can be stopped and goes on where it was. Exits 1 where
oneDNN's float32 products are at least GAIN times as fast as torch's own and the mean over all
models is below AT_LEAST, over the one or the other; without that there is no such promise. Needs
`pip install transformers` for two of the models; without it they are left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from _catalog_models import MODELS, made
from _kept import Row, append, line_of, nothing_kept, read, state_of_code
from _ratios import machine
from catalog import models_at_hand
from scipy.stats import gmean

from speedkit_jupyter import Hardware, benchmark, tune
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.statistics import paired_ratio

AT_LEAST, GAIN = 1.4, 1.5
# For each variant of the fresh rounds.
BUDGET_S = 15.0
COMPILE = "compile"
OVER = ("over_baseline", "over_compile")


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--file", type=Path, default=Path("full_float32.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    options = parser.parse_args()
    state = state_of_code()
    done = {row["model"] for row in read(options.file) if row["state"] == state}
    for model in models_at_hand(options.only) if not options.table else ():
        if model not in done:
            with nothing_kept():
                row = {"state": state, "machine": machine(), **measured(model)}
            append(options.file, row)
            print(_cells(row), flush=True)
    rows = newest(read(options.file))
    print(table(rows))
    return 1 if broken(rows) else 0


def measured(model: str) -> Row:
    """One model; the plan that was found, in rounds that took no part in finding it."""
    work = made(model, "cpu")
    optimizer = work.optimizer or ()
    begun_s = time.perf_counter()

    def step() -> object:
        return work.step(work.model, work.optimizer)

    found = tune(
        step, model=work.model, optimizer=optimizer, fresh=True, keep=("precision", "tf32")
    )
    tuned_s, plan = time.perf_counter() - begun_s, found.winner.name
    names = dict.fromkeys(["baseline", plan, COMPILE])
    comparison = benchmark(
        step, ",".join(names), model=work.model, optimizer=optimizer,
        budget_s=BUDGET_S * len(names),
    )  # fmt: skip
    return {
        "model": model,
        "gemm": Hardware.detect().with_gemm().cpu.gemm.gain,
        "plan": plan,
        "tuned_s": tuned_s,
        "over_baseline": over(comparison, "baseline", plan),
        "over_compile": over(comparison, COMPILE, plan),
        "verdicts": {record.name: comparison.verdict(record) for record in comparison.records},
    }


def over(comparison: Comparison, first: str, second: str) -> list[float] | None:
    """How many times as fast the second is as the first; None where one was not timed."""
    times = {record.name: comparison.times_s(record) for record in comparison.records}
    pairs = min(len(times[first]), len(times[second]))
    if not pairs:
        return None
    ratio = paired_ratio(times[first][:pairs], times[second][:pairs])
    return [ratio.median, ratio.low, ratio.high]


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each model in the newest state of the code."""
    last = {row["model"]: row for row in rows if row["state"] == rows[-1]["state"]}
    return sorted(last.values(), key=lambda row: [*MODELS].index(row["model"]))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric, of what was timed."""
    timed = {key: [row[key][0] for row in rows if row[key]] for key in OVER}
    return {key: float(gmean(ratios)) for key, ratios in timed.items() if ratios}


def broken(rows: Sequence[Row]) -> list[str]:
    """The promises that do not hold; none is made where torch's own products are as fast."""
    if not rows or rows[0]["gemm"] < GAIN:
        return []
    return [
        f"{key.replace('_', ' ')}: {mean:.2f} times as fast in the mean, promised {AT_LEAST}"
        for key, mean in means(rows).items()
        if mean < AT_LEAST
    ]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    if not rows:
        return "nothing measured yet"
    head = ["model", "plan", "over baseline", "over torch.compile", "search"]
    lines = [rows[0]["machine"], "", line_of(head), line_of(["---"] * len(head))]
    lines += [_cells(row) for row in rows]
    mean = means(rows)
    lines.append(line_of(["**mean**", "", *(f"{mean.get(key, 0):.2f}×" for key in OVER), ""]))
    gain = rows[0]["gemm"]
    lines += ["", f"oneDNN's float32 products: {gain:.2f} times as fast as torch's own"]
    return "\n".join([*lines, *broken(rows)])


def _cells(row: Row) -> str:
    plan = "leave it as it is" if row["plan"] == "baseline" else f"`{row['plan']}`"
    return line_of(
        [row["model"], plan, *(_interval(row[key]) for key in OVER), f"{row['tuned_s']:.0f} s"]
    )


def _interval(ratio: list[float] | None) -> str:
    return "not timed" if ratio is None else f"{ratio[0]:.2f}× [{ratio[1]:.2f}, {ratio[2]:.2f}]"


if __name__ == "__main__":
    sys.exit(main())
