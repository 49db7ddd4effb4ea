"""Test whether advise() finds why loops are slow, predicts the gain, and is silent otherwise.

22 loops are each slow for one reason (`_slow_steps.py`). Slow and corrected loops run interleaved,
which shows the gain. The healthy loops are 16 of `_workloads.py` and four corrected ones. A claim
about a healthy loop is a false alarm unless trying the remedy shows the gain.
`--only healthy` takes the healthy loops alone. Exits 1 if fewer than 22/25 of the causes rank
first, if fewer than 80 % of the predicted ranges contain the measured gain (with a tolerance of
10 %), or if there is more than one false alarm.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import _slow_steps
from _program import Row, collected, parser_of
from _tables import exit_code, interval, table
from _timing import listed, ratio, timed
from _workloads import WORKLOADS, made

from speedkit_jupyter import advise
from speedkit_jupyter.extras.advise.advice import Opportunity
from speedkit_jupyter.extras.advise.advisor import Advised
from speedkit_jupyter.step.step import step_of

BUDGET_S, ROUNDS, LONGEST_S = 6.0, 24, 6.0
FIRST, HOLDS, ALARMS = 22 / 25, 0.8, 1
# Relative tolerance when a measured gain is compared with the expected range.
ROUGHLY = 0.1
# An opportunity claims a gain only if its expected range begins here or above.
CLAIM = 1.05
CAUSES = _slow_steps.CAUSES
HEALTHY = (
    *WORKLOADS, "rows_of_a_table", "validating", "numbers_from_numpy", "attention_from_a_paper",
)  # fmt: skip


def main() -> int:
    options = parser_of(__doc__, "advise.jsonl", budget=BUDGET_S).parse_args()
    loops = {"slow": CAUSES, "healthy": HEALTHY}
    keys = [{"kind": kind, "name": name} for kind, names in loops.items() for name in names]
    rows = collected(options, keys, partial(measured, budget_s=options.budget), _line)
    print(tables(rows))
    return exit_code(broken(rows)) if rows else 1


def measured(kind: str, name: str, budget_s: float) -> Row:
    if kind == "healthy":
        return healthy(made(name).run if name in WORKLOADS else pair(name)[1], budget_s)
    slow, quick = pair(name)
    advice = advise(slow, budget_s=budget_s)
    slow()
    rounds = max(5, min(ROUNDS, int(LONGEST_S / 2 / timed(slow)[0])))
    found = ratio(slow, quick, rounds)
    said = [_said(one) for one in advice.opportunities]
    rank = next((at for at, one in enumerate(said, 1) if one["rule"] in CAUSES[name]), None)
    return {"said": said, "rank": rank, "measured": listed(found), "skipped": advice.skipped}


def pair(name: str) -> _slow_steps.Pair:
    return getattr(_slow_steps, name)()


def healthy(step: Callable[[], object], budget_s: float) -> Row:
    """Return the advice about a healthy loop, and whether a trial shows each claimed gain."""
    advice = advise(step, budget_s=budget_s)
    said = []
    for number, one in enumerate(advice.opportunities, 1):
        entry = _said(one)
        if one.gain.low >= CLAIM:
            entry["holds"] = _holds(advice.opportunities, number, step, budget_s)
        said.append(entry)
    return {"said": said, "skipped": advice.skipped}


def _said(one: Opportunity) -> dict[str, Any]:
    return {"rule": one.rule, "title": one.title, "low": one.gain.low, "high": one.gain.high}


def _holds(found: list[Opportunity], number: int, step: Any, budget_s: float) -> bool:
    """Return whether a trial shows the claimed gain; False if the advice has no trial."""
    one = found[number - 1]
    if one.trial is None:
        return False
    tried = Advised(found, lambda: step_of(step)).benchmark(str(number), budget_s, "advise.py")
    for _ in tried.run():
        pass
    return (tried.result().rows()[1]["high"] or 0.0) >= one.gain.low


def holds(row: Row) -> bool:
    """Return whether the range expected for the true cause contains the measured gain."""
    if row["rank"] is None:
        return False
    said, measured = row["said"][row["rank"] - 1], row["measured"][0]
    return bool(said["low"] * (1 - ROUGHLY) <= measured <= said["high"] * (1 + ROUGHLY))


def counted(rows: list[Row]) -> tuple[list[Row], int, int, list[str]]:
    """Return the slow rows, the numbers of first ranks and of right ranges, and false alarms."""
    slow = [row for row in rows if row["kind"] == "slow"]
    said = ((row["name"], one) for row in rows for one in row["said"])
    alarms = [f"{name}: {one['rule']}" for name, one in said if one.get("holds") is False]
    return slow, sum(row["rank"] == 1 for row in slow), sum(map(holds, slow)), alarms


def broken(rows: list[Row]) -> list[str]:
    slow, first, held, alarms = counted(rows)
    few_first, few_held = first < FIRST * len(slow), held < HOLDS * len(slow)
    return [*["too few causes are ranked first"] * few_first,
            *["too few expected ranges hold"] * few_held,
            *["too many false alarms"] * (len(alarms) > ALARMS)]  # fmt: skip


def tables(rows: list[Row]) -> str:
    slow, first, held, alarms = counted(rows)
    head = ["loop", "its cause", "rank", "expected", "measured", "holds"]
    return "\n\n".join([
        table(slow, head, _cells),
        f"{first} of {len(slow)} causes ranked first; {held} of {len(slow)} ranges hold",
        f"{len(rows) - len(slow)} healthy loops, false alarms: {', '.join(alarms) or 'none'}",
    ])  # fmt: skip


def _cells(row: Row) -> list[str]:
    said = row["said"][row["rank"] - 1] if row["rank"] else None
    expected = f"{said['low']:.2f}× to {said['high']:.2f}×" if said else "–"
    name, causes = row["name"].replace("_", " "), " or ".join(CAUSES[row["name"]])
    measured, held = interval(row["measured"]), "yes" if holds(row) else "no"
    return [name, causes, str(row["rank"] or "–"), expected, measured, held]


def _line(row: Row) -> str:
    said = ", ".join(f"{one['rule']} {one['low']:.2f}–{one['high']:.2f}" for one in row["said"])
    cells = [row["name"]] if row["kind"] == "healthy" else _cells(row)
    return f"{' | '.join(cells)}: {said or 'nothing'} {row['skipped'] or ''}"


if __name__ == "__main__":
    sys.exit(main())
