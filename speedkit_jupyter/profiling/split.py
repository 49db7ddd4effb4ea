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
    "ours",
]
# In the order of a step; what telling takes is "ours", and no part of it.
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
    "ours": frozenset(),
}
# What a call of a function is from its beginning to its end; within it others are told apart.
WHOLE = frozenset[Part](["data", "forward", "backward", "optimizer", "compiling"])
# Of a whole part, or the rest, a part that was told apart within it; or itself.
Piece = tuple[Part, Part]
REST: Piece = ("rest", "rest")


@dataclass
class Look:
    """The user's lines that were seen at work, the innermost first, and which part it was; whether
    a function of torch's was at work that no module called.
    """

    spots: Sequence[Any]
    part: Part
    seconds: float
    in_torch: bool = False


class Line(NamedTuple):
    """A line of the user's code, and what it calls there."""

    file: str
    number: int
    call: str


class Overhead(NamedTuple):
    """Seconds that telling takes, each time: of what waits, `before` the split knows of it, and
    `waiting` inside of it; of a part, `around` it and `inside` of it; of a function of torch's that
    is called between the parts, `between`, and where that turns out to be forward, `within` it and
    `beside` it; of what waits where that is no part of its own (torch's own code does), `passing`.
    """

    before: float = 0.0
    around: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    passing: float = 0.0
    waiting: float = 0.0
    within: float = 0.0
    beside: float = 0.0


def _seconds() -> dict[Piece, float]:
    return defaultdict(float)


@dataclass
class Split:
    """Seconds of a call by its `pieces`, and how often each part began; `waits` are the
    synchronizations by line, `stepped` the steps of each optimizer, by its id.

    Between `run()` and its end the stopwatch always runs for one part: they sum to the whole.
    `overhead` is what telling takes where it is no part of "ours" yet; `taken_off` says how much
    that came to in the end, of each piece. `undecided` are the looks of a moment of which only its
    end will tell which part it is.
    """

    now: Callable[[], float] = field(default=clock.now, repr=False)
    overhead: Overhead = field(default_factory=Overhead)
    pieces: dict[Piece, float] = field(default_factory=_seconds)
    begun: Counter[Part] = field(default_factory=Counter)
    waits: Counter[Line] = field(default_factory=Counter)
    waited_s: dict[Line, float] = field(default_factory=lambda: defaultdict(float))
    stepped: Counter[int] = field(default_factory=Counter, repr=False)
    undecided: list[Look] | None = field(default=None, repr=False)
    taken_off: dict[Piece, float] = field(default_factory=_seconds, repr=False)
    passed: Counter[Part] = field(default_factory=Counter, repr=False)
    _entered: Counter[tuple[Piece, Piece]] = field(default_factory=Counter, init=False, repr=False)
    _between: int = field(default=0, init=False, repr=False)
    _forward: int = field(default=0, init=False, repr=False)
    _told: Counter[Piece] = field(default_factory=Counter, init=False, repr=False)
    _inside: list[Piece] = field(default_factory=list, init=False, repr=False)
    _since_s: float = field(default=0.0, init=False, repr=False)

    @property
    def seconds(self) -> dict[Part, float]:
        """Return those of each part."""
        found: dict[Part, float] = dict.fromkeys((*PARTS, "ours"), 0.0)
        for (_, part), spent_s in self.pieces.items():
            found[part] += spent_s
        return found

    @property
    def total_s(self) -> float:
        """Return the seconds of all parts."""
        return sum(spent_s for (_, part), spent_s in self.pieces.items() if part != "ours")

    @property
    def steps(self) -> int:
        """Return how many the optimizer took; of several (a GAN's) the one that took fewest."""
        return min(self.stepped.values(), default=0)

    @property
    def part(self) -> Part:
        """Return the one that it runs for now; where it does not run, what is done is ours."""
        return self._inside[-1][1] if self._inside else "ours"

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
            self._take_off()

    def hides(self, part: Part) -> bool:
        """Return whether it is no part of its own within the present one."""
        return part in _HIDDEN[self.part]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Count the block as no part of the step."""
        self._told[self._inside[-1] if self._inside else REST] += 1
        with self.within("ours"):
            yield

    def enter(self, part: Part) -> None:
        """Begin a part, unless it is no part of its own within the present one."""
        around = self._inside[-1] if self._inside else REST
        if self.hides(part):
            self._inside.append(around)
            return
        piece = (part if part in WHOLE else around[0], part)
        self._entered[around, piece] += 1
        self.begun[part] += 1
        self._lap()
        self._inside.append(piece)

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

    def mark(self, between: bool = False) -> float:
        """Return the seconds of the present piece so far, for `moved`; `between` the parts a
        function of torch's begins here.
        """
        self._between += between
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
        self._forward += part == "forward"
        self.begun[part] += 1

    def waited(self, line: Line, seconds: float) -> None:
        """Count a synchronization, at a line of the user's."""
        self.waits[line] += 1
        self.waited_s[line] += seconds

    def _take_off(self) -> None:
        each = self.overhead
        for (whole, part), times in self._told.items():
            self._is_ours((whole, part), times * each.before)
            self._is_ours((whole, "synchronizations"), times * each.waiting)
        for part, times in self.passed.items():
            self._is_ours((part if part in WHOLE else "rest", part), times * each.passing)
        stayed = self._between - self._forward
        self._is_ours(REST, stayed * each.between + self._forward * each.beside)
        self._is_ours(("rest", "forward"), self._forward * each.within)
        for (around, inside), times in self._entered.items():
            if "ours" not in (around[1], inside[1]):
                self._is_ours(around, times * each.around)
                self._is_ours(inside, times * each.inside)

    def _is_ours(self, piece: Piece, seconds: float) -> None:
        extra_s = min(seconds, self.pieces.get(piece, 0.0))
        self.pieces[piece] -= extra_s
        self.pieces[piece[0], "ours"] += extra_s
        self.taken_off[piece] += extra_s

    def _lap(self) -> None:
        now_s = self.now()
        self.pieces[self._inside[-1]] += now_s - self._since_s
        self._since_s = now_s
