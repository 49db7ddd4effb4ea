"""Candidates in shuffled rounds; what is clearly slower leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from speedkit_jupyter.loading.candidate import Candidate
from speedkit_jupyter.measure.results.statistics import ERROR, PRECISE, Ratio, paired_ratio

# After so many rounds what takes so many times as long as the quickest leaves; looked up from the
# last entry that applies.
SLOWER = ((3, 1.6), (6, 1.3), (10, 1.15))
# What is decided by an interval needs so many rounds.
LEAST, MOST = 8, 100
# What takes so many times as long as the best is still near it; and so near that so many of them
# run against each other to the end.
NEARLY, FINAL, FINALISTS = 1.25, 1.04, 2
NOT_QUICKEST = "not the quickest in the middle"


@dataclass
class Race:
    """`candidates`, the user's own first, which never leaves. `epoch` has so many batches."""

    candidates: list[Candidate]
    block: Callable[[Candidate, int, int], None]
    epoch: int
    rounds: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def racing(self) -> list[Candidate]:
        """Those that are measured still."""
        return [one for one in self.candidates if one.races]

    def round(self) -> Iterator[Candidate]:
        """Measures each once; yields after it."""
        order = self.racing
        self._random.shuffle(order)
        for one in order:
            if not one.races:
                continue
            try:
                self.block(one, self.rounds, self.epoch)
            except Exception as error:
                if one is self.candidates[0]:  # the user's own, whose errors are the user's
                    raise
                one.fail(error)
                self._spare(one)
            yield one
        self.rounds += 1
        self._drop()

    def _spare(self, stuck: Candidate) -> None:
        """Where workers are stuck, others would be too, and each be waited for as long."""
        for one in self.racing[1:] if stuck.is_stuck else ():
            if one.settings.num_workers:
                one.why_out = f"not tried further: {stuck.words} {stuck.why_out}"
                one.close()

    def best(self) -> Candidate:
        """The quickest in the middle; of those that are as quick as that, the first."""
        able = [one for one in self.racing if one.threads is None]
        quickest_s = self._quickest_s(able)
        return next(one for one in able if one.batch_s(self.epoch) <= 1.005 * quickest_s)

    def narrow(self) -> None:
        """Only the finalists go on beside the user's own, and what is quicker by fewer threads."""
        finalists = self.finalists()
        slowest_s = max((one.batch_s(self.epoch) for one in finalists), default=0.0)
        for one in self.racing[1:]:
            is_quicker = one.threads is not None and one.batch_s(self.epoch) <= slowest_s
            if one not in finalists and not is_quicker:
                one.why_out = NOT_QUICKEST
                one.close()

    def finalists(self) -> list[Candidate]:
        """The quickest of the others that need no other number of threads, and what is so near it
        that more rounds must tell.
        """
        others = [one for one in self.racing[1:] if one.threads is None]
        others.sort(key=lambda one: one.batch_s(self.epoch))
        near_s = FINAL * others[0].batch_s(self.epoch) if others else 0.0
        return [one for one in others[:FINALISTS] if one.batch_s(self.epoch) <= near_s]

    def _quickest_s(self, among: Sequence[Candidate]) -> float:
        return min(one.batch_s(self.epoch) for one in among)

    def with_workers(self) -> list[Candidate]:
        """Those with workers that have times, the quickest first."""
        found = [one for one in self.candidates if one.settings.num_workers and one.times_s]
        return sorted(found, key=lambda one: one.batch_s(self.epoch))

    def promising(self) -> list[Candidate]:
        """The best, and the best with workers where it is not far from that: batches that are
        ahead even out what differs from one to the next.
        """
        best = self.best()
        near_s = NEARLY * best.batch_s(self.epoch)
        workers = (one for one in self.with_workers() if one.batch_s(self.epoch) <= near_s)
        return list(dict.fromkeys([best, *list(workers)[:1]]))

    def ratio(self, one: Candidate, baseline: Candidate | None = None) -> Ratio | None:
        """How many times as fast it is as the user's own, or as another."""
        other = baseline or self.candidates[0]
        shared = sorted(one.times_s.keys() & other.times_s.keys())
        if not shared:
            return None
        before, now = ([each.batch_s(self.epoch, at) for at in shared] for each in (other, one))
        return paired_ratio(before, now, ERROR / max(len(self.candidates) - 1, 1))

    def is_settled(self) -> bool:
        """Whether more rounds would tell nothing that matters."""
        rounds = min(len(one.times_s) for one in self.racing)
        if not LEAST <= rounds < MOST:
            return rounds >= MOST
        best = self.best()
        ratios = [self.ratio(best, other) for other in self.racing if other is not best]
        return all(one is not None and one.settled and one.is_precise(PRECISE) for one in ratios)

    def _drop(self) -> None:
        of_all_s = self._quickest_s(self.racing)
        of_able_s = self._quickest_s([one for one in self.racing if one.threads is None])
        for one in self.racing[1:]:
            quickest_s = of_able_s if one.threads is None else of_all_s
            allowed = [times for rounds, times in SLOWER if len(one.times_s) >= rounds]
            times = one.batch_s(self.epoch) / quickest_s
            if allowed and times > allowed[-1]:
                one.why_out = f"{times:.2f} times the quickest's time"
                one.close()
