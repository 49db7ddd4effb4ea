"""Which part of a plan makes it far slower: every further plan that has it is left out unrun."""

from __future__ import annotations


class Culprits:
    """Goes by the words that variants are named by, joined by plus, over all races of a search."""

    def __init__(self) -> None:
        self._fine: set[str] = set()
        self._slow: list[list[str]] = []

    def note(self, name: str, is_far_slower: bool) -> None:
        """What the warm-up of a variant showed."""
        if is_far_slower:
            self._slow.append(name.split("+"))
        else:
            self._fine.update(name.split("+"))

    def why(self, name: str) -> str:
        """Why it is left out: parts of it were far slower before; empty where none were.

        Blamed are the parts of a slow variant that no other one ran well with; all of them
        together where each did.
        """
        words = set(name.split("+"))
        for slow in self._slow:
            blamed = [word for word in slow if word not in self._fine] or slow
            if words.issuperset(blamed):
                return _said("+".join(slow), "+".join(blamed))
        return ""


def _said(slow: str, blamed: str) -> str:
    """What was seen, and what follows from it."""
    rest = "" if slow == blamed else f", and what else is in it was not: it lies at {blamed}"
    return f"left out: {slow} was far slower{rest}"
