"""The parts of a step's time, and a stopwatch that runs for exactly one of them at any moment."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from speedkit_jupyter.rounds import clock
from speedkit_jupyter.torchglue import private as torch_private

Part = Literal[
    "data", "host to device", "forward", "backward", "optimizer", "synchronizations", "compiling",
    "rest", "overhead",
]  # fmt: skip
# In the order of a step; the time that the instruments take is "overhead", and no part of it.
PARTS: tuple[Part, ...] = Part.__args__[:-1]  # type: ignore[attr-defined]
# What is no part of its own within another one: a transform of the data set that calls a module is
# data, a checkpoint that runs a forward pass again in the backward pass is backward.
_EVERY = frozenset(PARTS)
_HIDDEN: dict[Part, frozenset[Part]] = {
    "data": _EVERY, "host to device": _EVERY, "synchronizations": _EVERY, "compiling": _EVERY,
    "forward": frozenset(["forward", "data"]),
    "backward": frozenset(["forward", "backward", "host to device", "data"]),
    "optimizer": frozenset(["optimizer"]),
    "rest": frozenset(), "overhead": frozenset(),
}  # fmt: skip
# A call is such a part from its beginning to its end; other parts are told apart within it.
WHOLE = frozenset[Part](["data", "forward", "backward", "optimizer", "compiling"])
# A whole part (or the rest), and the part that was told apart within it, or the same again.
Piece = tuple[Part, Part]


class Line(NamedTuple):
    """A line of the user's code, and what it calls there."""

    file: str
    number: int
    call: str


@dataclass
class LineSample:
    """The user's line (if any) and the part of the step at one moment; `in_torch` where a function
    of torch's was at work outside of modules.
    """

    spot: Any
    part: Part
    seconds: float
    in_torch: bool = False


@dataclass
class Split:
    """Seconds of one call by its `pieces`; `waits` counts synchronizations by line, `stepped` the
    steps of each optimizer by its id; `samples` are the lines that a timer saw.
    """

    pieces: dict[Piece, float] = field(default_factory=lambda: defaultdict(float))
    waits: Counter[Line] = field(default_factory=Counter)
    waited_s: dict[Line, float] = field(default_factory=lambda: defaultdict(float))
    stepped: Counter[int] = field(default_factory=Counter, repr=False)
    samples: list[LineSample] = field(default_factory=list, repr=False)

    @property
    def seconds(self) -> dict[Part, float]:
        """Return the seconds of each part."""
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


