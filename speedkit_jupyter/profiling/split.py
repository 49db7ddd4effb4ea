"""The parts of a step's time, and a stopwatch that runs for exactly one of them at any moment."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from speedkit_jupyter.measure.rounds import clock

Part = Literal[
    "data",
    "host to device",
    "forward",
    "backward",
    "optimizer",
    "synchronizations",
    "compiling",
    "rest",
    "overhead",
]
# In the order of a step; what telling takes is "overhead", and no part of it.
PARTS: tuple[Part, ...] = Part.__args__[:-1]  # type: ignore[attr-defined]
_ALL = frozenset(PARTS)
# What is no part of its own within another one: a transform of the data set that calls a module is
# data, a checkpoint that runs a forward pass again in the backward pass is backward.
_HIDDEN: dict[Part, frozenset[Part]] = {
    "data": _ALL,
    "host to device": _ALL,
    "synchronizations": _ALL,
    "compiling": _ALL,
    "forward": frozenset(["forward", "data"]),
    "backward": frozenset(["forward", "backward", "host to device", "data"]),
    "optimizer": frozenset(["optimizer"]),
    "rest": frozenset(),
    "overhead": frozenset(),
}
# What a call of a function is from its beginning to its end; within it others are told apart.
WHOLE = frozenset[Part](["data", "forward", "backward", "optimizer", "compiling"])
# Of a whole part, or the rest, a part that was told apart within it; or itself.
Piece = tuple[Part, Part]
REST: Piece = ("rest", "rest")


@dataclass
class LineSample:
    """The user's innermost line that was seen at work, if any, and which part it was; whether a
    function of torch's was at work that no module called.
    """

    spot: Any
    part: Part
    seconds: float
    in_torch: bool = False


class Line(NamedTuple):
    """A line of the user's code, and what it calls there."""

    file: str
    number: int
    call: str


@dataclass
class Split:
    """Seconds of a call by its `pieces`, and how often each part began; `waits` are the
    synchronizations by line, `stepped` the steps of each optimizer, by its id.

    Between `run()` and its end the stopwatch always runs for one part: they sum to the whole.
    `undecided` are the samples of a moment of which only its end will tell which part it is.
    """

    now: Callable[[], float] = field(default=clock.now, repr=False)
    pieces: dict[Piece, float] = field(default_factory=lambda: defaultdict(float))
    begun: Counter[Part] = field(default_factory=Counter)
    waits: Counter[Line] = field(default_factory=Counter)
    waited_s: dict[Line, float] = field(default_factory=lambda: defaultdict(float))
    stepped: Counter[int] = field(default_factory=Counter, repr=False)
    undecided: list[LineSample] | None = field(default=None, repr=False)
    _inside: list[Piece] = field(default_factory=list, init=False, repr=False)
    _since_s: float = field(default=0.0, init=False, repr=False)

    @property
    def seconds(self) -> dict[Part, float]:
        """Return those of each part."""
        found: dict[Part, float] = dict.fromkeys((*PARTS, "overhead"), 0.0)
        for (_, part), spent_s in self.pieces.items():
            found[part] += spent_s
        return found

    @property
    def total_s(self) -> float:
        """Return the seconds of all parts."""
        return sum(spent_s for (_, part), spent_s in self.pieces.items() if part != "overhead")

    @property
    def steps(self) -> int:
        """Return how many the optimizer took; of several (a GAN's) the one that took fewest."""
        return min(self.stepped.values(), default=0)

    @property
    def part(self) -> Part:
        """Return the one that it runs for now; where it does not run, what is done is ours."""
        return self._inside[-1][1] if self._inside else "overhead"

    @property
    def depth(self) -> int:
        """Return how many parts are open."""
        return len(self._inside)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Count what nothing else claims in the block as the rest."""
        self._inside, self._since_s = [REST], self.now()
        try:
            yield
        finally:
            self._lap()
            self._inside = []

    def hides(self, part: Part) -> bool:
        """Return whether it is no part of its own within the present one."""
        return part in _HIDDEN[self.part]

    def enter(self, part: Part) -> None:
        """Begin a part, unless it is no part of its own within the present one."""
        around = self._inside[-1] if self._inside else REST
        if part in _HIDDEN[around[1]]:
            self._inside.append(around)
            return
        self._lap()
        self.begun[part] += 1
        self._inside.append((part if part in WHOLE else around[0], part))

    def leave(self, depth: int | None = None) -> None:
        """Go back to what was before it: the innermost one, or all above `depth`.

        (What compiles, and raises, may never say that it has ended.)
        """
        self._lap()
        del self._inside[max(len(self._inside) - 1 if depth is None else depth, 1) :]

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Count the block as this part."""
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def mark(self) -> float:
        """Return the seconds of the present piece so far, for `moved`."""
        self._lap()
        return self.pieces[self._inside[-1]]

    def moved(self, mark: float, part: Part) -> None:
        """Count what the present piece took since the mark for another part."""
        if self.hides(part):
            return
        self._lap()
        piece = self._inside[-1]
        took_s = self.pieces[piece] - mark
        self.pieces[piece] -= took_s
        self.pieces[piece[0], part] += took_s
        self.begun[part] += 1

    def waited(self, line: Line, seconds: float) -> None:
        """Count a synchronization, at a line of the user's."""
        self.waits[line] += 1
        self.waited_s[line] += seconds

    def _lap(self) -> None:
        now_s = self.now()
        self.pieces[self._inside[-1]] += now_s - self._since_s
        self._since_s = now_s


def shares(splits: Sequence[Split], whole: Sequence[Split]) -> dict[Part, float]:
    """Return the share of each part in all calls.

    Telling what happens within the parts may take longer than what happens. So `whole`, splits of
    calls that were told of the parts as a whole alone, say how long each of these is, if there are
    any, and `splits` what is within it.
    """
    pieces, found = _summed(splits), dict.fromkeys(PARTS, 0.0)
    of_parts, told = defaultdict[Part, float](float), defaultdict[Part, float](float)
    for piece, spent_s in _summed(whole or splits).items():
        of_parts[piece[0]] += spent_s
    for piece, spent_s in pieces.items():
        told[piece[0]] += spent_s
    total_s = sum(of_parts[around] for around in told)
    for (around, part), spent_s in pieces.items():
        if total_s and told[around]:
            found[part] += of_parts[around] / total_s * spent_s / told[around]
    return found


def _summed(splits: Sequence[Split]) -> dict[Piece, float]:
    """Return seconds of pieces, without what is ours, of the quicker half of all calls: the others
    were interrupted by other processes.
    """
    found = defaultdict[Piece, float](float)
    for split in sorted(splits, key=lambda one: one.total_s)[: (len(splits) + 1) // 2]:
        for piece, spent_s in split.pieces.items():
            if piece[1] != "overhead":
                found[piece] += spent_s
    return found
