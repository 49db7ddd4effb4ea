"""Notebooks as people have them: plain, as their libraries' guides advise, and tuned, interleaved.

    python tests/benchmarks/models.py [--only NAME] [--budget S] [--file models.jsonl] [--table]

Exits 1 where the search or the plan leaves state changed, where a plan is more than 3 % slower than
the advice, or where plans are less than 1.15 times as fast as the advice in the mean. Notebooks of
`peft` and `diffusers` are left out where these are missing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from _notebooks import NOTEBOOKS, Step
from _program import Row, collected, exit_code, interval, markdown, over, parser_of
from _side_by_side import interleaved
from torch.utils._pytree import tree_leaves

from speedkit_jupyter import tune
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.rounds.from_function import step_of

sys.path.append(str(Path(__file__).parents[1]))
from frameworks.conftest import Look

BUDGET_S, BELOW, ABOVE = 30.0, 0.97, 1.15


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "models.jsonl")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of each search")
    options = parser.parse_args()
    missing = [f"({name})" for name in ("peft", "diffusers") if not find_spec(name)]
    keys = [{"name": name} for name in NOTEBOOKS if not name.endswith(tuple(missing))]
    line = lambda row: " | ".join(_cells(row))  # noqa: E731
    rows = collected(options, keys, partial(measured, budget_s=options.budget), line)
    head = "notebook,plain,guide,tuned,tuned ÷ guide,plan,search + compiling,difference,changed"
    print(markdown(head.split(","), *map(_cells, rows)))
    return exit_code(broken(rows)) if rows else 1


def begun(name: str, guided: bool = False) -> tuple[Step, Look]:
    """Return a fresh notebook with fixed random numbers, and all that its step can reach."""
    torch.manual_seed(0)
    step = NOTEBOOKS[name](guided)
    return step, look(step)


def look(step: Step) -> Look:
    found = step_of(step)
    return Look(*found.models, *found.optimizers)


def measured(name: str, budget_s: float) -> Row:
    """Return the figures of a notebook."""
    step, before = begun(name)
    tuning = tune(step, budget_s=budget_s, fresh=True, keep=["malloc"])
    changed = before.changes(look(step))
    found, config = step_of(step), tuning.config if tuning.helped else None
    contexts = [prepare(model, config, found.holders(model)) for model in found.models]

    @contextmanager
    def forced() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context.in_force())
            yield

    (plain, _), (guide, _) = begun(name), begun(name, guided=True)
    results = []
    for one, around in ((plain, nullcontext), (step, forced)):
        torch.manual_seed(1)
        with around():
            results.append(one())
    changed += sorted(look(plain).seen.keys() ^ look(step).seen.keys())
    steps = {"plain": plain, "guide": guide, "tuned": step}
    times, failed = interleaved(steps, {"tuned": forced})
    return {
        "plain_s": statistics.median(times["plain"]),
        "guide": over(times["plain"], times.get("guide", [])),
        "tuned": over(times["plain"], times["tuned"]),
        "over_guide": over(times.get("guide", []), times["tuned"]),
        "plan": tuning.winner.name,
        "search_s": [tuning.seconds - tuning.compiling_s, tuning.compiling_s],
        "difference": furthest(*results),
        "failed": failed,
        "changed": changed,
    }


def furthest(plain: object, tuned: object) -> float:
    """Return the largest difference of results: relative to the norm, of integers the share."""
    most = 0.0
    for one, other in zip(tree_leaves(plain), tree_leaves(tuned), strict=True):
        if one is not None:
            a, b = np.asarray(one), np.asarray(other)
            far = np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-12)
            most = max(most, float((a != b).mean() if a.dtype.kind in "iu" else far))
    return most


def broken(rows: list[Row]) -> list[str]:
    """Return the promises that do not hold."""
    gains = {row["name"]: row["over_guide"][0] for row in rows if not row["failed"]}
    found = [f"{row['name']}: changed {row['changed'][:3]}" for row in rows if row["changed"]]
    found += [f"{row['name']}: failed {row['failed']}" for row in rows if row["failed"]]
    found += [f"{name}: slower than the advice" for name, gain in gains.items() if gain < BELOW]
    mean = statistics.geometric_mean(gains.values())
    return found + [f"{mean:.2f} times as fast as the advice in the mean"] * (mean < ABOVE)


def _cells(row: Row) -> list[str]:
    return [
        row["name"],
        f"{1000 * row['plain_s']:.0f} ms",
        *(interval(row[word]) for word in ("guide", "tuned", "over_guide")),
        row["plan"],
        " + ".join(f"{seconds:.0f}" for seconds in row["search_s"]) + " s",
        f"{row['difference']:.1g}",
        str(len(row["changed"])),
    ]


if __name__ == "__main__":
    sys.exit(main())
