"""Compare typical notebooks: as written, as their libraries' guides advise, and tuned.

Exits 1 if the search or the plan leaves state changed, if a plan fails or is more than 3 % slower
than the advice, or if the geometric mean of speed over the advice is below 1.15. Notebooks of
`peft` and `diffusers` are left out if these are missing.
"""

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
from _program import Row, collected, parser_of, product
from _side_by_side import interleaved
from _tables import interval, reported
from _timing import over
from torch.utils._pytree import tree_leaves

from speedkit_jupyter import tune
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.step.step import step_of

sys.path.append(str(Path(__file__).parents[1]))
from frameworks.conftest import Look

BUDGET_S, BELOW, ABOVE = 120.0, 0.97, 1.15


def main() -> int:
    options = parser_of(__doc__, "models.jsonl", budget=BUDGET_S).parse_args()
    missing = [f"({name})" for name in ("peft", "diffusers") if not find_spec(name)]
    keys = product(name=(name for name in NOTEBOOKS if not name.endswith(tuple(missing))))
    rows = collected(options, keys, partial(measured, budget_s=options.budget), _cells)
    head = "notebook,plain,guide,tuned,tuned ÷ guide,plan,search + compiling,difference,changed"
    gains = [row["over_guide"][0] for row in rows if not row["failed"]]
    mean = statistics.geometric_mean(gains) if gains else 0.0
    low = [f"{mean:.2f} times as fast as the advice in the mean"] * (mean < ABOVE)
    return reported(rows, head.split(","), _cells, promises, *low)


def begun(name: str, guided: bool = False) -> tuple[Step, Look]:
    """Return a fresh notebook's step with fixed random numbers, and a copy of its models' state."""
    torch.manual_seed(0)
    step = NOTEBOOKS[name](guided)
    return step, look(step)


def look(step: Step) -> Look:
    found = step_of(step)
    return Look(*found.models, *found.optimizers)


def measured(name: str, budget_s: float) -> Row:
    step, before = begun(name)
    tuning = tune(step, budget_s=budget_s, fresh=True, keep=["malloc"])
    changed = before.changes(look(step))
    found, config = step_of(step), tuning.config if tuning.helped else None
    contexts = [prepare(model, config, found.holders(model)) for model in found.models]

    @contextmanager
    def forced() -> Iterator[None]:
        with ExitStack() as stack:
            _ = [stack.enter_context(context.in_force()) for context in contexts]
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
    """Return the largest difference, relative to the norm; for integers, the share that differs."""
    most = 0.0
    for one, other in zip(tree_leaves(plain), tree_leaves(tuned), strict=True):
        if one is not None:
            a, b = np.asarray(one), np.asarray(other)
            far = np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-12)
            most = max(most, float((a != b).mean() if a.dtype.kind in "iu" else far))
    return most


def promises(row: Row) -> dict[str, bool]:
    return {
        f"changed {row['changed'][:3]}": not row["changed"],
        f"failed {row['failed']}": row["failed"].keys() <= {"guide"},
        "slower than the advice": row["failed"] or row["over_guide"][0] >= BELOW,
    }


def _cells(row: Row) -> list[str]:
    gains = (interval(row[word]) for word in ("guide", "tuned", "over_guide"))
    search = "{:.0f} + {:.0f} s".format(*row["search_s"])
    return [row["name"], f"{1000 * row['plain_s']:.0f} ms", *gains, row["plan"], search,
            f"{row['difference']:.1g}", str(len(row["changed"]))]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
