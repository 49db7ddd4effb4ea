"""What options of several commands have in common: their types, and what Tab offers for them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from speedkit_jupyter.magics import suggestions
from speedkit_jupyter.magics.line import Parser

MODEL = "the model: `net`, `trainer.model`, `models['lm']`; without it the only one"
OPTIMIZER = "its optimizers, with commas; without it those that hold the model's parameters"


def offer_words(action: argparse.Action, words: Iterable[str]) -> None:
    """The words that it takes, for help and for Tab."""
    action.words = tuple(words)  # type: ignore[attr-defined]


def offer(action: argparse.Action, source: Callable[[Mapping[str, Any]], list[str]]) -> None:
    """What Tab offers for it, given the notebook's names."""
    action.found = source  # type: ignore[attr-defined]


def add_model(parser: Parser, about: str = MODEL) -> None:
    """The model that a line is about."""
    offer(parser.add_argument("model", nargs="?", metavar="MODEL", help=about), suggestions.models)


def add_optimizer(parser: Parser, about: str = OPTIMIZER) -> None:
    """`--optimizer NAMES`."""
    action = parser.add_argument(
        "--optimizer", type=names, action="extend", metavar="NAMES", help=about
    )
    offer(action, suggestions.optimizers)


def names(text: str) -> list[str]:
    """Of a list with commas."""
    return [name for name in text.split(",") if name]


def digits(text: str) -> int:
    """How many to show."""
    number = int(text)
    if not 0 <= number <= 15:
        raise argparse.ArgumentTypeError(f"{text} is no number of digits: give 0 to 15")
    return number


def whole_number(text: str) -> int:
    """How many times."""
    number = int(text)
    if not 1 <= number <= sys.maxsize:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of times: give 1 or more{_less(number)}"
        )
    return number


def loops(text: str) -> int:
    """How many in a run; 0 for as many as it takes."""
    number = int(text)
    if not 0 <= number <= sys.maxsize:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of loops: give 1 or more, or 0 to choose it{_less(number)}"
        )
    return number


def _less(number: int) -> str:
    return f", and less than {sys.maxsize}" if number > sys.maxsize else ""


def times(text: str) -> float:
    """By how much at the most."""
    number = float(text)
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no factor of 1 or more, as in 1.2")
    return number


def seconds(text: str) -> float:
    """How long."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(
            f"the budget must be a positive number of seconds, not {text}"
        )
    return number
