"""The user's own measure, such as the accuracy on test data, shown next to each speed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.step.step import Step, arguments_of
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError, in_a_line
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import interrupts


@dataclass(frozen=True, eq=False)
class NamedAccuracy:
    """The user's accuracy function, with its name."""

    name: str
    function: Callable[..., object]

    def number(self, step: Step) -> float:
        """Return the function's number for the models in their current state.

        A function of one argument gets the step's model. Raises StepError in one line.
        """
        step.rewind()
        try:
            given = interrupts.in_a_window(self._call(step.models))
        except SpeedKitError:
            raise
        except Exception as error:
            raise StepError(f"{self.name} raises {in_a_line(error)}") from None
        if is_a(given, bool) or not is_a(given, numbers.Real):
            raise StepError(f"{self.name} returns {type(given).__name__}, not a number")
        if not math.isfinite(given):
            raise StepError(f"{self.name} returns {given}, which can't be compared")
        return float(given)

    def _call(self, models: Sequence[torch.nn.Module]) -> Callable[[], Any]:
        needed = arguments_of(self.function)
        if not needed:
            return self.function
        if needed == len(models) == 1:
            return partial(self.function, models[0])
        takes = count(needed, "argument")
        several = f", and the step has {len(models)} models" if needed == 1 else ""
        raise StepError(f"{self.name} takes {takes}{several}: name a function without arguments")


def named_accuracy(function: Any, name: str = "") -> NamedAccuracy | None:
    """Return a public function's `accuracy` argument with its name, or None. Raises StepError."""
    if function is None:
        return None
    if not callable(function):
        kind = type(function).__name__
        raise StepError(f"the accuracy must be a function that returns a number, not {kind}")
    own = getattr(function, "__name__", "")
    return NamedAccuracy(name or (own if own.isidentifier() else "accuracy"), function)
