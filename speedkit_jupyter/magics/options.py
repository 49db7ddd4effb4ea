"""The options that several commands share, `--accuracy` among them, and those of `%%speedbench`."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import namespace
from speedkit_jupyter.magics.line import (
    Names,
    Option,
    Parser,
    names_of,
    number,
    seconds,
    switch,
    whole_number,
)
from speedkit_jupyter.measure.rounds.timeit_run import RUNS
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy, named_accuracy
from speedkit_jupyter.measure.subject.variants import AUTO, BASELINE, CURRENT, words
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import canonical


def listed(name: str, about: str, found: Any = None) -> Option:
    """Return an option that takes a list with commas, more than once."""
    return Option(name, "NAMES", about, found, type=names_of, action="extend")


def budget(about: str) -> Option:
    """Return `--budget SECONDS`."""
    return Option("--budget", "SECONDS", about, type=seconds)


def step(about: str) -> Option:
    """Return `--step NAME`."""
    return Option("--step", "NAME", about, namespace.functions)


def result(about: str = "the variable that the result gets") -> Option:
    """Return `-v NAME`."""
    return Option("-v", "NAME", about)


def saved(names: Mapping[str, Any]) -> list[str]:
    """Return the names of saved benchmarks; a store that can't be used has none."""
    with suppress(SpeedKitError):
        return sorted({entry.name for entry in database.saved()})
    return []


def plans(names: Mapping[str, Any]) -> list[str]:
    """Return what `--plan` and `--compare` take: words of the catalog, and saved names."""
    return [BASELINE, CURRENT, AUTO, *words(), *saved(names)]


def catalog(names: Mapping[str, Any]) -> list[str]:
    """Return the names of the catalog."""
    return [optimization.name for optimization in CATALOG]


def configs(names: Mapping[str, Any]) -> list[str]:
    """Return the YAML files here and one folder below."""
    return sorted(str(p) for pattern in ("*.y*ml", "*/*.y*ml") for p in Path().glob(pattern))


MODEL = Option(
    "model", "MODEL", "the model: `net`, `trainer.model`, `models['lm']`; without it the only one",
    namespace.models_to_name, nargs="?",
)  # fmt: skip
OPTIMIZER = listed(
    "--optimizer",
    "its optimizers, with commas; without it those that hold the model's parameters",
    namespace.optimizers,
)
LOADER = Option("--loader", "NAME", "its DataLoader, where the code hides it", namespace.loaders)
RESULT = result()
ACCURACY = (
    Option(
        "--accuracy", "FUNCTION",
        "a function or expression that gives a number: it decides about changed results",
        namespace.functions,
    ),
    Option(
        "--allowed", "NUMBER",
        "how much worse it may be, in its own units (a hundredth of what it is)",
        type=number(float, "a number from 0 on", 0),
    ),
    Option(
        "--better", None, "which way is better (by its name: lower for a loss or an error)",
        choices=("higher", "lower"),
    ),
)  # fmt: skip

_LOOPS = number(int, "a number of loops: give 1 or more, or 0 to choose it", 0)
_DIGITS = number(int, "a number of digits: give 0 to 15", 0, 15)
_FACTOR = number(float, "a factor of 1 or more, as in 1.2", 1)
# Those of `%%timeit`, of a comparison and of a search.
SPEEDBENCH = (
    Option(
        "--compare", "NAMES",
        "plans: baseline, current, auto, words as bf16+compile, YAML files, saved names",
        plans,
    ),
    budget("for all but compiling (10, for a search 20, or more where a step is long)"),
    listed(
        "--model", "the models that get the plans; without it those that the cell uses",
        namespace.models_to_name,
    ),
    listed(
        "--optimizer", "their optimizers; without it those that the cell uses",
        namespace.optimizers,
    ),
    listed("--check", "what the cell leaves, to compare in place of what backward ran on"),
    *ACCURACY,
    Option("--save", "NAME", "keep the result for %speedkit history and --compare"),
    switch(
        "--profile", "where the time goes: data, forward, backward, optimizer, waiting lines"
    ),
    switch("--tune", "search the fastest safe plan for this cell"),
    switch("--apply", "with --tune: put what was found into force"),
    switch("--fresh", "with --tune: search although a plan is known"),
    switch("--throughput", "await the device only after blocks of steps"),
    switch("-q", "show nothing"),
    switch("-o", "return the result"),
    Option(
        "--objective", None, "with --tune: what to make less of (time)",
        choices=("time", "memory"),
    ),
    Option(
        "--within", "TIMES",
        "with --objective memory: how many times slower it may get (1.2)", type=_FACTOR,
    ),
    Option(
        "--steps", "NUMBER",
        "with --tune: the least total time for so many steps, compiling included",
        type=whole_number,
    ),
    listed(
        "--keep",
        "with --tune: the optimizations that stay as they are (precision,tf32: full float32)",
        catalog,
    ),
    Option(
        "-n", "LOOPS", "timing: loops in a run; 0 or none: until it takes 0.2 s", type=_LOOPS
    ),
    Option("-r", "RUNS", f"timing: how many runs ({RUNS})", type=whole_number),
    Option("-p", "DIGITS", "timing: digits to show (3)", type=_DIGITS),
    RESULT,
)  # fmt: skip


def accuracy_of(names: Names, arguments: argparse.Namespace) -> NamedAccuracy | None:
    """Return what the line names as its accuracy, None without; raises UsageError."""
    text = arguments.accuracy
    if text is None and (arguments.better or arguments.allowed is not None):
        raise UsageError("--allowed and --better belong to --accuracy FUNCTION")
    try:
        function = None if text is None else _function(names, text)
        return named_accuracy(function, arguments.better, arguments.allowed, text or "")
    except SpeedKitError as error:
        raise UsageError(f"--accuracy: {error}") from None


def _function(names: Names, text: str) -> Any:
    """By its name; an expression becomes a function that computes it anew each time."""
    with suppress(SpeedKitError):
        return namespace.find_function(names, canonical(text))
    try:
        ast.parse(text.strip(), mode="eval")
        code = compile(f"lambda: ({text.strip()}\n)", "<accuracy>", "eval")
    except (SyntaxError, ValueError):
        raise UsageError(
            f"--accuracy {text!r:.80} is no expression: name a function, or write one in quotes, "
            'as --accuracy "evaluate(model, test)"'
        ) from None
    return eval(code, names)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def speedbench_parser() -> Parser:
    """Return the parser of `%%speedbench`."""
    return Parser("%%speedbench", SPEEDBENCH)
