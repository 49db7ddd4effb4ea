"""What `tune()` finds against everything there is to find, and against what people do by hand.

For each of twelve workloads, three of them with steps of 0.2 to 0.5 s, in one run:

1. `tune()` with its defaults, nothing learned before, an empty cache of compiled code;
2. with another empty cache, a grid: fp32 or bf16 (whether there are units for it or not) or what
   else lowers precision here, eager or compiled, layout, fused optimizer, and one thread where the
   step is short, each with each, interleaved with baseline; for each combination GRID_S seconds or
   as long as GRID_STEPS steps take (what is over twice as slow in each of the first rounds leaves
   them, and its time to the others);
3. interleaved with baseline and the tuned plan, each on a copy of its own: `torch.compile(model)`,
   Accelerate with bf16 and inductor, Fabric's bf16-mixed with torch.compile.

    python tests/benchmarks/oracle.py [--only NAME] [--file oracle.jsonl] [--table]

A workload takes some minutes, all of them about an hour on two cores. Each is appended to the file
with the state of the code (the commit), so that a run can be stopped and goes on where it was; what
another state has measured is measured anew. `--table` only prints the newest state, and says
whether it is complete. Exits 1 where a promise is broken: the plan is at least 0.97 as fast as the
best of the grid, in a quarter of the grid's time, and never slower than 0.98 of baseline. Needs
`pip install accelerate lightning` for the last two; without them they are left out.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _kept import append, line_of, nothing_kept, read, state_of_code
from _ratios import machine
from _workloads import WORKLOADS, Workload, made

from speedkit_jupyter import Facts, Hardware, tune
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import Ratio, paired_ratio
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.variants import Variant
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.tuning.aim import FAR_SLOWER
from speedkit_jupyter.tuning.candidates import LOWERING, Candidate
from speedkit_jupyter.tuning.outcome import Tuning
from speedkit_jupyter.tuning.races import Grid


class ByHand(Grid):
    """Who makes a grid by hand does not stop early."""

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Whatever is clear."""
        return False


class ByHandOfLongSteps(ByHand):
    """Nor waits for what is far slower in steps that are long anyway."""

    far_slower = FAR_SLOWER


Forces = dict[str, Callable[[], Any]]

