"""Define variants: named plans, such as `bf16+compile`, made of words of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from speedkit_jupyter.catalog import CATALOG, find
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.plans.config import Origin, SpeedConfig, from_word
from speedkit_jupyter.support.exceptions import StepError, did_you_mean

BASELINE, CURRENT, AUTO = "baseline", "current", "auto"


@dataclass(frozen=True)
class Variant:
    """A named plan; `config` is None for `baseline` (no plan) and `current` (the plan in force).

    `around` returns a context manager for a change that plans can't make. `proof` replaces the
    accuracy check: it takes a function that restores the user's state, and returns the Accuracy.
    """

    name: str
    config: SpeedConfig | None = None
    around: Callable[[], AbstractContextManager[Any]] | None = field(default=None, compare=False)
    proof: Callable[[Callable[[], None]], Any] | None = field(default=None, compare=False)


def variant(name: str) -> Variant:
    """Return a variant by name: `baseline`, `auto`, `bf16+compile:max-autotune`, `plan.yaml`.

    Raises ConfigError for a wrong file or value, StepError for a wrong, repeated or missing word.
    """
    if name in (BASELINE, CURRENT):
        return Variant(name)
    if name == AUTO:
        return Variant(name, SpeedConfig())
    if name.endswith((".yaml", ".yml")):
        return Variant(Path(name).stem, SpeedConfig.from_yaml(name))
    values: dict[str, Any] = {}
    for word in name.split("+"):
        if not word:
            raise StepError(f"variant {name}: a word is missing at its +, as in bf16+compile")
        if word in (BASELINE, CURRENT, AUTO):
            raise StepError(f"variant {name}: {word} is a whole plan, and can't be joined")
        option = _option(word)
        if twice := next((key for key in option if key in values), None):
            raise StepError(f"variant {name}: it names {twice} twice")
        values.update(option)
    return of_values(name, values)


def config_of(variant: Variant, model: torch.nn.Module) -> SpeedConfig | None:
    """Return a variant's config; `current` means the plan in force. Return None without a plan."""
    if variant.name != CURRENT:
        return variant.config
    context = applied_to(model)
    return None if context is None else context.own_plan.to_config()


def of_values(name: str, values: Mapping[str, Any]) -> Variant:
    """Return a variant that sets only these values; environment variables don't override them."""
    every = [optimization.name for optimization in CATALOG]
    return Variant(name, SpeedConfig(Origin(f"variant {name}", every), **values).alone())


def words() -> Mapping[str, dict[str, Any]]:
    """Return the option (name and value) of each word, such as `bf16` and `sdpa:math`."""
    return {
        word: {optimization.name: value}
        for optimization in CATALOG
        for word, value in optimization.changes().items()
    }


def _option(word: str) -> dict[str, Any]:
    vocabulary = words()
    if word in vocabulary:
        return vocabulary[word]
    name, _, value = word.partition(":")
    free = [f"{entry.name}:{entry.free}" for entry in CATALOG if entry.free]
    optimization = find(name)
    if optimization is not None and optimization.free and value:
        return {optimization.name: from_word(value)}
    names = [BASELINE, CURRENT, AUTO, *vocabulary, "threads:1", "device:cpu"]
    raise StepError(
        f"unknown variant {word!r}.{did_you_mean(word, names)} Names are {', '.join(names[:3])}, "
        f"a YAML file, or words joined by +: {', '.join([*vocabulary, *free])}"
    )
