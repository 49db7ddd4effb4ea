"""The accuracy that the user names: a function of theirs that gives one number."""

from __future__ import annotations

import ast
import inspect
import math
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.scores import Better, Score
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a

if TYPE_CHECKING:
    import torch

# Less is better of what has one of these words in its name.
LOWER = frozenset(
    (
        "loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "mape", "wer",
        "cer", "bpb", "fid", "distance",
    )
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class NamedAccuracy:
    """`function` gives the number, and `name` is the user's word for it.

    `better` says which way is better; `allowed` is how much worse a plan may make it, in its own
    units, or None for the default of `scores`.
    """

    name: str
    function: Callable[..., object]
    better: Better = "higher"
    allowed: float | None = None

    def bound(self, models: Sequence[torch.nn.Module]) -> Callable[[], object]:
        """Return a call without arguments; a function of one argument gets the step's model.

        Raises StepError if it takes more, or if there are several models.
        """
        needed = required(self.function)
        if not needed:
            return self.function
        if len(needed) == 1 and len(models) == 1:
            return partial(self.function, models[0])
        several = f", and the step has {len(models)} models" if len(needed) == 1 else ""
        raise StepError(
            f"{self.name} takes {', '.join(needed)}{several}: give an expression, as "
            f"{self.name}({', '.join(needed)}), or from Python lambda: {self.name}(…)"
        )

    def score(self, given: object) -> Score:
        """Return the score of a number, or of how many examples are right, of how many.

        Raises StepError for everything else, and for numbers that are not finite.
        """
        if is_a(given, tuple | list) and len(given) == 2 and all(map(_is_count, given)):  # type: ignore[arg-type, call-overload]
            right, examples = (int(count) for count in given)  # type: ignore[attr-defined]
            if 0 <= right <= examples and examples:
                return Score(right / examples, right, examples)
        if is_a(given, bool) or not is_a(given, numbers.Real):
            raise StepError(
                f"{self.name} gives {type(given).__name__}, and not a number: give one, or how "
                "many examples are right, of how many"
            )
        value = float(given)  # type: ignore[arg-type]
        if not math.isfinite(value):
            raise StepError(f"{self.name} gives {value}, by which nothing can be judged")
        return Score(value)


def named_accuracy(
    function: Any, better: Any = None, allowed: Any = None, name: str = ""
) -> NamedAccuracy | None:
    """Return what a public function was given; None without one. Raises StepError."""
    allowed = arguments.amount("allowed", allowed)
    if better not in (None, "higher", "lower"):
        raise StepError(f"better must be 'higher' or 'lower', not {better!r:.80}")
    if function is None:
        if better is not None or allowed is not None:
            raise StepError("better and allowed belong to an accuracy: accuracy=evaluate")
        return None
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"of class {type(function).__name__}"
        raise StepError(f"the accuracy must be a function that gives a number; this is {kind}")
    name = name or _name(function)
    return NamedAccuracy(name, function, better or by_its_name(name), allowed)


def by_its_name(name: str) -> Better:
    """Return which way is better, by the last name of `trainer.evaluate()["eval_loss"]`."""
    words = {part.lower() for part in re.findall(r"[a-z]+|[A-Z][a-z]*", _last_name(name))}
    return "lower" if words & LOWER else "higher"


def _last_name(expression: str) -> str:
    """Return the last name or key that gives the number; empty if it is computed."""
    try:
        node: Any = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        return ""
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript):
        return str(getattr(node.slice, "value", ""))
    return str(getattr(node, "attr", getattr(node, "id", "")))


def required(function: Any) -> list[str]:
    """Return the names of the arguments that must be given."""
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some of those that are written in C
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in every if one.default is one.empty and one.kind not in free]


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else "accuracy"  # a lambda has no name of its own


def _is_count(value: Any) -> bool:
    return is_a(value, numbers.Integral) and not is_a(value, bool)
