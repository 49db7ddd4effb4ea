"""How the next state follows from the operator's result `f(x)` and the state `x`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean

Policy = Callable[[Any, Any], Any]


def _autoregressive(found: Any, x: Any) -> Any:
    return found


def _convex(found: Any, x: Any, alpha: float) -> Any:
    return x + alpha * (found - x)


def _residual(found: Any, x: Any, dt: float) -> Any:
    return x + dt * found


# Those that take a number.
WITH_NUMBER = {"convex": _convex, "residual": _residual}
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
        return _autoregressive
    word, *numbers = policy if isinstance(policy, list | tuple) and policy else (policy,)
    if word in WITH_NUMBER and len(numbers) == 1:
        number = numbers[0]
        if isinstance(number, int | float) and math.isfinite(number):
            return partial(WITH_NUMBER[word], **{"convex": {"alpha": number},
                                                 "residual": {"dt": number}}[word])  # fmt: skip
    near = did_you_mean(word, WORDS) if isinstance(word, str) and word not in WORDS else ""
    raise ArgumentError(f"policy must be {FORMS}, not {arguments.shown(policy)}.{near}")
