"""Does `check()` tell right rewrites from wrong ones, and time them as the engine does?

Every rewrite of `_rewrites` is judged: right ones must pass, faults and cheats must be found. Then
ten right ones are timed by `check()` and, as variants of one step, by the engine of
`%%speedbench --compare`: both must say the same of each.

    python tests/benchmarks/judge.py [--part right|faults|cheats|speed]

About six minutes. Exits 1 where a verdict is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from _program import exit_code, machine
from _rewrites import CHEATS, FAULTS, RIGHT, Rewrite

from speedkit_jupyter import check
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.step.variants import Variant

PARTS: dict[str, list[Rewrite]] = {"right": RIGHT, "faults": FAULTS, "cheats": CHEATS}
SHORT = {"small": (1, 2, 16, 16), "odd": (2, 3, 37, 24)}
LONG = {"realistic": (2, 8, 512, 64)}
PAIRS, BUDGET_S = 10, 8.0
# The function that the step calls: no benchmark puts a context variable back.
CALLED: ContextVar[Any] = ContextVar("called")


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=(*PARTS, "speed"))
    chosen = parser.parse_args().part
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures = []
    for part, cases in PARTS.items():
        for case in cases if chosen in (None, part) else ():
            options: dict[str, Any] = {"gradients": part != "cheats", "budget_s": 1.5}
            found = check(case.candidate, case.reference, case.inputs, sizes=SHORT, **options)
            print(
                f"{part:7} {case.name:34} {found.passed!s:6} {'; '.join(found.faults)[:90]}",
                flush=True,
            )
            failures += [case.name] if found.passed != (part == "right") else []
    plain = [case for case in RIGHT if not isinstance(case.reference, torch.nn.Module)]
    for case in plain[:PAIRS] if chosen in (None, "speed") else ():
        found = check(
            case.candidate,
            case.reference,
            case.inputs,
            sizes=LONG,
            budget_s=BUDGET_S,
            gradients=False,
        )
        ours, engines = found.sizes[0].ratio, by_engine(case)
        print(f"speed   {case.name:34} check {ours}, engine {engines}", flush=True)
        failures += [] if ours and engines and agree(ours, engines) else [case.name]
    print(machine())
    return exit_code([f"not as it should be: {name}" for name in failures])


def agree(one: Ratio, other: Ratio) -> bool:
    """Return whether both say the same: one word, or intervals that overlap."""
    return one.verdict == other.verdict or (one.low <= other.high and other.low <= one.high)


def by_engine(case: Rewrite) -> Ratio | None:
    """Return the result of a comparison of two variants of one step."""
    inputs, anchor = case.inputs(LONG["realistic"]), torch.nn.Linear(1, 1)
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    CALLED.set(case.reference)

    def step() -> object:
        return CALLED.get()(*positional, **named)

    variants = [Variant("baseline"), Variant("candidate", around=partial(called, case.candidate))]
    bench = Benchmark(step_of(step, anchor, []), variants, BUDGET_S)
    for _ in bench.run():
        pass
    return bench.result().ratio(bench.result().records[1])


@contextmanager
def called(function: Any) -> Iterator[None]:
    """Have the step call this function in the block."""
    token = CALLED.set(function)
    try:
        yield
    finally:
        CALLED.reset(token)


if __name__ == "__main__":
    sys.exit(main())
