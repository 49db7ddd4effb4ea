"""The options of `%%speedbench`."""

from __future__ import annotations

from functools import lru_cache

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.accuracy import add_accuracy
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.options import (
    add_optimizer,
    digits,
    loops,
    names,
    offer,
    seconds,
    times,
    whole_number,
)

NAME = "speedbench"
SWITCHES = {
    "--profile": "where the time goes: data, forward, backward, optimizer, waiting lines",
    "--tune": "search the fastest safe plan for this cell",
    "--apply": "with --tune: put it into force, a plan that is known at once",
    "--fresh": "with --tune: search although a plan is known",
    "--throughput": "await the device only after blocks of steps",
    "-q": "show nothing",
    "-o": "return the result",
    "-t": "timing: by the wall clock (time.time)",
    "-c": "timing: by CPU time",
}


@lru_cache(maxsize=1)
def parser() -> Parser:
    """Those of `%%timeit`, of a comparison, and of a search."""
    from speedkit_jupyter.measure.rounds.timeit_run import RUNS  # its engine is not needed to load

    parser = Parser(f"%%{NAME}")
    plans = "compare plans: baseline, current, auto, words as bf16+compile, YAML files, saved names"
    offer(parser.add_argument("--compare", metavar="NAMES", help=plans), suggestions.variants)
    budget = "for all but compiling (10, for a search 20, or more where a step is long)"
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help=budget)
    models = "the models that get the plans; without it those that the cell uses"
    action = parser.add_argument(
        "--model", type=names, action="extend", metavar="NAMES", help=models
    )
    offer(action, suggestions.models)
    add_optimizer(parser, "their optimizers; without it those that the cell uses")
    check = "what the cell leaves, to compare in place of what backward ran on"
    parser.add_argument("--check", type=names, action="extend", metavar="NAMES", help=check)
    add_accuracy(parser)
    save = "keep the result for %speedkit history and --compare"
    parser.add_argument("--save", metavar="NAME", help=save)
    for option, summary in SWITCHES.items():
        parser.add_argument(option, action="store_true", help=summary)
    aim = "with --tune: what to make less of (time)"
    parser.add_argument("--objective", choices=("time", "memory"), help=aim)
    slower = "with --objective memory: how many times slower it may get (1.2)"
    parser.add_argument("--within", type=times, metavar="TIMES", help=slower)
    steps = "with --tune: the least total time for so many steps, compiling included"
    parser.add_argument("--steps", type=whole_number, metavar="NUMBER", help=steps)
    keep = "with --tune: the optimizations that stay as they are (precision,tf32: full float32)"
    action = parser.add_argument("--keep", type=names, action="extend", metavar="NAMES", help=keep)
    offer(action, suggestions.optimizations)
    a_run = "timing: loops in a run; 0 or none: until a run takes 0.2 s"
    parser.add_argument("-n", type=loops, metavar="LOOPS", help=a_run)
    parser.add_argument(
        "-r", type=whole_number, metavar="RUNS", help=f"timing: how many runs ({RUNS})"
    )
    parser.add_argument("-p", type=digits, metavar="DIGITS", help="timing: digits to show (3)")
    parser.add_argument("-v", metavar="NAME", help="the variable that the result gets")
    return parser