class Recorder:
    """The stopwatch of the thread that makes it, which fills one `split` after another.

    Between `run()` and its end it always runs for one part: they sum to the whole.
    """

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self.split = Split()
        self.now = now
        self._here = threading.get_ident()
        self._inside: list[Piece] = []
        self._since_s = 0.0
        self._mode: Any = None

    @property
    def part(self) -> Part:
        """Return the present one; what is done between two runs is ours."""
        return self._inside[-1][1] if self._inside else "overhead"

    @contextmanager
    def run(self) -> Iterator[Split]:
        """Fill a new split with what the block does; what nothing else claims is the rest."""
        self.split, self._inside, self._since_s = Split(), [("rest", "rest")], self.now()
        try:
            yield self.split
        finally:
            self._lap()
            self._inside = []

    def begin(self, part: Part) -> tuple[int, Any] | None:
        """Begin this part; `end` takes what it returns. What both take is overhead.

        Nothing begins in another thread, between two runs (an iterator outlives the step), and
        where the present part hides it.
        """
        inside = self._inside
        if not inside or part in _HIDDEN[inside[-1][1]] or threading.get_ident() != self._here:
            return None
        depth, around, mode = len(inside), inside[-1][0], self._mode
        self._lap()
        inside.append((around, "overhead"))
        if mode is not None and torch_private.innermost_function_mode() is mode:
            mode.__exit__(None, None, None)
        else:  # the user's own mode lies on top
            mode = None
        self._lap()
        inside.append((part if part in WHOLE else around, part))
        return depth, mode

    def end(self, begun: tuple[int, Any] | None) -> None:
        """End the part that `begin` has begun, and what is open within it: what compiles and raises
        may never say that it has ended.
        """
        if begun is None:
            return
        depth, mode = begun
        self._lap()
        del self._inside[depth + 1 :]
        if mode is not None:
            mode.__enter__()
        self._lap()
        del self._inside[depth:]

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Count the block as this part."""
        begun = self.begin(part)
        try:
            yield
        finally:
            self.end(begun)

    def mark(self) -> float:
        """Return the seconds of the present piece so far, for `moved`."""
        self._lap()
        return self.split.pieces[self._inside[-1]]

    def moved(self, mark: float, part: Part) -> None:
        """Count what the present piece took since the mark for another part."""
        around, present = self._inside[-1]
        if part not in _HIDDEN[present]:
            took_s = self.mark() - mark
            self.split.pieces[around, present] -= took_s
            self.split.pieces[around, part] += took_s

    @contextmanager
    def functions(self) -> Iterator[None]:
        """See torch's functions between the parts: one that leads to a gradient (a loss) is
        forward, one that does not (a metric) stays the rest.

        A compiled step would be compiled anew for the mode. Methods of tensors are patched first.
        """
        recorder = self
        # torch finds a method by its name, and so what stands in for it, again.
        methods = {
            method: method.stands_in_for
            for method in vars(torch.Tensor).values()
            if hasattr(method, "stands_in_for")
        }

        class Seen(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                function, is_rest = methods.get(function, function), recorder.part == "rest"
                mark, seen = recorder.mark() if is_rest else 0.0, len(recorder.split.samples)
                result = function(*args, **(kwargs or {}))
                if is_rest:
                    leads = isinstance(result, torch.Tensor) and result.requires_grad
                    recorder.saw_function(mark, recorder.split.samples[seen:], leads)
                return result

        self._mode = mode = Seen()
        mode.__enter__()
        try:
            yield
        finally:
            self._mode = None
            if torch_private.innermost_function_mode() is mode:  # Ctrl-C may come while it is off
                mode.__exit__(None, None, None)

    def saw_function(self, mark: float, samples: Sequence[LineSample], leads: bool) -> None:
        """Count a function of torch's for the forward pass where it `leads` to a gradient."""
        if leads:
            self.moved(mark, "forward")
        for sample in samples:
            sample.in_torch = True
            sample.part = "forward" if leads and sample.part == "rest" else sample.part

    def _lap(self) -> None:
        now_s = self.now()
        if self._inside:
            self.split.pieces[self._inside[-1]] += now_s - self._since_s
        self._since_s = now_s


def shares(splits: Sequence[Split], whole: Sequence[Split]) -> dict[Part, float]:
    """Return the share of each part in all calls.

    Looking into the parts may take longer than what they do. So `whole`, splits of calls that were
    looked at from outside, say how long each whole part is; `splits` say what is within it.
    """
    pieces, found = _summed(splits), dict.fromkeys(PARTS, 0.0)
    seen, wholes = _by_whole(pieces), _by_whole(_summed(whole or splits))
    total_s = sum(wholes.get(around, 0.0) for around in seen)
    for (around, part), spent_s in pieces.items():
        if total_s and seen[around]:
            found[part] += wholes.get(around, 0.0) / total_s * spent_s / seen[around]
    return found


def _by_whole(pieces: dict[Piece, float]) -> dict[Part, float]:
    found = defaultdict[Part, float](float)
    for (around, _), spent_s in pieces.items():
        found[around] += spent_s
    return found


def _summed(splits: Sequence[Split]) -> dict[Piece, float]:
    """Return seconds of pieces, without overhead, in the quicker half of all calls: other processes
    interrupted the others.
    """
    found = defaultdict[Piece, float](float)
    for split in sorted(splits, key=lambda one: one.total_s)[: (len(splits) + 1) // 2]:
        for piece, spent_s in split.pieces.items():
            if piece[1] != "overhead":
                found[piece] += spent_s
    return found
