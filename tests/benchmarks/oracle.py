"""What `tune()` finds against everything there is to find, and against what people do by hand.

For each of twelve workloads, three of them with steps of 0.2 to 0.5 s, in one run:

1. `tune()` with its defaults, nothing learned before, an empty cache of compiled code;
2. with another empty cache, a grid, interleaved with baseline: fp32 or bf16 (whether there are
   units for it or not) or what else lowers precision here, eager or compiled, layout, fused
   optimizer, and one thread where the step is short, each with each. Each combination gets GRID_S
   seconds, or as long as GRID_STEPS steps take. Where steps are long, combinations that are over
   twice as slow in each of the first rounds leave;
3. interleaved with baseline and the tuned plan, each on a copy of its own: `torch.compile(model)`,
   Accelerate with bf16 and inductor, Fabric's bf16-mixed with torch.compile.

    python tests/benchmarks/oracle.py [--only NAME] [--file oracle.jsonl] [--table]

All of it takes about an hour on two cores; a stopped run goes on. Exits 1 where a promise is
broken: the plan is at least 0.97 as fast as the best of the grid, in a quarter of the grid's time,
and never slower than 0.98 of baseline. Needs `pip install accelerate lightning` for the last two;
without them they are left out.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from _program import Row, collected, exit_code, interval, markdown, nothing_kept, over, parser_of
from _workloads import WORKLOADS, Workload, made

from speedkit_jupyter import Facts, Hardware
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.sampler import Policy
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.tuning.aim import FAR_SLOWER
from speedkit_jupyter.tuning.candidates import LOWERING, Candidate
from speedkit_jupyter.tuning.outcome import Tuning
from speedkit_jupyter.tuning.races import Grid

Call = Callable[[], object]
# Seconds for each combination, or the time of this many steps where they take longer.
GRID_S, GRID_STEPS = 10.0, 14
# A step of a second is long: what is far slower leaves. One of 20 ms is short: one thread is tried.
FAR_STEP_S, SHORT_STEP_S = 1.0, 0.02
BY_HAND_S, MOST_ROUNDS, LEAST_ROUNDS, FEW_ROUNDS = 10.0, 300, 12, 3
AGAINST_BEST, AGAINST_BASELINE, SHARE_OF_TIME = 0.97, 0.98, 0.25


class ByHand(Grid):
    """Who makes a grid by hand does not stop early."""

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return False: time alone ends the grid."""
        return False


def main() -> int:
    """Run the program."""
    options = parser_of(__doc__, "oracle.jsonl").parse_args()
    rows = collected(options, [{"workload": name} for name in WORKLOADS], measured, _line)
    print(table(rows))
    return exit_code([f"{row['workload']}: {one}" for row in rows for one in broken(row)])


def measured(workload: str) -> Row:
    """Return one workload, whole. Starting the compiler at all counts for neither."""
    torch.compile(torch.nn.Linear(2, 2))(torch.rand(1, 2)).sum().backward()
    work = made(workload)
    begun_s = time.perf_counter()
    tuning = work.tuned()
    tuned_s = time.perf_counter() - begun_s
    with nothing_kept():
        found = _against_grid(workload, work, tuning.winner)
        return {"tuned_s": tuned_s, **found, "by_hand": by_hand(workload, tuning)}


def _against_grid(name: str, work: Workload, winner: Candidate) -> Row:
    begun_s = time.perf_counter()
    step_s = _step_s(work)
    tried = combinations(work, step_s)
    if winner.values and winner.name not in [one.name for one in tried]:
        tried.append(winner)  # the search may find what the grid does not have
    policy = ByHand()
    if step_s > FAR_STEP_S / 3:  # nobody waits for what is far slower in steps that are long anyway
        policy.far_slower = FAR_SLOWER
    comparison = _benchmarked(work, tried, step_s, policy)
    grid_s = time.perf_counter() - begun_s
    times = {one.name: comparison.times_s(one) for one in comparison.records}
    found = {one: over(times["baseline"], times[one]) for one in times}
    medians = {one: ratio[0] for one, ratio in found.items() if ratio}
    best = max(medians, key=lambda one: medians[one])
    chosen = [one for one in tried if one.name in (best, winner.name)]
    fresh = _benchmarked(work, chosen, step_s)
    times = {one.name: fresh.times_s(one) for one in fresh.records}
    return {
        "step_s": step_s,
        "tuned": winner.name,
        "grid_s": grid_s,
        "grid_size": len(medians),
        "rounds": len(times["baseline"]),
        "best": best,
        "best_over_baseline": medians[best],
        "tuned_over_best": over(times[best], times[winner.name]),
        "tuned_over_baseline": over(times["baseline"], times[winner.name]),
        "failed": {r.name: r.failure for r in comparison.records if r.failure},
    }


def _benchmarked(
    work: Workload, tried: Sequence[Candidate], step_s: float, policy: Policy | None = None
) -> Comparison:
    step = step_of(work.run, work.model, work.optimizer or ())
    variants = [Variant("baseline"), *(one.variant() for one in tried)]
    budget_s = max(GRID_S, GRID_STEPS * step_s) * len(variants)
    bench = Benchmark(step, variants, budget_s, policy=policy)
    for one in bench.run():
        if sys.stderr.isatty():
            print(f"\r\x1b[K{one.done:.0%} {one.text[:80]}", end="", file=sys.stderr)
    return bench.result()


