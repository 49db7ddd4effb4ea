"""Does advice find why a loop is slow, does the expected gain hold, and is it silent otherwise?

Planted: 28 loops as people write them, each slow for one reason, beside the same loop without it
(`_slow_steps.py`; the reasons stand apart, in `_slow_causes.py`). Each is advised about; the gain
is measured by hand, in turn. Other: five more, by somebody who had not seen the rules. Healthy: 20
models in well-kept loops, about which nothing should be said that does not hold when it is tried.

    python tests/benchmarks/advise.py [--only NAME] [--budget S] [--kind KIND] [--table]
                                      [--file advise.jsonl]

Exits 1 where fewer than 22 of 25 causes are ranked first, fewer than 80 % of the expected ranges
hold the measured gain (a tenth of the measured gain beside them counts as within), or more than one
false alarm is raised about all healthy models.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import _other_steps
import _slow_steps
import torch
from _healthy_steps import HEALTHY
from _kept import Row, append, line_of, nothing_kept, read, state_of_code
from _ratios import machine, ratio
from _slow_causes import CAUSES, OTHER_CAUSES

from speedkit_jupyter import advise
from speedkit_jupyter.advice.advice import Opportunity
from speedkit_jupyter.advice.advisor import Advised
from speedkit_jupyter.measure.subject.from_function import step_of

BUDGET_S, ROUNDS, LONGEST_S = 6.0, 24, 6.0
FIRST, HOLDS, ALARMS = 22 / 25, 0.8, 1
SLOW = {"planted": (_slow_steps, CAUSES), "other": (_other_steps, OTHER_CAUSES)}
ALL = [(kind, name) for kind, (_, causes) in SLOW.items() for name in causes]
ALL += [("healthy", name) for name in HEALTHY]
# How exactly a gain is known by hand.
ROUGHLY = 0.1
# What is expected to gain less than this at the least claims nothing.
CLAIM = 1.05


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="loops whose name holds this")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for each advice")
    parser.add_argument("--kind", choices=[*SLOW, "healthy"], help="only these")
    parser.add_argument("--file", type=Path, default=Path("advise.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    options = parser.parse_args()
    state = state_of_code()
    if not options.table:
        with nothing_kept():
            _measure(options, state)
    rows = _newest(read(options.file))
    print(tables(rows))
    return 0 if rows and not broken(rows) else 1


def _measure(options: argparse.Namespace, state: str) -> None:
    done = {
        (row["kind"], row["name"]) for row in _newest(read(options.file)) if row["state"] == state
    }
    for kind, name in ALL:
        if (
            options.kind not in (None, kind)
            or options.only not in name
            or (not state.endswith("+") and (kind, name) in done)
        ):
            continue
        begun = time.perf_counter()
        torch.manual_seed(0)
        row = healthy(name, options.budget) if kind == "healthy" else slow_one(kind, name, options)
        row |= {"kind": kind, "name": name, "state": state, "machine": machine()}
        append(options.file, row)
        print(f"{time.perf_counter() - begun:4.0f} s  {_line(row)}", flush=True)


def slow_one(kind: str, name: str, options: argparse.Namespace) -> Row:
    """What is said of the slow loop, and what the quick one gains."""
    loops, causes = SLOW[kind]
    slow, quick = getattr(loops, name)()
    advice = advise(slow, budget_s=options.budget)
    for call in (slow, quick):
        call()
    begun = time.perf_counter()
    slow()
    rounds = max(5, min(ROUNDS, int(LONGEST_S / 2 / (time.perf_counter() - begun))))
    found = ratio(slow, quick, rounds)
    # That the machine is busy is no cause in the loop.
    said = [_said(one) for one in advice.opportunities if one.rule != "busy_machine"]
    return {
        "said": said,
        "rank": next((at for at, one in enumerate(said, 1) if one["rule"] in causes[name]), None),
        "measured": [found.median, found.low, found.high],
        "skipped": advice.skipped,
    }


def healthy(name: str, budget_s: float) -> Row:
    """What is said of it, and of each claim what trying it shows."""
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
    """Whether trying it shows what was claimed; what can't be tried is a false alarm."""
    one = found[number - 1]
    if not (one.variant or one.trial):
        return False
    tried = Advised(found, lambda: step_of(step)).benchmark(number, budget_s, "advise.py")
    for _ in tried.run():
        pass
    row = tried.result().rows()[1]
    return (row["high"] or 0.0) >= one.gain.low


