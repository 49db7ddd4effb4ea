"""Test whether `check()` tells right rewrites from wrong ones, and times them like `%%speedbench`.

Every rewrite of `_rewrites` is judged: right ones must pass, faults and cheats must be found. Then
ten right rewrites are timed twice: by `check()`, and by the engine of `%%speedbench --compare` as
variants of a step. The verdicts must be the same, or the intervals must overlap.
Takes about six minutes. Exits 1 if one of these conditions is not met.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from _program import machine, plain_parser
from _rewrites import CHEATS, FAULTS, RIGHT, Rewrite
from _tables import exit_code

from speedkit_jupyter import check
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import Variant

PARTS: dict[str, list[Rewrite]] = {"right": RIGHT, "faults": FAULTS, "cheats": CHEATS}
SHORT = {"small": (1, 2, 16, 16), "odd": (2, 3, 37, 24)}
LONG = {"realistic": (2, 8, 512, 64)}
PAIRS, BUDGET_S = 10, 8.0
# The step calls this function. Benchmarks don't restore context variables.
CALLED: ContextVar[Any] = ContextVar("called")


def main() -> int:
    parser = plain_parser(__doc__)
    parser.add_argument("--part", choices=(*PARTS, "speed"))
    chosen = parser.parse_args().part
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures = []
    for part, cases in PARTS.items():
        for case in cases if chosen in (None, part) else ():
            options: dict[str, Any] = {"gradients": part != "cheats", "budget_s": 1.5}
            found = check(case.candidate, case.reference, case.inputs, sizes=SHORT, **options)
            faults = "; ".join(found.faults)[:90]
            print(f"{part:7} {case.name:34} {found.passed!s:6} {faults}", flush=True)
            failures += [case.name] if found.passed != (part == "right") else []
    plain = [case for case in RIGHT if not isinstance(case.reference, torch.nn.Module)]
    for case in plain[:PAIRS] if chosen in (None, "speed") else ():
        given = (case.candidate, case.reference, case.inputs)
        found = check(*given, sizes=LONG, budget_s=BUDGET_S, gradients=False)
        ours, engines = found.sizes[0].ratio, by_engine(case)
        print(f"speed   {case.name:34} check {ours}, engine {engines}", flush=True)
        are_same = ours and engines and ours.verdict == engines.verdict
        overlap = ours and engines and ours.low <= engines.high and engines.low <= ours.high
        failures += [] if are_same or overlap else [case.name]
    print(machine())
    return exit_code([f"not as it should be: {name}" for name in failures])


def by_engine(case: Rewrite) -> Ratio | None:
    inputs, anchor = case.inputs(LONG["realistic"]), torch.nn.Linear(1, 1)
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    CALLED.set(case.reference)

    def step() -> object:
        return CALLED.get()(*positional, **named)

    variants = [Variant("baseline"), Variant("candidate", around=partial(called, case.candidate))]
    bench = Benchmark(step_of(step, anchor, []), variants, BUDGET_S)
    deque(bench.run(), maxlen=0)
    return bench.result().ratio(bench.result().records[1])


@contextmanager
def called(function: Any) -> Iterator[None]:
    token = CALLED.set(function)
    try:
        yield
    finally:
        CALLED.reset(token)


if __name__ == "__main__":
    sys.exit(main())
