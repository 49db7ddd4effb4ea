"""What is worth trying here: every value that the catalog offers for this model and machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from speedkit_jupyter.facts import Facts
from speedkit_jupyter.hardware import Hardware
from speedkit_jupyter.measure.variants import Variant, named, words
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base import Effect, Fields
from speedkit_jupyter.planning import plan


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan by its parts: config values by optimization. `costly` takes seconds before it runs."""

    values: Mapping[str, Any]
    costly: bool = False

    @property
    def name(self) -> str:
        """The words of a variant, joined by plus."""
        return "+".join(_word(name, value) for name, value in self.values.items()) or "baseline"

    def variant(self) -> Variant:
        """As the benchmark takes it."""
        return named(self.name, self.values) if self.values else Variant("baseline")

    def cumulated(self) -> list[Candidate]:
        """The first part, the first two, … and at last all, in the catalog's order."""
        names = list(self.values)
        return [
            Candidate({name: self.values[name] for name in names[: number + 1]}, self.costly)
            for number in range(len(names))
        ]

    def __add__(self, other: Candidate) -> Candidate:
        """Both; the other's value where they name the same optimization."""
        values = {**self.values, **other.values}
        order = [one.name for one in CATALOG if one.name in values]
        return Candidate({name: values[name] for name in order}, self.costly or other.costly)


def candidates(hardware: Hardware, facts: Facts) -> list[Candidate]:
    """Single changes, in the catalog's order; those that change nothing here are left out.

    What changes the model's arithmetic is not among them: that has to be named.
    """
    found = [
        Candidate({optimization.name: value}, optimization.costly)
        for optimization in CATALOG
        if optimization.effect is not Effect.CHANGES_MODEL
        for value in optimization.candidates(hardware, facts)
    ]
    return [one for one in found if _changes_something(one, hardware, facts)]


def combined(singles: Iterable[Candidate]) -> Candidate:
    """All of them; the first where several name the same optimization."""
    whole = Candidate({})
    for one in singles:
        if not one.values.keys() & whole.values.keys():
            whole = whole + one
    return whole


def _changes_something(one: Candidate, hardware: Hardware, facts: Facts) -> bool:
    config = one.variant().config
    return config is not None and any(d.active for d in plan(config, hardware, facts))


def _word(name: str, value: Any) -> str:
    """The variant word for a value: `bf16`, `tf32:medium`, `compile:reduce-overhead`."""
    asked = _spelled_out(name, value)
    for word, values in words().items():
        if values.keys() == {name} and _spelled_out(name, values[name]) == asked:
            return word
    return name if value is True else f"{name}:{value}"


def _spelled_out(name: str, value: Any) -> Any:
    """All fields of a value, where the option has several: `compile` is its default mode too."""
    options = next(one.Options for one in CATALOG if one.name == name)
    if isinstance(options, type) and issubclass(options, Fields):
        return options.model_validate(value)
    return type(value), value
