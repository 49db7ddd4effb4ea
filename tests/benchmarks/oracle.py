"""Compare the plan of `tune()` with the best of a whole grid, and with code by hand.

For each of sixteen workloads, some of them with steps of 0.1 to 0.5 s, in one run:

1. `tune()` with its defaults, nothing learned before, and an empty cache of compiled code;
2. a search in sixty lines, as users might write it (`_plain_search.py`), with another empty cache;
3. a grid of all combinations of precision (fp32, bf16 even without hardware for it, or another),
   eager or compiled, layout, fused optimizer, library of matrix products, and threads for short
   steps. First rounds drop plans over twice as slow as baseline. Plans near the best then race with
   the tuned plan, until their ratio is known to 2 %;
4. interleaved, each on a copy of its own: baseline, the tuned plan, the sixty lines' plan,
   `torch.compile(model)`, Accelerate and Fabric with bf16, with and without compiling;
5. baseline and the tuned plan once more in a fresh process, to check the reported gain (baseline in
   yet another process, if the plan has `malloc`).
All of it takes about 45 minutes on two idle cores. The plan must be at least 0.97 as fast as the
best of the grid, and never over 3 % slower than baseline or than the best of Accelerate's and
Fabric's settings. Without compiling, tuning must take at most 1.5 times as long as the sixty lines.
In 9 of 10 workloads the gain in the fresh process must be in the reported interval. Exits 1
otherwise. Uses `pip install accelerate lightning`; a missing library is left out.
"""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from _plain_search import Found, plain_search
from _program import Row, collected, load_all, nothing_kept, parser_of, product
from _side_by_side import FAR, FEW_ROUNDS, Call, in_fresh_process, interleaved, is_far, planned
from _tables import interval, reported
from _timing import listed, over
from _workloads import WORKLOADS, Workload, made

from speedkit_jupyter import Facts, Hardware
from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.rounds.sampler import Policy
from speedkit_jupyter.rounds.statistics import paired_ratio
from speedkit_jupyter.search.candidates import LOWERING, Candidate
from speedkit_jupyter.search.outcome import Tuning
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import Variant

# In the first rounds, a combination has at most GRID_S seconds, or GRID_STEPS steps if longer.
# GRID_SIZE combinations share a run, since each keeps a copy of the state.
GRID_S, GRID_STEPS, GRID_SIZE = 1.5, 12, 8
# Other numbers of threads are tried only for steps up to this long.
SHORT_STEP_S = 0.02
# At most BEST plans of over NEAR times the best speed-up race with the tuned plan, until ratios are
# known to KNOWN. Each plan has RACE_S seconds, or RACE_STEPS steps if these take longer.
BEST, NEAR, KNOWN, RACE_S, RACE_STEPS = 3, 0.93, 0.02, 6.0, 30
AGAINST_BEST, AGAINST_OTHERS, TIMES_AS_LONG, COMES_TRUE = 0.97, 0.97, 1.5, 0.9


