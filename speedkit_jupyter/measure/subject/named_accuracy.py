"""The accuracy that the user names: a function of theirs that gives one number."""

from __future__ import annotations

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

# Of what is called so, less is better.
LOWER = frozenset(
    (
        "loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "mape", "wer",
        "cer", "bpb", "fid", "distance",
    )
)  # fmt: skip
WORD = re.compile(r"[a-z]+|[A-Z][a-z]*")
# The arguments of the last call.
CALL = re.compile(r"\([^()]*\)\s*$")
# Names, attributes, calls and keys.
PATH = re.compile(r"[\w.,= ()\[\]'\"]*")


@dataclass(frozen=True, eq=False)
class NamedAccuracy:
    """`function` gives the number, and `name` is the user's word for it.

    `better` is the way in which it is; `allowed`, how much worse a plan may make it, in its own
    units, or None for what `scores` has it. Raises StepError for what is no such function.
    """

    name: str
    function: Callable[..., object]
    better: Better = "higher"
    allowed: float | None = None

    def bound(self, models: Sequence[torch.nn.Module]) -> Callable[[], object]:
        """As it is called; one that takes one argument is given the model of the step.

        Raises StepError where it takes more, or there are more models.
        """
        needed = required(self.function)
        if not needed:
            return self.function
        if len(needed) == 1 and len(models) == 1:
            return partial(self.function, models[0])
        takes = f"takes {', '.join(needed)}"
        if len(needed) == 1:
            takes += f", and the step has {len(models)} models"
        raise StepError(
            f"{self.name} {takes}: give an expression, as {self.name}({', '.join(needed)}), or "
            f"from Python lambda: {self.name}(…)"
        )

    def score(self, given: object) -> Score:
        """Of what the function gave: a number, or how many examples are right, of how many.

        Raises StepError for everything else, and for numbers that are not finite.
        """
        if (pair := _pair(given)) is not None:
            right, examples = pair
            return Score(right / examples, right, examples)
        if is_a(given, bool) or not is_a(given, numbers.Real):
            raise StepError(f"{self.name} gives {_kind(given, self.name)}")
        value = float(given)  # type: ignore[arg-type]
        if not math.isfinite(value):
            raise StepError(f"{self.name} gives {value}, by which nothing can be judged")
        return Score(value)


def named_accuracy(
    function: Any, better: Any = None, allowed: Any = None, name: str = ""
) -> NamedAccuracy | None:
    """From what a public function was given; None without one. Raises StepError."""
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
    """Return which way is better, by the last name of an expression that gives the number:
    `trainer.evaluate()["eval_loss"]`.
    """
    while CALL.search(name):
        name = CALL.sub("", name)
    last = re.findall(r"\w+", name)[-1:] if PATH.fullmatch(name) else []  # else it is computed
    words = {word.lower() for word in WORD.findall("".join(last))}
    return "lower" if words & LOWER else "higher"


def required(function: Any) -> list[str]:
    """The arguments that must be given."""
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some of those that are written in C
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in every
        if parameter.default is parameter.empty and parameter.kind not in free
    ]


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else "accuracy"  # a lambda has no name of its own


def _pair(given: object) -> tuple[int, int] | None:
    """How many are right, of how many; None for what is no such pair."""
    if not is_a(given, tuple | list) or len(given) != 2:  # type: ignore[arg-type]
        return None
    counts = [number for number in given if is_a(number, numbers.Integral)]  # type: ignore[attr-defined]
    if len(counts) != 2 or any(is_a(number, bool) for number in counts):
        return None
    right, examples = (int(number) for number in counts)
    return (right, examples) if 0 <= right <= examples and examples else None


def _kind(given: object, name: str) -> str:
    """What came, and what to write in its stead."""
    import torch

    if is_a(given, torch.Tensor):
        return "a tensor: give the number in it, as .item() does"
    if given is None:
        return "nothing: end it with `return` and its number"
    if is_a(given, dict):
        keys = [key for key, value in given.items() if is_a(value, numbers.Real)]  # type: ignore[attr-defined]
        key = keys[0] if keys else "accuracy"
        return f"a dict: name one number of it, as {name.removesuffix('()')}()[{key!r}]"
    what = "give one, or how many examples are right, of how many"
    return f"{type(given).__name__}, and not a number: {what}"
