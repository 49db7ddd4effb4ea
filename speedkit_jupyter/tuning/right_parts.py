"""Which plans need no check of their own in a race: those whose parts were right in others."""

from __future__ import annotations

from collections.abc import Iterable


class RightParts:
    """Goes by the words that variants are named by, joined by plus, over all races of a search.

    A race proves nothing: what leads it is checked itself, and so is all that is proven later.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._words: set[str] = set()

    def note(self, name: str) -> None:
        """A plan that was checked and is right."""
        self._names.add(name)
        self._words.update(name.split("+"))

    def is_known(self, name: str) -> bool:
        """Whether this very plan was checked and is right."""
        return name in self._names

    def are_all_of(self, name: str) -> bool:
        """Whether each of its parts was right in some plan."""
        return self._words.issuperset(name.split("+"))

    def to_check(self, names: Iterable[str]) -> list[str]:
        """Those of these that have to be checked, in this order, where each is right."""
        words, checks = set(self._words), []
        for name in names:
            if not words.issuperset(name.split("+")):
                words.update(name.split("+"))
                checks.append(name)
        return checks
