"""How the next state follows from the operator's result `f(x)` and the state `x`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any

from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean

Policy = Callable[[Any, Any], Any]
# Those that take a number.
WITH_NUMBER: dict[str, Callable[[float], Policy]] = {
    "convex": lambda alpha: lambda found, x: x + alpha * (found - x),
    "residual": lambda dt: lambda found, x: x + dt * found,
}
WORDS = ("autoregressive", *WITH_NUMBER)
FORMS = '"autoregressive", ("convex", 0.5), ("residual", 0.01) or a function of f(x) and x'


def policy_of(policy: Any) -> Policy:
    """Return the function of `f(x)` and `x`. Raises ArgumentError for what is none."""
    if callable(policy):
        with suppress(ValueError):  # some of torch's functions have no signature
            try:
                signature(policy).bind(None, None)
            except TypeError:
                raise ArgumentError("a policy is a function of two: f(x) and x") from None
        return policy  # type: ignore[no-any-return]
    if policy == "autoregressive":
        return lambda found, x: found
    word, *numbers = policy if isinstance(policy, list | tuple) and policy else (policy,)
    if word in WITH_NUMBER and len(numbers) == 1:
        (number,) = numbers
        if isinstance(number, int | float) and math.isfinite(number):
            return WITH_NUMBER[word](number)
    near = did_you_mean(word, WORDS) if isinstance(word, str) and word not in WORDS else ""
    raise ArgumentError(f"policy must be {FORMS}, not {arguments.shown(policy)}.{near}")