# For each combination: the default budget of a benchmark, or so many steps where these take longer.
GRID_S, GRID_STEPS = 10.0, 14
# What is far slower in steps of so many seconds leaves the grid.
FAR_STEP_S = 1.0
# One thread is worth a try for steps up to so many seconds.
SHORT_STEP_S = 0.02
# Of those by hand, what is far slower leaves after a few rounds.
BY_HAND_S, MOST_ROUNDS, LEAST_ROUNDS, FEW_ROUNDS = 10.0, 300, 12, 3
AGAINST_BEST, AGAINST_BASELINE, SHARE_OF_TIME = 0.97, 0.98, 0.25


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="workloads whose name holds this")
    parser.add_argument("--file", type=Path, default=Path("oracle.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what the file holds")
    options = parser.parse_args()
    state = state_of_code()
    done = {row["workload"]: row for row in read(options.file) if row.get("state") == state}
    for name in WORKLOADS if not options.table else ():
        if name in done or (options.only and options.only not in name):
            continue
        done[name] = {"state": state, **measured(name)}
        append(options.file, done[name])
        print(_line(done[name]), flush=True)
    every = read(options.file)
    state = every[-1].get("state") if every else None
    rows = {row["workload"]: row for row in every if row.get("state") == state}
    print(table(list(rows.values())))
    print(f"{len(rows)} of {len(WORKLOADS)} workloads in one state of the code: {state}")
    return 0 if all(not broken(row) for row in rows.values()) else 1


def measured(name: str) -> dict[str, Any]:
    """One workload, whole. Starting the compiler at all is counted for neither."""
    torch.compile(torch.nn.Linear(2, 2))(torch.rand(1, 2)).sum().backward()
    work = made(name)
    with nothing_kept():
        start = time.perf_counter()
        tuning = tune(_step(work), model=work.model, optimizer=work.optimizer or ())
        tuned_s = time.perf_counter() - start
    with nothing_kept():
        return _against_all(name, work, tuning, tuned_s)


def _against_all(name: str, work: Workload, tuning: Tuning, tuned_s: float) -> dict[str, Any]:
    start = time.perf_counter()
    step_s = _step_s(work)
    tried = combinations(work, step_s)
    winner = tuning.winner
    if winner.values and winner.name not in [one.name for one in tried]:
        tried.append(winner)  # the search may find what the grid does not have
    grid = Benchmark(
        step_of(_step(work), work.model, work.optimizer or ()),
        [Variant("baseline"), *(one.variant() for one in tried)],
        max(GRID_S, GRID_STEPS * step_s) * len(tried),
        policy=ByHandOfLongSteps() if step_s > FAR_STEP_S / 3 else ByHand(),
    )
    for one in grid.run():
        if sys.stderr.isatty():
            print(f"\r\x1b[K{name}: {one.done:.0%} {one.text[:80]}", end="", file=sys.stderr)
    grid_s = time.perf_counter() - start
    comparison = grid.result()
    medians = _medians(comparison)
    best = max(medians, key=lambda one: medians[one])
    rows = _in_fresh_rounds(work, [one for one in tried if one.name in (best, winner.name)], step_s)
    return {
        "workload": name,
        "machine": machine(),
        "step_s": step_s,
        "tuned": winner.name,
        "tuned_s": tuned_s,
        "grid_s": grid_s,
        "grid_size": len(medians),
        "rounds": len(rows["baseline"]),
        "best": best,
        "best_over_baseline": medians[best],
        "tuned_over_best": _listed(_ratio(rows[best], rows[winner.name])),
        "tuned_over_baseline": _listed(_ratio(rows["baseline"], rows[winner.name])),
        "failed": {r.name: r.failure for r in comparison.records if r.failure},
        "by_hand": by_hand(name, tuning),
    }


def _medians(comparison: Comparison) -> dict[str, float]:
    """Speed-ups by name, of all that worked."""
    times = {one.name: comparison.times_s(one) for one in comparison.records}
    return {name: _ratio(times["baseline"], one).median for name, one in times.items() if one}


def _in_fresh_rounds(
    work: Workload, chosen: Sequence[Candidate], step_s: float
) -> dict[str, list[float]]:
    """Seconds of each step, interleaved, by name; baseline is the first."""
    step = step_of(_step(work), work.model, work.optimizer or ())
    variants = [Variant("baseline"), *(one.variant() for one in chosen)]
    final = Benchmark(step, variants, max(GRID_S, GRID_STEPS * step_s) * len(variants))
    for _ in final.run():
        pass
    comparison = final.result()
    return {one.name: comparison.times_s(one) for one in comparison.records}


def _step_s(work: Workload) -> float:
    """Seconds of the fastest of five steps; what they change stays."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work.step(work.model, work.optimizer)
        times.append(time.perf_counter() - start)
    return min(times)


def combinations(work: Workload, step_s: float) -> list[Candidate]:
    """The grid: each value with each, one lowering of precision at a time."""
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


def by_hand(name: str, tuning: Tuning) -> dict[str, Any]:
    """Speed-ups over the plain model, or an error: the tuned plan, and what people write."""
    makers: dict[str, Callable[[Workload], Callable[[], object]]] = {
        "torch.compile": _torch_compile,
    }
    if find_spec("accelerate"):
        makers["Accelerate, bf16 + inductor"] = _accelerate
    if find_spec("lightning"):
        makers["Fabric, bf16-mixed + compile"] = _fabric
    steps: dict[str, Callable[[], object]] = {"baseline": _step(made(name))}
    tuned = made(name)
    optimizers = [tuned.optimizer] if tuned.optimizer else []
    context = prepare(tuned.model, tuning.config if tuning.helped else None, optimizers)
    steps["tuned"] = _step(tuned, context)
    for label, maker in makers.items():
        steps[label] = maker(made(name))
    forces = {"tuned": context.in_force}
    failed = {name: error for name in steps if (error := _warmed_up(steps[name], forces, name))}
    times = _interleaved({n: one for n, one in steps.items() if n not in failed}, forces)
    return failed | {
        label: _listed(_ratio(times["baseline"], times[label]))
        for label in times
        if label != "baseline"
    }


def _warmed_up(step: Callable[[], object], forces: Forces, name: str) -> str:
    """Three calls; the error where there is one."""
    try:
        with _in_force(forces, name):
            for _ in range(3):
                step()
    except Exception as error:
        return f"fails: {type(error).__name__}"
    return ""


def _step(work: Workload, context: Any = None) -> Callable[[], object]:
    def step() -> object:
        if context is None:
            return work.step(work.model, work.optimizer)
        with context.autocast():
            return work.step(work.model, work.optimizer)

    return step


def _torch_compile(work: Workload) -> Callable[[], object]:
    model = torch.compile(work.model)
    return lambda: work.step(model, work.optimizer)


def _accelerate(work: Workload) -> Callable[[], object]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor", cpu=True)
    if work.optimizer is None:
        model, optimizer = accelerator.prepare(work.model), None
    else:
        model, optimizer = accelerator.prepare(work.model, work.optimizer)
    return lambda: work.step(model, optimizer, accelerator.backward)


def _fabric(work: Workload) -> Callable[[], object]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = torch.compile(work.model)
    if work.optimizer is None:
        model, optimizer = fabric.setup(model), None
    else:
        model, optimizer = fabric.setup(model, work.optimizer)
    return lambda: work.step(model, optimizer, fabric.backward)


def _interleaved(steps: dict[str, Callable[[], object]], forces: Forces) -> dict[str, list[float]]:
    """Seconds of a step by name, in shuffled rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + BY_HAND_S
    for number in range(MOST_ROUNDS):
        if time.perf_counter() > end and number >= LEAST_ROUNDS:
            break
        racing = [name for name in steps if number < FEW_ROUNDS or not _is_far(times, name)]
        for name in random.sample(racing, len(racing)):
            with _in_force(forces, name):
                steps[name]()  # not timed: caches settle
                start = time.perf_counter()
                steps[name]()
                times[name].append(time.perf_counter() - start)
    return times


def _is_far(times: dict[str, list[float]], name: str) -> bool:
    """Whether it was over twice as slow in every round, in steps that are long."""
    rounds = zip(times["baseline"], times[name], strict=False)
    return min(times[name]) > FAR_STEP_S and all(2 * ours < its for ours, its in rounds)


@contextmanager
def _in_force(forces: Forces, name: str) -> Iterator[None]:
    if name not in forces:
        yield
        return
    with forces[name]():
        yield


def broken(row: dict[str, Any]) -> list[str]:
    """The promises that this row breaks."""
    return [
        text
        for text, holds in (
            (f"below {AGAINST_BEST} of the best", row["tuned_over_best"][0] >= AGAINST_BEST),
            ("more than a quarter of the time", row["tuned_s"] <= SHARE_OF_TIME * row["grid_s"]),
            ("slower than baseline", row["tuned_over_baseline"][0] >= AGAINST_BASELINE),
        )
        if not holds
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, as it stands in the README."""
    if not rows:
        return "nothing measured yet"
    hands = list(dict.fromkeys(label for row in rows for label in row["by_hand"]))
    head = ["workload", "tuned plan", "over baseline", "of the grid's best", "time, of the grid's"]
    lines = [rows[0]["machine"], "", line_of([*head, *(h for h in hands if h != "tuned")])]
    lines.append(line_of(["---"] * (len(head) + len(hands) - 1)))
    for row in rows:
        share = row["tuned_s"] / row["grid_s"]
        cells = [
            row["workload"],
            row["tuned"] if row["tuned"] != "baseline" else "leave it as it is",
            _shown(row["tuned_over_baseline"]),
            f"{row['tuned_over_best'][0]:.2f} ({row['best']})",
            f"{row['tuned_s']:.0f} of {row['grid_s']:.0f} s, {share:.0%}",
        ]
        cells += [_shown(row["by_hand"].get(h, "–")) for h in hands if h != "tuned"]
        lines.append(line_of(cells))
    problems = [f"{row['workload']}: {one}" for row in rows for one in broken(row)]
    return "\n".join([*lines, "", *(problems or ["every promise holds"])])


def _shown(found: list[float] | str) -> str:
    if isinstance(found, str):
        return found
    if found[1] <= 0:
        return f"{found[0]:.2f}×, {FEW_ROUNDS} rounds"
    return f"{found[0]:.2f}× [{found[1]:.2f}, {found[2]:.2f}]"


def _line(row: dict[str, Any]) -> str:
    return f"{row['workload']}: {row['tuned']} {_shown(row['tuned_over_baseline'])}"


def _ratio(baseline: list[float], times: list[float]) -> Ratio:
    pairs = min(len(baseline), len(times))
    return paired_ratio(baseline[:pairs], times[:pairs])


def _listed(found: Ratio) -> list[float]:
    return [found.median, found.low, found.high]


if __name__ == "__main__":
    sys.exit(main())
