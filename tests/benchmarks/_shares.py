"""Measure where the seconds of a search or a comparison go, by patching its functions."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.callback import callback_handler

from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.accuracy_check import AccuracyCheck
from speedkit_jupyter.rounds.sampler import Sampler
from speedkit_jupyter.state.snapshot import Snapshot

PARTS = ("timed steps", "lead-ins", "warm-up", "checks", "copies", "rest", "compiling")


class Shares:
    """Seconds of PARTS, without nested parts. Within checks, only compiling counts separately."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside, self._since_s = ["rest"], time.perf_counter()

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values()) - self.seconds["compiling"]

    def share(self, part: str = "timed steps") -> float:
        return self.seconds[part] / self.total_s

    def __str__(self) -> str:
        return ", ".join(f"{part} {self.share(part):.0%}" for part in PARTS[:-1])

    def move(self, part: str = "") -> None:
        """Count the time since the last move. Then begin `part`, or end the current part."""
        now_s, inside = time.perf_counter(), self._inside[-1]
        self.seconds[inside] += now_s - self._since_s
        self._since_s = now_s
        if not part:
            self._inside.pop()
        else:
            self._inside.append(inside if inside == "checks" and part != "compiling" else part)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count the time of a block as `part`; as a decorator, the time of each call."""
        self.move(part)
        try:
            yield
        finally:
            self.move()


@contextmanager
def noted() -> Iterator[Shares]:
    shares, is_block = Shares(), [False]
    steps = {part: shares.within(part)(clock.timed) for part in ("lead-ins", "warm-up")}
    blocks = Sampler._block

    def timed(*given: Any) -> float:
        return steps["lead-ins" if is_block[0] else "warm-up"](*given)

    def block(sampler: Sampler, *given: Any) -> Any:
        is_block[0] = True
        try:
            found = blocks(sampler, *given)
        finally:
            is_block[0] = False
        timed_s = found[0] * sampler._length if found else 0.0
        shares.seconds["lead-ins"] -= timed_s
        shares.seconds["timed steps"] += timed_s
        return found

    copies = {
        name: shares.within("copies")(vars(Snapshot)[name]) for name in ("__init__", "restore")
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(clock, "timed", timed))
        stack.enter_context(mock.patch.object(Sampler, "_block", block))
        stack.enter_context(
            mock.patch.object(AccuracyCheck, "check", shares.within("checks")(AccuracyCheck.check))
        )
        stack.enter_context(mock.patch.multiple(Snapshot, **copies))
        start = callback_handler.register_start_callback(lambda _: shares.move("compiling"))
        end = callback_handler.register_end_callback(lambda _: shares.move())
        stack.callback(callback_handler.remove_start_callback, start)
        stack.callback(callback_handler.remove_end_callback, end)
        yield shares
        shares.move()