# What it comes to.


def holds(row: Row) -> bool:
    """Whether the expected range of the planted cause has what was measured."""
    if row["rank"] is None:
        return False
    said, measured = row["said"][row["rank"] - 1], row["measured"][0]
    return bool(said["low"] * (1 - ROUGHLY) <= measured <= said["high"] * (1 + ROUGHLY))


def alarms(row: Row) -> list[str]:
    """Claims about a healthy model that trying does not show."""
    return [one["rule"] for one in row["said"] if one.get("holds") is False]


def broken(rows: list[Row]) -> list[str]:
    """The promises that do not hold."""
    well = [row for row in rows if row["kind"] == "healthy"]
    found = []
    for kind in SLOW:
        slow = [row for row in rows if row["kind"] == kind]
        if slow and sum(row["rank"] == 1 for row in slow) < FIRST * len(slow):
            found.append(f"causes ranked first ({kind})")
        if slow and sum(holds(row) for row in slow) < HOLDS * len(slow):
            found.append(f"expected ranges ({kind})")
    if sum(len(alarms(row)) for row in well) > ALARMS:
        found.append("false alarms")
    return found


def tables(rows: list[Row]) -> str:
    """As Markdown."""
    well = [row for row in rows if row["kind"] == "healthy"]
    lines = [rows[0]["machine"] if rows else "nothing was measured", ""]
    for kind in SLOW:
        slow = [row for row in rows if row["kind"] == kind]
        if not slow:
            continue
        lines += [line_of([f"loop ({kind})", "its cause", "rank", "expected", "measured", "holds"]),
                  line_of(["---"] * 6)]  # fmt: skip
        lines += [line_of(_cells(row)) for row in slow]
        first, kept = sum(row["rank"] == 1 for row in slow), sum(holds(row) for row in slow)
        words = f"{first} of {len(slow)} causes ranked first; {kept} of {len(slow)} expected ranges"
        lines += ["", f"{words} hold what was measured", ""]
    if well:
        false = [(row["name"], *alarms(row)) for row in well if alarms(row)]
        lines.append(f"{len(well)} healthy models: {sum(len(one) - 1 for one in false)} false "
                     f"alarms {false or ''}")  # fmt: skip
    lines += [f"broken: {', '.join(broken(rows))}"] if broken(rows) else []
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    middle, low, high = row["measured"]
    said = row["said"][row["rank"] - 1] if row["rank"] else None
    return [
        row["name"].replace("_", " "),
        " or ".join(SLOW[row["kind"]][1][row["name"]]),
        str(row["rank"] or "–"),
        f"{said['low']:.2f}× to {said['high']:.2f}×" if said else "–",
        f"{middle:.2f}× [{low:.2f}, {high:.2f}]",
        "yes" if holds(row) else "no",
    ]


def _line(row: Row) -> str:
    said = ", ".join(f"{one['rule']} {one['low']:.2f}–{one['high']:.2f}" for one in row["said"])
    skipped = f" SKIPPED {row['skipped']}" if row["skipped"] else ""
    if row["kind"] == "healthy":
        return f"{row['name']}: {said or 'nothing'}{skipped} alarms: {alarms(row)}"
    word = "holds" if holds(row) else "does not hold"
    measured = f"measured {row['measured'][0]:.2f}, which {word}"
    return f"{row['name']}: rank {row['rank']}, {measured}: {said}{skipped}"


def _newest(rows: list[Row]) -> list[Row]:
    """Of each loop the last row, in the order of the lists."""
    newest = {(row["kind"], row["name"]): row for row in rows}
    return [newest[key] for key in ALL if key in newest]


if __name__ == "__main__":
    sys.exit(main())
