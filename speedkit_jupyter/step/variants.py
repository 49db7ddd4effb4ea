"""Variants: plans with a name, built from the catalog's own words."""

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
    """A named plan. `config` is None for the model as it was (`baseline`) or is (`current`).

    `around` makes a further context in which it runs, for a change that is no plan's.
    """

    name: str
    config: SpeedConfig | None = None
    around: Callable[[], AbstractContextManager[Any]] | None = field(default=None, compare=False)


def parse(text: str) -> list[Variant]:
    """Return the variants of `baseline,auto,bf16+compile:max-autotune,plan.yaml`, in that order.

    Raises StepError for a word that is not in the catalog, with the nearest that is.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise StepError("--compare needs names, as in --compare baseline,auto")
    return [variant(name) for name in names]


def variant(name: str) -> Variant:
    """Return one variant by name. Raises StepError or ConfigError."""
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
            raise StepError(f"variant {name}: {word} is a whole plan, and is joined to nothing")
        option = _option(word)
        if twice := next((key for key in option if key in values), None):
            raise StepError(f"variant {name}: it names {twice} twice")
        values.update(option)
    return named(name, values)


def config_of(variant: Variant, model: torch.nn.Module) -> SpeedConfig | None:
    """Return the variant's config for a model; `current` is the plan in force on this one."""
    if variant.name != CURRENT:
        return variant.config
    context = applied_to(model)
    return None if context is None else context.own_plan.to_config()


def named(name: str, values: Mapping[str, Any]) -> Variant:
    """Return a variant with these values only; rules and environment variables add nothing."""
    every = [optimization.name for optimization in CATALOG]
    return Variant(name, SpeedConfig(Origin(f"variant {name}", every), **values).alone())


def words() -> Mapping[str, dict[str, Any]]:
    """Return every word that names a change: `bf16`, `compile`, `sdpa:math` and their like."""
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
