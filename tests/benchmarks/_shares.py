"""Where the seconds of a search or a comparison go, seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.callback import callback_handler

from speedkit_jupyter.measure.checks.examination import Examination
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.sampler import Sampler
from speedkit_jupyter.measure.undo.snapshot import Snapshot

PARTS = ("timed steps", "lead-ins", "warm-up", "checks", "copies", "rest", "compiling")


class Shares:
    """Seconds by part. Each second counts once, for the innermost part; all of a check is its."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside, self._since_s = ["rest"], time.perf_counter()
        self._lead_ins: int | None = None  # those left of a block; None outside of blocks

    @property
    def total_s(self) -> float:
        """Return the seconds without compiling."""
        return sum(self.seconds.values()) - self.seconds["compiling"]

    @property
    def timed(self) -> float:
        """Return the share of the timed steps of rounds in all but compiling."""
        return self.seconds["timed steps"] / self.total_s

    def __str__(self) -> str:
        parts = [(name, seconds / self.total_s) for name, seconds in self.seconds.items()]
        return ", ".join(f"{name} {share:.0%}" for name, share in parts if name != "compiling")

    def enter(self, part: str) -> None:
        self._note()
        within = self._inside[-1]
        self._inside.append("checks" if within == "checks" and part != "compiling" else part)

    def leave(self) -> None:
        self._note()
        self._inside.pop()

    def _note(self) -> None:
        now_s = time.perf_counter()
        self.seconds[self._inside[-1]] += now_s - self._since_s
        self._since_s = now_s

    def within(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, noted as this part."""

        def noted(*given: Any, **named: Any) -> Any:
            self.enter(part)
            try:
                return call(*given, **named)
            finally:
                self.leave()

        return noted

    def timed_step(self, call: Callable[..., float]) -> Callable[..., float]:
        """Return `clock.timed`, noted as a lead-in or timed step of a block, or as warm-up."""

        def noted(*given: Any) -> float:
            part = "warm-up" if self._lead_ins is None else "timed steps"
            if self._lead_ins:
                self._lead_ins, part = self._lead_ins - 1, "lead-ins"
            return self.within(part, call)(*given)

        return noted

    def block(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Sampler._block`, whose first steps are its lead-in."""

        def noted(sampler: Sampler, *given: Any) -> Any:
            self._lead_ins = sampler._lead_in
            try:
                return call(sampler, *given)
            finally:
                self._lead_ins = None

        return noted

    def check(self, call: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return `Examination.late`, a generator whose every turn is a check."""

        def noted(*given: Any) -> Iterator[Any]:
            turns = call(*given)
            while (one := self.within("checks", next)(turns, None)) is not None:
                yield one

        return noted


@contextmanager
def noted() -> Iterator[Shares]:
    """Note where the seconds of the block go."""
    shares = Shares()
    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (clock, "timed", shares.timed_step(clock.timed)),
        (Sampler, "_block", shares.block(Sampler._block)),
        (Examination, "late", shares.check(Examination.late)),
        (Snapshot, "__init__", shares.within("copies", Snapshot.__init__)),
        (Snapshot, "restore", shares.within("copies", Snapshot.restore)),
    ]
    with ExitStack() as stack:
        for owner, name, call in wrapped:
            stack.enter_context(mock.patch.object(owner, name, call))
        start = callback_handler.register_start_callback(lambda _: shares.enter("compiling"))
        end = callback_handler.register_end_callback(lambda _: shares.leave())
        stack.callback(callback_handler.remove_start_callback, start)
        stack.callback(callback_handler.remove_end_callback, end)
        yield shares
        shares.leave()
