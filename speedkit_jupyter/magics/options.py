"""The options that several commands share, `--accuracy` among them, and those of `%%speedbench`."""

from __future__ import annotations

import argparse
import ast
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.line import Parser, names_of, number, seconds, whole_number
from speedkit_jupyter.magics.namespace import find_function
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy, named_accuracy
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError

MODEL = "the model: `net`, `trainer.model`, `models['lm']`; without it the only one"
OPTIMIZER = "its optimizers, with commas; without it those that hold the model's parameters"
STEP = "the function that trains; without it the last %%speedbench cell"
# What `%%speedbench` refuses where there is nothing to judge.
ACCURACY = ("accuracy", "allowed", "better")
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


def add_model(parser: Parser, about: str = MODEL) -> None:
    """Add the model that a line is about."""
    parser.option("model", "MODEL", about, suggestions.models, nargs="?")


def add_optimizer(parser: Parser, about: str = OPTIMIZER) -> None:
    """Add `--optimizer NAMES`."""
    add_names(parser, "--optimizer", about, suggestions.optimizers)


def add_names(parser: Parser, option: str, about: str, found: Any = None) -> None:
    """Add an option that takes a list with commas, more than once."""
    parser.option(option, "NAMES", about, found, type=names_of, action="extend")


def add_step(parser: Parser, about: str = STEP) -> None:
    """Add `--step NAME`."""
    parser.option("--step", "NAME", about, suggestions.functions)


def add_budget(parser: Parser, about: str) -> None:
    """Add `--budget SECONDS`."""
    parser.option("--budget", "SECONDS", about, type=seconds)


def add_result(parser: Parser, about: str = "the variable that the result gets") -> None:
    """Add `-v NAME`."""
    parser.option("-v", "NAME", about)


def add_accuracy(parser: Parser) -> None:
    """Add `--accuracy`, and what belongs to it."""
    about = "a function or expression that gives a number: it decides about changed results"
    parser.option("--accuracy", "FUNCTION", about, suggestions.functions)
    allowed = "how much worse it may be, in its own units (a hundredth of what it is)"
    parser.option("--allowed", "NUMBER", allowed, type=number(float, "a number from 0 on", 0))
    better = "which way is better (by its name: lower for a loss or an error)"
    parser.option("--better", None, better, choices=("higher", "lower"))


def accuracy_of(
    names: MutableMapping[str, Any], arguments: argparse.Namespace, command: str
) -> NamedAccuracy | None:
    """Return what the line names as its accuracy, None without; raises UsageError."""
    text = arguments.accuracy
    if text is None and (arguments.better or arguments.allowed is not None):
        raise UsageError(f"{command}: --allowed and --better belong to --accuracy FUNCTION")
    function = None if text is None else _function(names, text, command)
    try:
        return named_accuracy(function, arguments.better, arguments.allowed, text or "")
    except SpeedKitError as error:
        raise UsageError(f"{command}: --accuracy: {error}") from None


def _function(names: MutableMapping[str, Any], text: str, command: str) -> Any:
    """By its name; an expression becomes a function that computes it anew each time."""
    try:
        return find_function(names, lookup.canonical(text), f"{command}: --accuracy")
    except SpeedKitError:
        pass
    try:
        ast.parse(text.strip(), mode="eval")
        code = compile(f"lambda: ({text.strip()}\n)", "<accuracy>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(
            f"{command}: --accuracy {text!r:.80} is no expression: name a function, or write one "
            'in quotes, as --accuracy "evaluate(model, test)"'
        ) from None
    return eval(code, names)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def speedbench_parser() -> Parser:
    """Return the parser of `%%speedbench`: options of `%%timeit`, a comparison and a search."""
    from speedkit_jupyter.measure.rounds.timeit_run import RUNS  # its engine is not needed to load

    parser = Parser("%%speedbench")
    plans = "compare plans: baseline, current, auto, words as bf16+compile, YAML files, saved names"
    parser.option("--compare", "NAMES", plans, suggestions.variants)
    add_budget(parser, "for all but compiling (10, for a search 20, or more where a step is long)")
    models = "the models that get the plans; without it those that the cell uses"
    add_names(parser, "--model", models, suggestions.models)
    add_optimizer(parser, "their optimizers; without it those that the cell uses")
    add_names(
        parser, "--check", "what the cell leaves, to compare in place of what backward ran on"
    )
    add_accuracy(parser)
    parser.option("--save", "NAME", "keep the result for %speedkit history and --compare")
    for option, about in SWITCHES.items():
        parser.switch(option, about)
    aim = "with --tune: what to make less of (time)"
    parser.option("--objective", None, aim, choices=("time", "memory"))
    factor = number(float, "a factor of 1 or more, as in 1.2", 1)
    slower = "with --objective memory: how many times slower it may get (1.2)"
    parser.option("--within", "TIMES", slower, type=factor)
    steps = "with --tune: the least total time for so many steps, compiling included"
    parser.option("--steps", "NUMBER", steps, type=whole_number)
    keep = "with --tune: the optimizations that stay as they are (precision,tf32: full float32)"
    add_names(parser, "--keep", keep, suggestions.optimizations)
    loops = number(int, "a number of loops: give 1 or more, or 0 to choose it", 0)
    parser.option(
        "-n", "LOOPS", "timing: loops in a run; 0 or none: until it takes 0.2 s", type=loops
    )
    parser.option("-r", "RUNS", f"timing: how many runs ({RUNS})", type=whole_number)
    digits = number(int, "a number of digits: give 0 to 15", 0, 15)
    parser.option("-p", "DIGITS", "timing: digits to show (3)", type=digits)
    add_result(parser)
    return parser
