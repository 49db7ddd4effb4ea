"""Candidates in shuffled rounds; what is clearly slower leaves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data.loader_settings import LoaderSettings, end_workers
from speedkit_jupyter.rounds.statistics import ERROR, PRECISE, Ratio, paired_ratio

T = TypeVar("T")
# A candidate leaves after this many rounds if it takes this many times as long as the fastest; the
# last entry that applies counts.
SLOWER = ((3, 1.6), (6, 1.3), (10, 1.15))
# An interval that decides needs this many rounds; more than MOST tell nothing that matters.
LEAST, MOST = 8, 100
# Workers whose batches take at most this many times as long as the best are worth variations.
NEARLY = 1.25
# What gains less is not worth another loader.
GAIN = 1.02
# Source: torch/utils/data/dataloader.py, which raises a plain RuntimeError.
TIMED_OUT = re.compile(r"DataLoader timed out after ([\d.]+) seconds")


@dataclass(eq=False)
class LoaderCandidate:
    """One way to load. `times_s` are the seconds of a batch and its step, `waits_s` what of them
    was waiting, by the number of the round; `why_out` or the error `failure` ended its race.
    """

    settings: LoaderSettings
    times_s: dict[int, float] = field(default_factory=dict)
    waits_s: dict[int, float] = field(default_factory=dict)
    why_out: str = ""
    failure: str = ""
    loader: DataLoader[Any] | None = field(default=None, repr=False)

    @property
    def batch_s(self) -> float:
        """Median seconds of a batch; infinite before it was timed."""
        return median(self.times_s.values()) if self.times_s else float("inf")

    @property
    def waiting(self) -> float:
        """The share of its time that went to waiting for batches."""
        total_s = sum(self.times_s.values())
        return sum(self.waits_s.values()) / total_s if total_s else 0.0

    def leave(self, why: str) -> None:
        self.why_out = why
        self.close()

    def close(self) -> None:
        loader, self.loader = self.loader, None
        if loader is not None:
            end_workers(loader)


@dataclass
class LoaderRace:
    """`candidates`, the user's own first, which never leaves; `block` times one of them in a round:
    seconds of a batch's step, and of waiting for the batch.
    """

    candidates: list[LoaderCandidate]
    block: Callable[[LoaderCandidate, int], tuple[float, float]]
    rounds: int = 0
    _stuck: str = ""

    @property
    def own(self) -> LoaderCandidate:
        return self.candidates[0]

    @property
    def racing(self) -> list[LoaderCandidate]:
        return [one for one in self.candidates if not (one.why_out or one.failure)]

    def admit(
        self, more: Iterable[LoaderSettings], enter: Callable[[LoaderCandidate], object]
    ) -> None:
        """Let others into the race, each once it can `enter`."""
        for one in map(LoaderCandidate, more):
            self.candidates.append(one)
            self._attempt(one, partial(enter, one))

    def round(self, order: Sequence[LoaderCandidate]) -> Iterator[LoaderCandidate]:
        """Measure each once, in this order; yield after each."""
        blocks = dict[LoaderCandidate, tuple[float, float]]()
        for one in order:
            block = self._attempt(one, partial(self.block, one, self.rounds))
            if block is not None:
                blocks[one] = block
            yield one
        mine = self.own.settings
        for one, (step_s, wait_s) in blocks.items():
            # A loader changes how long the loop waits; at best nothing else, unless batches come
            # from other memory, or fewer workers take the step's cores.
            settings = one.settings
            if settings.pin_memory == mine.pin_memory and settings.num_workers >= mine.num_workers:
                step_s = max(step_s, blocks[self.own][0])
            one.times_s[self.rounds], one.waits_s[self.rounds] = step_s + wait_s, wait_s
        self.rounds += 1
        fastest_s = self._fastest.batch_s
        for one in self.racing[1:]:
            allowed = [times for rounds, times in SLOWER if len(one.times_s) >= rounds]
            if allowed and one.batch_s > allowed[-1] * fastest_s:
                one.leave(f"{one.batch_s / fastest_s:.2f} times the fastest's time")

    def _attempt(self, one: LoaderCandidate, call: Callable[[], T]) -> T | None:
        """Make a call for a candidate, which leaves where it fails. Once workers are stuck no other
        workers are tried: they would be waited for as long.
        """
        if self._stuck and one.settings.num_workers and one is not self.own:
            one.leave(f"not tried: {self._stuck}")
            return None
        try:
            return call()
        except Exception as error:
            if one is self.own:  # its errors are the user's
                raise
            if (found := TIMED_OUT.search(str(error))) and one.settings.num_workers:
                one.leave(f"gave no batch within {float(found[1]):.3g} s")
                self._stuck = f"{one.settings.words} {one.why_out}"
                return None
            # Of an error in a worker the last line names the kind already.
            kind, line = type(error).__name__, str(error).strip().rpartition("\n")[2].strip()
            one.failure = line if line.startswith(f"{kind}:") else f"{kind}: {line}"
            one.close()
            return None

    @property
    def _fastest(self) -> LoaderCandidate:
        return min(self.racing, key=lambda one: one.batch_s)

    def best(self) -> LoaderCandidate:
        """Return the fastest by median; of those within 0.5 % of it, the first."""
        return next(one for one in self.racing if one.batch_s <= 1.005 * self._fastest.batch_s)

    def worth_variations(self) -> LoaderCandidate:
        """Return the fastest with workers if it is near the best (prefetching evens out batches
        that differ), else the best.
        """
        best = self.best()
        workers = [one for one in self.racing if one.settings.num_workers]
        fastest = min(workers, key=lambda one: one.batch_s, default=best)
        return fastest if fastest.batch_s <= NEARLY * best.batch_s else best

    def proven(self) -> LoaderCandidate:
        """Return the best, where it is proven faster than the user's own, and by enough."""
        best = self.best()
        ratio = None if best is self.own else self.ratio(best)
        is_faster = ratio is not None and ratio.low > 1 and ratio.median >= GAIN
        return best if is_faster else self.own

    def rival(self) -> LoaderCandidate | None:
        return min(self.racing[1:], key=lambda one: one.batch_s, default=None)

    def narrow(self, rival: LoaderCandidate | None) -> None:
        """Let only this one go on beside the user's own."""
        for one in self.racing[1:]:
            if one is not rival:
                one.leave("not the fastest by median" if one.times_s else "no time was left for it")

    def ratio(self, one: LoaderCandidate, baseline: LoaderCandidate | None = None) -> Ratio | None:
        """Return how many times as fast it is as the user's own, or as another."""
        other = baseline or self.own
        shared = sorted(one.times_s.keys() & other.times_s.keys())
        if not shared:
            return None
        before, now = ([each.times_s[at] for at in shared] for each in (other, one))
        return paired_ratio(before, now, ERROR / max(len(self.candidates) - 1, 1))

    def is_settled(self) -> bool:
        """Return whether more rounds would tell nothing that matters."""
        rounds = min(len(one.times_s) for one in self.racing)
        if not LEAST <= rounds < MOST:
            return rounds >= MOST
        best = self.best()
        ratios = [self.ratio(best, other) for other in self.racing if other is not best]
        return all(one is not None and one.settled and one.is_precise(PRECISE) for one in ratios)
