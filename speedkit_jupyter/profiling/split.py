"""The parts of a step's time, and a stopwatch that runs for exactly one of them at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
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


class Bias(NamedTuple):
    """Seconds that telling takes, each time: of what waits, `before` the split knows of it; of a
    part, `around` it and `inside` of it; `between`, of a function of torch's that is called between
    the parts, and where that turns out to be forward, `within` it and `beside` it; `passing`, of
    what waits where that is no part of its own (torch's own code does); `waiting`, inside of one
    that waits.
    """

    before: float = 0.0
    around: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    passing: float = 0.0
    waiting: float = 0.0
    within: float = 0.0
    beside: float = 0.0


@dataclass
class Split:
    """Seconds of each part, and how often it began; `waits` are the synchronizations by line,
    `stepped` the steps of each optimizer, by its id.

    Between `run()` and its end the stopwatch always runs for one part: they sum to the whole.
    `pieces` are the same seconds by what they are within. `bias` is what telling takes where it is
    no part of "ours" yet; `taken_off` says how much that came to in the end, of each piece.
    `undecided` are the looks of a moment of which only its end will tell which part it is.
    """

    now: Callable[[], float] = field(default=clock.now, repr=False)
    bias: Bias = field(default_factory=Bias)
    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys((*PARTS, "ours"), 0.0))
    begun: Counter[Part] = field(default_factory=Counter)
    waits: Counter[Line] = field(default_factory=Counter)
    waited_s: dict[Line, float] = field(default_factory=dict)
    stepped: Counter[int] = field(default_factory=Counter, repr=False)
    undecided: list[Look] | None = field(default=None, repr=False)
    pieces: dict[Piece, float] = field(default_factory=dict, repr=False)
    taken_off: dict[Piece, float] = field(default_factory=dict, repr=False)
    passed: Counter[Part] = field(default_factory=Counter, repr=False)
    _entered: Counter[tuple[Piece, Piece]] = field(default_factory=Counter, init=False, repr=False)
    _between: int = field(default=0, init=False, repr=False)
    _forward: int = field(default=0, init=False, repr=False)
    _told: Counter[Piece] = field(default_factory=Counter, init=False, repr=False)
    _inside: list[Piece] = field(default_factory=list, init=False, repr=False)
    _since_s: float = field(default=0.0, init=False, repr=False)

    @property
    def total_s(self) -> float:
        """Of all parts."""
        return sum(self.seconds[part] for part in PARTS)

    @property
    def steps(self) -> int:
        """How many the optimizer took; of several (a GAN's) the one that took fewest."""
        return min(self.stepped.values(), default=0)

    @property
    def part(self) -> Part:
        """The one that it runs for now; where it does not run, what is done is ours."""
        return self._inside[-1][1] if self._inside else "ours"

    @property
    def depth(self) -> int:
        """How many parts are open."""
        return len(self._inside)

    @contextmanager
    def run(self) -> Iterator[None]:
        """What nothing else claims in the block is the rest."""
        self._inside, self._since_s = [REST], self.now()
        try:
            yield
        finally:
            self._lap()
            self._inside = []
            self._take_off()

    def taken(self) -> Split:
        """What it knows of its last run; it begins anew, and whoever tells it goes on."""
        found = copy(self)
        for name in (
            "seconds",
            "pieces",
            "begun",
            "waits",
            "waited_s",
            "stepped",
            "taken_off",
            "passed",
        ):
            setattr(found, name, copy(getattr(self, name)))
        self.clear()
        return found

    def clear(self) -> None:
        """As before it ever ran."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        for counted in (
            self.begun,
            self.waits,
            self.stepped,
            self._entered,
            self._told,
            self.passed,
        ):
            counted.clear()
        for kept in (self.waited_s, self.pieces, self.taken_off):
            kept.clear()
        self._between = self._forward = 0

    def hides(self, part: Part) -> bool:
        """Whether it is no part of its own within the present one."""
        return part in _HIDDEN[self.part]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """The block is no part of the step."""
        self._told[self._inside[-1] if self._inside else REST] += 1
        with self.within("ours"):
            yield

    def enter(self, part: Part) -> None:
        """It begins here, unless it is no part of its own within the present one."""
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
        """Back to what was before it: the innermost one, or all above `depth`.

        (What compiles, and raises, may never say that it has ended.)
        """
        self._lap()
        del self._inside[max(len(self._inside) - 1 if depth is None else depth, 1) :]

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """The block is this part."""
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def mark(self) -> float:
        """Seconds of the present part so far, for `moved`."""
        self._lap()
        return self.seconds[self.part]

    def mark_between(self) -> float:
        """The same, where a function of torch's begins between the parts."""
        self._between += 1
        return self.mark()

    def moved(self, mark: float, part: Part) -> None:
        """What the present part took since the mark turns out to be another's."""
        here = self.part
        if self.hides(part):
            return
        self._lap()
        took_s, whole = self.seconds[here] - mark, self._inside[-1][0]
        self._add((whole, here), -took_s)
        self._add((whole, part), took_s)
        self._forward += part == "forward"
        self.begun[part] += 1

    def waited(self, line: Line, seconds: float) -> None:
        """A synchronization, at a line of the user's."""
        self.waits[line] += 1
        self.waited_s[line] = self.waited_s.get(line, 0.0) + seconds

    def _take_off(self) -> None:
        for (whole, part), times in self._told.items():
            self._is_ours((whole, part), times * self.bias.before)
            self._is_ours((whole, "synchronizations"), times * self.bias.waiting)
        for part, times in self.passed.items():
            whole = part if part in WHOLE else "rest"
            self._is_ours((whole, part), times * self.bias.passing)
        stayed = self._between - self._forward
        self._is_ours(REST, stayed * self.bias.between + self._forward * self.bias.beside)
        self._is_ours(("rest", "forward"), self._forward * self.bias.within)
        for (around, inside), times in self._entered.items():
            if "ours" not in (around[1], inside[1]):
                self._is_ours(around, times * self.bias.around)
                self._is_ours(inside, times * self.bias.inside)

    def _is_ours(self, piece: Piece, seconds: float) -> None:
        extra_s = min(seconds, self.pieces.get(piece, 0.0))
        self._add(piece, -extra_s)
        self._add((piece[0], "ours"), extra_s)
        self.taken_off[piece] = self.taken_off.get(piece, 0.0) + extra_s

    def _lap(self) -> None:
        now_s = self.now()
        self._add(self._inside[-1], now_s - self._since_s)
        self._since_s = now_s

    def _add(self, piece: Piece, seconds: float) -> None:
        self.seconds[piece[1]] += seconds
        self.pieces[piece] = self.pieces.get(piece, 0.0) + seconds
