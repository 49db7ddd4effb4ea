"""What the optimizations have in common that know several kinds of modules, each with a switch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from speedkit_jupyter.optimizations.base.optimization import Optimization

if TYPE_CHECKING:
    import torch


class Place(Protocol):
    """One module, and what can be done to it."""

    @property
    def kind(self) -> str:
        """By which its switch is named."""


Placed = TypeVar("Placed", bound=Place)


class ByKind(Optimization):
    """`kinds` are the switches beside `enabled`, each with the words by which a report counts what
    is done (`12 of 12 by tanh`); `nothing` says what a model has not where there is none of them.
    """

    variable = None
    kinds: ClassVar[Mapping[str, str]]
    nothing: ClassVar[str]

    def changes(self) -> dict[str, Any]:
        """All kinds, and each by itself."""
        alone = {
            f"{self.name}:{kind}": {"enabled": True}
            | {other: other == kind for other in self.kinds}
            for kind in self.kinds
        }
        return {self.name: True} | alone

    def missing(self, places: Sequence[Place], switches: Mapping[str, Any]) -> str:
        """What the model lacks; empty where there is something to do."""
        if places:
            return ""
        chosen = [kind for kind in self.kinds if switches[kind]]
        if not chosen:
            return "no kind is chosen"
        is_all = len(chosen) == len(self.kinds)
        return self.nothing if is_all else f"the model has nothing for {', '.join(chosen)}"

    def as_state(
        self,
        modules: Iterable[tuple[Place, torch.nn.Module]],
        switches: Mapping[str, Any],
        is_done: Callable[[torch.nn.Module], bool],
    ) -> dict[str, str]:
        """How many of each kind that is there, once the chosen kinds are done too."""
        every = [*modules]
        state = {}
        for kind, words in self.kinds.items():
            there = [module for place, module in every if place.kind == kind]
            count = sum(bool(switches.get(kind)) or is_done(module) for module in there)
            if there:
                state[f"model.{kind}"] = f"{count} of {len(there)} {words}"
        return state


def chosen(places: Iterable[Placed], switches: Mapping[str, Any]) -> list[Placed]:
    """Those of the kinds that are switched on."""
    return [place for place in places if switches.get(place.kind)]
