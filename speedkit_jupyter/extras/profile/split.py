"""The parts of a step's time, and a stopwatch that runs for exactly one part at any moment."""

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
from speedkit_jupyter.support.source_lines import Spot
from speedkit_jupyter.torchglue import private as torch_private

Part = Literal[
    "data", "host to device", "forward", "backward", "optimizer", "synchronizations", "compiling",
    "rest", "overhead",
]  # fmt: skip
# In the order of a step. "overhead" is the time that the instruments take, and no part of the step.
PARTS: tuple[Part, ...] = tuple(part for part in Part.__args__ if part != "overhead")  # type: ignore[attr-defined]
# Parts that don't count by themselves within another part: a transform of the data set that calls a
# module is data; a checkpoint that repeats a forward pass in the backward pass is backward.
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
# A whole part (or the rest), and the part that was told apart within it, or the same part again.
Piece = tuple[Part, Part]


class WaitingLine(NamedTuple):
    """A line of the user's code, and the method that it calls to read a tensor's value."""

    file: str
    number: int
    call: str


@dataclass
class LineSample:
    """The user's line, if any, and the part of the step at one moment.

    `in_torch` says whether a function of torch's was running outside of all modules.
    """

    spot: Spot | None
    part: Part
    seconds: float
    in_torch: bool = False


@dataclass
class Split:
    """Seconds of one call by `pieces`.

    `waits` and `waited_s` count and time synchronizations by line, `stepped` counts the steps of
    each optimizer by its id, and `samples` are the lines that a timer saw.
    """

    pieces: dict[Piece, float] = field(default_factory=lambda: defaultdict(float))
    waits: Counter[WaitingLine] = field(default_factory=Counter)
    waited_s: dict[WaitingLine, float] = field(default_factory=lambda: defaultdict(float))
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
        """Return the seconds of all parts, without overhead."""
        return sum(spent_s for (_, part), spent_s in self.pieces.items() if part != "overhead")

    @property
    def steps(self) -> int:
        """Return the steps of the optimizer that stepped least often (a GAN has two)."""
        return min(self.stepped.values(), default=0)


class Recorder:
    """The stopwatch of the thread that makes it, which fills one `split` after another.

    Between `run()` and its end it always runs for one part, so that the parts sum to the whole.
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
        """Return the present part; time between two runs is overhead."""
        return self._inside[-1][1] if self._inside else "overhead"

    @contextmanager
    def run(self) -> Iterator[Split]:
        """Fill a new split with the time of the block; unclaimed time is the rest."""
        self.split, self._inside, self._since_s = Split(), [("rest", "rest")], self.now()
        try:
            yield self.split
        finally:
            self._lap()
            self._inside = []

    def begin(self, part: Part) -> tuple[int, Any] | None:
        """Begin a part and return the token for `end`. The time of both calls is overhead.

        Nothing begins in another thread, between two runs (an iterator outlives the step), and
        where the present part hides the new one.
        """
        inside = self._inside
        if not inside or part in _HIDDEN[inside[-1][1]] or threading.get_ident() != self._here:
            return None
        depth, around, mode = len(inside), inside[-1][0], self._mode
        self._lap()
        inside.append((around, "overhead"))
        if mode is not None and torch_private.innermost_function_mode() is mode:
            mode.__exit__(None, None, None)
        else:  # the user's own mode is on top of it
            mode = None
        self._lap()
        inside.append((part if part in WHOLE else around, part))
        return depth, mode

    def end(self, begun: tuple[int, Any] | None) -> None:
        """End a part, and all parts within it: compiling that raises may never report its end."""
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
        """Count the time of the present piece since the mark for another part."""
        around, present = self._inside[-1]
        if part not in _HIDDEN[present]:
            took_s = self.mark() - mark
            self.split.pieces[around, present] -= took_s
            self.split.pieces[around, part] += took_s

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Time torch's functions between the parts: a function whose result needs a gradient (a
        loss) is forward, others (a metric) stay the rest.

        A mode would make compiled code compile anew. Methods of tensors are patched before.
        """
        recorder = self
        # torch passes a patched method under its replacement: the mode calls the original.
        methods = {
            method: method.stands_in_for
            for method in vars(torch.Tensor).values()
            if hasattr(method, "stands_in_for")
        }

        class FunctionTimer(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                function, kwargs = methods.get(function, function), kwargs or {}
                if recorder.part != "rest":
                    return function(*args, **kwargs)
                mark, seen = recorder.mark(), len(recorder.split.samples)
                result = function(*args, **kwargs)
                is_forward = isinstance(result, torch.Tensor) and result.requires_grad
                if is_forward:
                    recorder.moved(mark, "forward")
                for sample in recorder.split.samples[seen:]:
                    sample.in_torch = True
                    if is_forward and sample.part == "rest":
                        sample.part = "forward"
                return result

        self._mode = mode = FunctionTimer()
        mode.__enter__()
        try:
            yield
        finally:
            self._mode = None
            if torch_private.innermost_function_mode() is mode:  # Ctrl-C may come while it is off
                mode.__exit__(None, None, None)

    def _lap(self) -> None:
        now_s = self.now()
        if self._inside:
            self.split.pieces[self._inside[-1]] += now_s - self._since_s
        self._since_s = now_s


def shares(splits: Sequence[Split], whole: Sequence[Split]) -> dict[Part, float]:
    """Return the share of each part in all calls, 0 to 1.

    Looking into the parts may take longer than the parts themselves. So `whole`, splits of calls
    without inner instruments, give the length of each whole part, and `splits` the parts within it.
    """
    pieces, found = _summed(splits), dict.fromkeys(PARTS, 0.0)
    seen, lengths = _by_whole(pieces), _by_whole(_summed(whole or splits))
    total_s = sum(lengths[around] for around in seen)
    for (around, part), spent_s in pieces.items():
        if total_s and seen[around]:
            found[part] += lengths[around] / total_s * spent_s / seen[around]
    return found


def _by_whole(pieces: dict[Piece, float]) -> dict[Part, float]:
    found = defaultdict[Part, float](float)
    for (around, _), spent_s in pieces.items():
        found[around] += spent_s
    return found


def _summed(splits: Sequence[Split]) -> dict[Piece, float]:
    """Return seconds by piece, without overhead, in the faster half of all calls: other processes
    interrupted the slower half.
    """
    found = defaultdict[Piece, float](float)
    for split in sorted(splits, key=lambda one: one.total_s)[: (len(splits) + 1) // 2]:
        for piece, spent_s in split.pieces.items():
            if piece[1] != "overhead":
                found[piece] += spent_s
    return found
