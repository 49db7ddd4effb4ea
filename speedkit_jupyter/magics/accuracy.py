"""`--accuracy`: a function of the user's, or an expression of the notebook, that gives a number."""

from __future__ import annotations

import argparse
import ast
import math
from collections.abc import MutableMapping
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.line import Parser
from speedkit_jupyter.magics.namespace import find_function
from speedkit_jupyter.magics.options import offer
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy, named_accuracy
from speedkit_jupyter.support import lookup
from speedkit_jupyter.support.exceptions import SpeedKitError

# What `%%speedbench` refuses where there is nothing to judge.
OPTIONS = ("accuracy", "allowed", "better")


def add_accuracy(parser: Parser) -> None:
    """`--accuracy`, and what belongs to it."""
    about = "a function or expression that gives a number: it decides about other models"
    offer(parser.add_argument("--accuracy", metavar="FUNCTION", help=about), suggestions.functions)
    allowed = "how much worse it may be, in its own units (a hundredth of what it is)"
    parser.add_argument("--allowed", type=amount, metavar="NUMBER", help=allowed)
    better = "which way is better (by its name: lower for a loss or an error)"
    parser.add_argument("--better", choices=("higher", "lower"), help=better)


def amount(text: str) -> float:
    """Not below 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"a number from 0 on, not {text!r:.80}")
    return number


def named(
    names: MutableMapping[str, Any], arguments: argparse.Namespace, command: str
) -> NamedAccuracy | None:
    """What the line names; None where it names nothing. Raises UsageError."""
    text = arguments.accuracy
    if text is None and (arguments.better or arguments.allowed is not None):
        raise UsageError(f"{command}: --allowed and --better belong to --accuracy FUNCTION")
    function = None if text is None else _function(names, text, command)
    try:
        return named_accuracy(function, arguments.better, arguments.allowed, text or "")
    except SpeedKitError as error:
        raise UsageError(f"{command}: --accuracy: {error}") from None


def _function(names: MutableMapping[str, Any], text: str, command: str) -> Any:
    """By its name; an expression becomes one that is computed anew each time."""
    try:
        word = lookup.canonical(text)
    except SpeedKitError:
        return _computed(names, text, command)
    return find_function(names, word, f"{command}: --accuracy")


def _computed(names: MutableMapping[str, Any], text: str, command: str) -> Any:
    try:
        ast.parse(text.strip(), mode="eval")
        code = compile(f"lambda: ({text.strip()}\n)", "<accuracy>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(
            f"{command}: --accuracy {text!r:.80} is no expression: name a function, or write one "
            'in quotes, as --accuracy "evaluate(model, test)"'
        ) from None
    return eval(code, names)  # type: ignore[arg-type]
