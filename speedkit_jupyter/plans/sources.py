"""What a config is given: options under whichever name, and the environment laid over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from speedkit_jupyter import machines
from speedkit_jupyter.optimizations import CATALOG, find
from speedkit_jupyter.plans.fields import Origin, allowed_keys
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.support.exceptions import did_you_mean


def prepared(
    values: Mapping[str, Any], origin: Origin, problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values under their names, with the environment laid over; add wrong keys to
    `problems`.
    """
    known: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        where = origin.where((key,))
        optimization = find(key)
        if optimization is None:
            problems.append(f"{where}{key}: unknown key; {allowed_keys(key)}")
        elif optimization.name in spelled:
            spelling = spelled[optimization.name]
            problems.append(f"{where}{key}: the same as {spelling!r}, which stands there too")
        else:
            spelled[optimization.name] = key
            known[optimization.name] = value
    _warn_of_unknown_variables()
    variables = {}
    for optimization in CATALOG:
        if optimization.name in origin.firm:
            continue
        if optimization.variable and os.environ.get(optimization.variable):
            variables[optimization.name] = optimization.variable
            word = os.environ[optimization.variable]
            known[optimization.name] = from_word(word, optimization.words)
    return known, variables


def _warn_of_unknown_variables() -> None:
    variables = {optimization.variable for optimization in CATALOG if optimization.variable}
    variables |= {database.FOLDER, machines.VARIABLE}
    for name in os.environ:
        if name.startswith("SPEEDKIT_") and name not in variables:
            hint = did_you_mean(name, variables)
            messages.warn(f"{name}: no such environment variable.{hint}")


def from_word(word: str, allowed: tuple[str, ...] = ()) -> Any:
    """Return a value as it is written in a shell.

    Where true is among the `allowed` words, 1, on and yes mean it too, and 0, off and no false;
    elsewhere digits are a number.
    """
    word = word.strip().lower()
    if "true" in allowed and word in ("1", "true", "on", "yes"):
        return True
    if "false" in allowed and word in ("0", "false", "off", "no"):
        return False
    return int(word) if word.isdecimal() else word