class FirstRound(Policy):
    """Policy that times every plan that is not far slower than baseline, and checks none."""

    most_times_slower, measures_memory, checked, deciding_rounds = FAR, False, 0, FEW_ROUNDS

    def staying(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        rounds = racing[0].times_s  # a few rounds of long steps are enough
        if len(rounds) < FEW_ROUNDS:
            return racing
        staying = [racing[0], *(one for one in racing[1:] if not is_far(rounds, one.times_s))]
        return () if len(staying) == 1 or sum(rounds) >= GRID_S / 2 else staying


class Race(Policy):
    """Policy that runs until the tuned plan's ratios to all plans are known; checks all plans."""

    measures_memory = False

    def __init__(self, tuned: str) -> None:
        self._tuned = tuned

    def staying(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        times = {one.name: one.times_s for one in racing}
        ours = times.get(self._tuned, racing[0].times_s)
        ratios = (paired_ratio(one, ours) for one in times.values()) if comparison else ()
        is_known = comparison is not None and all(one.is_precise(KNOWN) for one in ratios)
        return () if is_known else racing


def main() -> int:
    options = parser_of(__doc__, "oracle.jsonl").parse_args()
    rows = collected(options, product(workload=WORKLOADS), measured, cells)
    said = [(row["workload"], row["fresh"][0], *row["said"][1:]) for row in rows if row["said"]]
    wrong = [name for name, fresh, low, high in said if not low <= fresh <= high]
    missed = [f"a fresh process gains something else: {', '.join(wrong)}"]
    is_missed = len(wrong) > (1 - COMES_TRUE) * len(said)
    return reported(rows, HEAD, cells, promises, *missed * is_missed)


def measured(workload: str) -> Row:
    """Return the row of a workload. The 2 s of load_all() count for neither search."""
    load_all()
    work = made(workload)
    tuning = work.tuned()
    said = listed(tuning.ratio) if tuning.helped else None
    with nothing_kept():
        plain = plain_search(workload)
        return {
            "tuned": tuning.winner.name,
            "said": said,
            "unclear": tuning.unclear,
            "tuned_s": tuning.seconds - tuning.compiling_s,
            "compiling_s": tuning.compiling_s,
            "plain": [plain.plan, plain.seconds, plain.compiling_s],
            **by_hand(workload, tuning, plain),
            **_against_grid(work, tuning.winner),
            "fresh": in_fresh_process(workload, tuning.config.to_dict()) if said else None,
        }


def _against_grid(work: Workload, winner: Candidate) -> Row:
    step_s = min(clock.timed(work.run, torch.device("cpu")) for _ in range(5))
    tried, first = combinations(work, step_s), Row()
    for some in (tried[at : at + GRID_SIZE] for at in range(0, len(tried), GRID_SIZE)):
        run = _benchmarked(work, some, FirstRound(), max(GRID_S, GRID_STEPS * step_s))
        first |= {one.name: run.ratio(one) or one.failure for one in run.records[1:]}
    medians = {name: one.median for name, one in first.items() if hasattr(one, "median")}
    order = sorted(medians, key=lambda name: -medians[name])[:BEST]
    names = {winner.name, *(name for name in order if medians[name] > NEAR * medians[order[0]])}
    known = {one.name: one for one in [*tried, winner] if one.values}
    chosen = [one for name, one in known.items() if name in names]
    race = _benchmarked(work, chosen, Race(winner.name), max(RACE_S, RACE_STEPS * step_s))
    times = {one.name: race.times_s(one) for one in race.records if race.times_s(one)}
    wrong = [one.name for one in race.records if race.verdict(one) == "wrong"]
    ratios = {name: over(times["baseline"], times[name]) for name in times if name not in wrong}
    best = max(ratios, key=lambda name: ratios[name][0])
    return {
        "step_s": step_s,
        "grid": medians,
        "best": best,
        "best_over_baseline": ratios[best],
        "tuned_over_best": over(times[best], times[winner.name]),
        "tuned_over_baseline": over(times["baseline"], times[winner.name]),
        "failed": {name: one for name, one in first.items() if isinstance(one, str)},
    }


def _benchmarked(
    work: Workload, tried: Sequence[Candidate], policy: Policy, seconds: float
) -> Comparison:
    step = step_of(work.run, work.model, work.optimizer or ())
    variants = [Variant("baseline"), *(one.variant() for one in tried)]
    bench = Benchmark(step, variants, seconds * len(variants), policy=policy)
    deque(bench.run(), maxlen=0)
    return bench.result()


def combinations(work: Workload, step_s: float) -> list[Candidate]:
    """Return the grid: all combinations of values, with at most one lowering of precision."""
    hardware = Hardware.detect().with_gemm()
    facts = Facts.read(work.model, [work.optimizer] if work.optimizer else [])
    offered: list[list[dict[str, Any]]] = []
    lowered: list[dict[str, Any]] = [{}]
    for optimization in CATALOG:
        name, values = optimization.name, list(optimization.candidates(hardware, facts))
        if name == "precision" and "bf16" not in values and not facts.lstms:
            values.append("bf16")
        if name == "threads":
            now = torch.get_num_threads()
            values = [one for one in values if one != now and step_s <= SHORT_STEP_S]
        if name in LOWERING:
            lowered += [{name: value} for value in values]
        elif values:
            offered.append([{}, *({name: value} for value in values)])
    parts = itertools.product(lowered, *offered)
    found = [sum((Candidate(one) for one in some), Candidate({})) for some in parts]
    return [
        one for one in found
        if one.values and not any(named(name).excludes & one.values.keys() for name in one.values)
    ]  # fmt: skip


def by_hand(name: str, tuning: Tuning, plain: Found) -> Row:
    """Return speed-ups over the plain model, or errors, of the tuned plan and of code by hand."""
    tuned, forces = planned(name, tuning.config if tuning.helped else None)
    steps: dict[str, Call] = {"baseline": made(name).run, "tuned": tuned, "sixty lines": plain.step}
    at_hand = {label: make for label, (library, make) in HANDS.items() if find_spec(library)}
    steps |= {label: make(made(name)) for label, make in at_hand.items()}
    times, failed = interleaved(steps, forces)
    gains = {label: over(times["baseline"], times[label]) for label in times}
    frameworks = [label for label in gains if label.startswith(("Accelerate", "Fabric"))]
    best = max(frameworks, key=lambda label: gains[label][0], default="baseline")
    return {
        "by_hand": failed | gains,
        "framework": best,
        "tuned_over_framework": over(times[best], times["tuned"]),
    }


def _torch_compile(work: Workload) -> Call:
    model = torch.compile(work.model)
    return lambda: work.step(model, work.optimizer)


def _accelerate(work: Workload, backend: str | None = None) -> Call:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend=backend, cpu=True)
    model = accelerator.prepare(work.model)
    optimizer = work.optimizer and accelerator.prepare(work.optimizer)
    return lambda: work.step(model, optimizer, accelerator.backward)


def _fabric(work: Workload, compiles: bool = False) -> Call:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = fabric.setup_module(torch.compile(work.model) if compiles else work.model)
    optimizer = work.optimizer and fabric.setup_optimizers(work.optimizer)
    return lambda: work.step(model, optimizer, fabric.backward)


# Each kind of code by hand has the library that it needs, and a function that makes its step.
HANDS: dict[str, tuple[str, Callable[[Workload], Call]]] = {
    "torch.compile": ("torch", _torch_compile),
    "Accelerate, bf16": ("accelerate", _accelerate),
    "Accelerate, bf16 + inductor": ("accelerate", partial(_accelerate, backend="inductor")),
    "Fabric, bf16-mixed": ("lightning", _fabric),
    "Fabric, bf16-mixed + compile": ("lightning", partial(_fabric, compiles=True)),
}


def promises(row: Row) -> dict[str, bool]:
    """Return whether each promise holds, except the one about fresh processes."""
    least = {"slower than baseline": "baseline", f"slower than {row['framework']}": "framework"}
    return {
        f"below {AGAINST_BEST} of the best": row["tuned_over_best"][0] >= AGAINST_BEST,
        **{text: row[f"tuned_over_{it}"][0] >= AGAINST_OTHERS for text, it in least.items()},
        f"over {TIMES_AS_LONG} times the sixty lines' seconds": (
            row["tuned_s"] <= TIMES_AS_LONG * row["plain"][1]
        ),
    }


HEAD = (
    "workload", "tuned plan", "over baseline", "said", "in a fresh process", "of the grid's best",
    "seconds + compiling", "sixty lines'", "sixty lines' plan", "torch.compile",
    "best of Accelerate and Fabric",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """Return a line of the table, as in docs/results.md."""
    return [
        row["workload"],
        row["tuned"] if row["tuned"] != "baseline" else "leave it as it is",
        *(interval(row[key]) for key in ("tuned_over_baseline", "said", "fresh")),
        f"{row['tuned_over_best'][0]:.2f} ({row['best']})",
        f"{row['tuned_s']:.0f} + {row['compiling_s']:.0f}",
        "{1:.0f} + {2:.0f}".format(*row["plain"]),
        f"{_by_hand(row, 'sixty lines')} ({row['plain'][0]})",
        _by_hand(row, "torch.compile"),
        f"{_by_hand(row, row['framework'])} ({row['framework']})",
    ]


def _by_hand(row: Row, label: str) -> str:
    found = row["by_hand"].get(label)
    return found if isinstance(found, str) else interval(found)


if __name__ == "__main__":
    sys.exit(main())
