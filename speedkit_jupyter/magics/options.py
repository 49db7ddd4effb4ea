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
    "model", "MODEL", "`net`, `trainer.model`, `models['lm']`", namespace.models_to_name, nargs="?"
)
OPTIMIZER = listed("--optimizer", "without it those of the model", namespace.optimizers)
LOADER = Option("--loader", "NAME", "its DataLoader, where the code hides it", namespace.loaders)
RESULT = Option("-v", "NAME", "the variable that the result gets")
_amount = number(float, "a number from 0 on", 0)
_loops = number(int, "a number of loops: give 1 or more, or 0 to choose it", 0)
_digits = number(int, "a number of digits: give 0 to 15", 0, 15)
_factor = number(float, "a factor of 1 or more, as in 1.2", 1)
ACCURACY = (
    Option("--accuracy", "FUNCTION", "what decides about changed results", namespace.functions),
    Option("--allowed", "NUMBER", "how much worse it may be (a hundredth)", type=_amount),
    Option("--better", None, "by its name: lower for a loss", choices=("higher", "lower")),
)
# Those of `%%timeit`, of a comparison and of a search.
SPEEDBENCH = (
    Option("--compare", "NAMES", "plans: bf16+compile, auto, current, YAML files, saved", plans),
    budget("for all but compiling (10, for a search 20, or more where a step is long)"),
    listed("--model", "what gets the plans; without it what the cell uses", namespace.models),
    listed("--optimizer", "theirs; without it those that the cell uses", namespace.optimizers),
    listed("--check", "what the cell leaves, to compare in place of what backward ran on"),
    *ACCURACY,
    Option("--save", "NAME", "keep the result for %speedkit history and --compare"),
    switch("--profile", "where the time goes: data, forward, backward, optimizer, lines"),
    switch("--tune", "search the fastest safe plan for this cell"),
    switch("--apply", "with --tune: put what was found into force"),
    switch("--fresh", "with --tune: search although a plan is known"),
    switch("--throughput", "await the device only after blocks of steps"),
    switch("-q", "show nothing"),
    switch("-o", "return the result"),
    Option("--objective", None, "with --tune: make this less (time)", choices=("time", "memory")),
    Option("--within", "TIMES", "for memory: how many times slower it may get", type=_factor),
    Option("--steps", "NUMBER", "with --tune: the least time for so many", type=whole_number),
    listed("--keep", "with --tune: what stays as it is (precision,tf32)", catalog),
    Option("-n", "LOOPS", "timing: loops in a run (until it takes 0.2 s)", type=_loops),
    Option("-r", "RUNS", f"timing: how many runs ({RUNS})", type=whole_number),
    Option("-p", "DIGITS", "timing: digits to show (3)", type=_digits),
    RESULT,
)


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
