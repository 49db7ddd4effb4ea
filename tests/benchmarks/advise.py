"""Does advice find why a loop is slow, does the expected gain hold, and is it silent otherwise?

Planted: 28 loops as people write them, each slow for one reason, beside the same loop without it
(`_slow_steps.py`). Each is advised about; the gain is measured by hand, in turn. Other: five more,
by somebody who had not seen the rules (`_other_steps.py`). Healthy: 20 models in well-kept loops,
about which nothing should be said that does not hold when it is tried.

    python tests/benchmarks/advise.py [--only WORDS] [--budget S] [--file advise.jsonl] [--table]

`--only healthy` takes those alone. Exits 1 where fewer than 22 of 25 causes are ranked first, fewer
than 80 % of the expected ranges hold the measured gain (a tenth of the measured gain beside them
counts as within), or more than one false alarm is raised about all healthy models.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import _other_steps
import _slow_steps
from _healthy_steps import HEALTHY
from _program import Row, collected, exit_code, interval, markdown, parser_of, ratio

from speedkit_jupyter import advise
from speedkit_jupyter.extras.advise.advice import Opportunity
from speedkit_jupyter.extras.advise.advisor import Advised
from speedkit_jupyter.rounds.from_function import step_of

BUDGET_S, ROUNDS, LONGEST_S = 6.0, 24, 6.0
FIRST, HOLDS, ALARMS = 22 / 25, 0.8, 1
SLOW = {"planted": _slow_steps, "other": _other_steps}
# How exactly a gain is known by hand.
ROUGHLY = 0.1
# What is expected to gain less than this at the least claims nothing.
CLAIM = 1.05


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "advise.jsonl")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for each advice")
    options = parser.parse_args()
    loops = {kind: [*module.CAUSES] for kind, module in SLOW.items()} | {"healthy": [*HEALTHY]}
    keys = [{"kind": kind, "name": name} for kind, names in loops.items() for name in names]
    rows = collected(options, keys, partial(measured, budget_s=options.budget), _line)
    print(tables(rows))
    return exit_code(broken(rows)) if rows else 1


def measured(kind: str, name: str, budget_s: float) -> Row:
    """Return what is said of a loop, and whether it holds."""
    if kind == "healthy":
        return healthy(name, budget_s)
    slow, quick = getattr(SLOW[kind], name)()
    advice = advise(slow, budget_s=budget_s)
    slow()
    begun_s = time.perf_counter()
    slow()
    rounds = max(5, min(ROUNDS, int(LONGEST_S / 2 / (time.perf_counter() - begun_s))))
    found = ratio(slow, quick, rounds)
    said = [_said(one) for one in advice.opportunities]
    causes = SLOW[kind].CAUSES[name]
    rank = next((at for at, one in enumerate(said, 1) if one["rule"] in causes), None)
    return {
        "said": said,
        "rank": rank,
        "measured": [found.median, found.low, found.high],
        "skipped": advice.skipped,
    }


def healthy(name: str, budget_s: float) -> Row:
    """Return what is said of it, and of each claim what trying it shows."""
    step = HEALTHY[name]()
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
    """Return whether trying it shows what was claimed; what can't be tried is a false alarm."""
    one = found[number - 1]
    if not (one.variant or one.trial):
        return False
    tried = Advised(found, lambda: step_of(step)).benchmark(number, budget_s, "advise.py")
    for _ in tried.run():
        pass
    row = tried.result().rows()[1]
    return (row["high"] or 0.0) >= one.gain.low


def holds(row: Row) -> bool:
    """Return whether the expected range of the planted cause has what was measured."""
    if row["rank"] is None:
        return False
    said, measured = row["said"][row["rank"] - 1], row["measured"][0]
    return bool(said["low"] * (1 - ROUGHLY) <= measured <= said["high"] * (1 + ROUGHLY))


def alarms(row: Row) -> list[str]:
    """Return claims about a healthy model that trying does not show."""
    return [one["rule"] for one in row["said"] if one.get("holds") is False]


def broken(rows: list[Row]) -> list[str]:
    """Return the promises that do not hold."""
    found = []
    for kind in SLOW:
        slow = [row for row in rows if row["kind"] == kind]
        if sum(row["rank"] == 1 for row in slow) < FIRST * len(slow):
            found.append(f"too few causes are ranked first ({kind})")
        if sum(holds(row) for row in slow) < HOLDS * len(slow):
            found.append(f"too few expected ranges hold ({kind})")
    if sum(len(alarms(row)) for row in rows if row["kind"] == "healthy") > ALARMS:
        found.append("too many false alarms")
    return found


def tables(rows: list[Row]) -> str:
    """Return Markdown."""
    parts = [rows[0]["machine"] if rows else "nothing was measured"]
    for kind in SLOW:
        slow = [row for row in rows if row["kind"] == kind]
        if slow:
            head = [f"loop ({kind})", "its cause", "rank", "expected", "measured", "holds"]
            first, kept = sum(row["rank"] == 1 for row in slow), sum(map(holds, slow))
            parts += [
                markdown(head, *map(_cells, slow)),
                f"{first} of {len(slow)} causes ranked first; {kept} of {len(slow)} expected "
                "ranges hold what was measured",
            ]
    well = [row for row in rows if row["kind"] == "healthy"]
    false = {row["name"]: alarms(row) for row in well if alarms(row)}
    if well:
        parts.append(f"{len(well)} healthy models, false alarms: {false or 'none'}")
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    said = row["said"][row["rank"] - 1] if row["rank"] else None
    return [
        row["name"].replace("_", " "),
        " or ".join(SLOW[row["kind"]].CAUSES[row["name"]]),
        str(row["rank"] or "–"),
        f"{said['low']:.2f}× to {said['high']:.2f}×" if said else "–",
        interval(row["measured"]),
        "yes" if holds(row) else "no",
    ]


def _line(row: Row) -> str:
    said = ", ".join(f"{one['rule']} {one['low']:.2f}–{one['high']:.2f}" for one in row["said"])
    cells = [row["name"], str(alarms(row))] if row["kind"] == "healthy" else _cells(row)
    return f"{' | '.join(cells)}: {said or 'nothing'} {row['skipped'] or ''}"


if __name__ == "__main__":
    sys.exit(main())
