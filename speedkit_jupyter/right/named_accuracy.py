"""The accuracy that the user names: a function that gives a number, and its number under a plan."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.support.lookup import is_a

Better = Literal["higher", "lower"]

# A name with one of these words is better where it is lower.
LOWER = {
    "loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "mape", "wer", "cer",
    "bpb", "fid", "distance",
}  # fmt: skip
# The share that may be lost by default: 1 %, as MLPerf allows a quantized model.
SHARE = 0.01


@dataclass(frozen=True)
class Scored:
    """The numbers of the model as it is and under a plan.

    `after` is None where the function gave nothing, and `failure` says why. `asked` is how much
    worse it may be, in its own units, if the user said so.
    """

    function: str
    before: float
    after: float | None
    better: Better = "higher"
    asked: float | None = None
    failure: str = ""

    @property
    def lost(self) -> float:
        """Return by how much it is worse under the plan; below 0 where it is better."""
        if self.after is None:
            return math.inf
        lost = self.before - self.after
        return lost if self.better == "higher" else -lost

    @property
    def allowed(self) -> float:
        """Return how much worse the number may get, in its own units."""
        return SHARE * abs(self.before) if self.asked is None else self.asked

    @property
    def is_accepted(self) -> bool:
        # With room for the rounding of decimal fractions: 0.912 - 0.902 is more than 0.01.
        return self.lost <= self.allowed + 1e-9 * abs(self.before)

    def to_dict(self) -> dict[str, Any]:
        lost = self.lost if self.after is not None else None
        derived = {"lost": lost, "allowed": self.allowed, "accepted": self.is_accepted}
        return asdict(self) | derived


@dataclass(frozen=True, eq=False)
class NamedAccuracy:
    """`function` gives the number, and `name` is the user's word for it.

    `allowed` is how much worse a plan may make it, in its own units, or None for the default.
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

    def score(self, given: Any) -> float:
        """Return a number; of two integers the share: right examples of all examples.

        Raises StepError for everything else, and for numbers that are not finite.
        """
        is_pair = is_a(given, tuple | list) and len(given) == 2
        if is_pair and all(is_a(one, numbers.Integral) for one in given):
            right, examples = map(int, given)
            given = right / examples if 0 <= right <= examples and examples else given
        if is_a(given, bool) or not is_a(given, numbers.Real):
            raise StepError(
                f"{self.name} gives {type(given).__name__}, and not a number: give one, or how "
                "many examples are right, of how many"
            )
        if not math.isfinite(given):
            raise StepError(f"{self.name} gives {given}, by which nothing can be judged")
        return float(given)


def named_accuracy(
    function: Any, better: Any = None, allowed: Any = None, name: str = ""
) -> NamedAccuracy | None:
    """Return the accuracy of a public function's arguments; None without one. Raises StepError."""
    allowed = arguments.amount("allowed", allowed)
    if better not in (None, "higher", "lower"):
        raise StepError(f"better must be 'higher' or 'lower', not {better!r:.80}")
    if function is None:
        if better is not None or allowed is not None:
            raise StepError("better and allowed belong to an accuracy: accuracy=evaluate")
        return None
    if not callable(function):
        kind = type(function).__name__
        raise StepError(f"the accuracy must be a function that gives a number, not {kind}")
    name = name or _name(function)
    return NamedAccuracy(name, function, better or by_its_name(name), allowed)


def by_its_name(name: str) -> Better:
    """Return which way is better, by the last name of `trainer.evaluate()["eval_loss"]`."""
    chain = name.strip()
    while (shorter := re.sub(r"\([^()]*\)", "", chain)) != chain:  # without calls
        chain = shorter
    last = re.fullmatch(r"[\w.\[\]'\"]*?(\w+)['\"\]]*", chain)  # else it is computed
    words = re.findall(r"[a-z]+|[A-Z][a-z]*", last[1]) if last else ()
    return "lower" if LOWER.intersection(word.lower() for word in words) else "higher"


def required(function: Any) -> list[str]:
    try:
        every = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions that are written in C
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in every if one.default is one.empty and one.kind not in free]


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else "accuracy"  # a lambda has no name