def _step_s(work: Workload) -> float:
    """Return the seconds of the fastest of five steps; what they change stays."""
    times = []
    for _ in range(5):
        begun_s = time.perf_counter()
        work.run()
        times.append(time.perf_counter() - begun_s)
    return min(times)


def combinations(work: Workload, step_s: float) -> list[Candidate]:
    """Return the grid: each value with each, one lowering of precision at a time."""
    hardware = Hardware.detect()
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
        if name == "tf32" and facts.convolutions:
            continue
        if name in LOWERING:
            lowered += [{name: value} for value in values]
        elif values:
            offered.append([{}, *({name: value} for value in values)])
    parts = itertools.product(lowered, *offered)
    found = [sum((Candidate(one) for one in some), Candidate({})) for some in parts]
    return [one for one in found if one.values]


def by_hand(name: str, tuning: Tuning) -> Row:
    """Return speed-ups over the plain model, or errors, of the tuned plan and what people write."""
    steps: dict[str, Call] = {"baseline": made(name).run}
    tuned = made(name)
    optimizers = [tuned.optimizer] if tuned.optimizer else []
    context = prepare(tuned.model, tuning.config if tuning.helped else None, optimizers)

    def in_context() -> object:
        with context.autocast():
            return tuned.run()

    steps["tuned"] = in_context
    for label, (library, make) in HANDS.items():
        if find_spec(library):
            steps[label] = make(made(name))
    forces = {"tuned": context.in_force}
    failed: Row = {}
    for label, step in steps.items():
        try:
            with forces.get(label, nullcontext)():
                for _ in range(3):
                    step()
        except Exception as error:
            failed[label] = f"fails: {type(error).__name__}"
    times = _interleaved({one: steps[one] for one in steps if one not in failed}, forces)
    return failed | {
        label: over(times["baseline"], times[label]) for label in times if label != "baseline"
    }


def _torch_compile(work: Workload) -> Call:
    model = torch.compile(work.model)
    return lambda: work.step(model, work.optimizer)


def _accelerate(work: Workload) -> Call:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor", cpu=True)
    model = accelerator.prepare(work.model)
    optimizer = work.optimizer and accelerator.prepare(work.optimizer)
    return lambda: work.step(model, optimizer, accelerator.backward)


def _fabric(work: Workload) -> Call:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = torch.compile(work.model)
    if work.optimizer is None:
        model, optimizer = fabric.setup(model), None
    else:
        model, optimizer = fabric.setup(model, work.optimizer)
    return lambda: work.step(model, optimizer, fabric.backward)


# What people write, by its column in the table: the library that it needs, and what makes the step.
HANDS: dict[str, tuple[str, Callable[[Workload], Call]]] = {
    "torch.compile": ("torch", _torch_compile),
    "Accelerate, bf16 + inductor": ("accelerate", _accelerate),
    "Fabric, bf16-mixed + compile": ("lightning", _fabric),
}


def _interleaved(steps: dict[str, Call], forces: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of a step by name, in shuffled rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end_s = time.perf_counter() + BY_HAND_S
    for number in range(MOST_ROUNDS):
        if time.perf_counter() > end_s and number >= LEAST_ROUNDS:
            break
        racing = [name for name in steps if number < FEW_ROUNDS or not _is_far(times, name)]
        for name in random.sample(racing, len(racing)):
            with forces.get(name, nullcontext)():
                steps[name]()  # not timed: caches settle
                begun_s = time.perf_counter()
                steps[name]()
                times[name].append(time.perf_counter() - begun_s)
    return times


def _is_far(times: dict[str, list[float]], name: str) -> bool:
    """Return whether it was over twice as slow in every round, in steps that are long."""
    rounds = zip(times["baseline"], times[name], strict=False)
    return min(times[name]) > FAR_STEP_S and all(2 * ours < its for ours, its in rounds)


def broken(row: Row) -> list[str]:
    """Return the promises that this row breaks."""
    promises = {
        f"below {AGAINST_BEST} of the best": row["tuned_over_best"][0] >= AGAINST_BEST,
        "more than a quarter of the time": row["tuned_s"] <= SHARE_OF_TIME * row["grid_s"],
        "slower than baseline": row["tuned_over_baseline"][0] >= AGAINST_BASELINE,
    }
    return [text for text, holds in promises.items() if not holds]


def table(rows: Sequence[Row]) -> str:
    """Return Markdown, as it stands in docs/results.md."""
    if not rows:
        return "nothing measured yet"
    head = ["workload", "tuned plan", "over baseline", "of the grid's best", "time, of the grid's"]
    hands = dict.fromkeys(label for row in rows for label in row["by_hand"] if label != "tuned")
    lines = [
        [
            row["workload"],
            row["tuned"] if row["tuned"] != "baseline" else "leave it as it is",
            interval(row["tuned_over_baseline"]),
            f"{row['tuned_over_best'][0]:.2f} ({row['best']})",
            f"{row['tuned_s']:.0f} of {row['grid_s']:.0f} s, {row['tuned_s'] / row['grid_s']:.0%}",
            *(_by_hand(row["by_hand"].get(hand)) for hand in hands),
        ]
        for row in rows
    ]
    return f"{rows[0]['machine']}, {rows[0]['state']}\n\n{markdown([*head, *hands], *lines)}"


def _by_hand(found: list[float] | str | None) -> str:
    return found if isinstance(found, str) else interval(found)


def _line(row: Row) -> str:
    return f"{row['workload']}: {row['tuned']} {interval(row['tuned_over_baseline'])}"


if __name__ == "__main__":
    sys.exit(main())
