"""Interleaved rounds: every variant once a round, in shuffled order, until it is enough."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from speedkit_jupyter.rounds import clock, compilations
from speedkit_jupyter.rounds.budget import OVERHEAD_S, Budget
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.record import Record
from speedkit_jupyter.rounds.runner import RECENT, Runner
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S, ShuffledRounds, block_length
from speedkit_jupyter.rounds.statistics import BUSY, least_rounds
from speedkit_jupyter.step import repeats
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import heap

# A block has this many steps at least, so that one outlier is no more than a third of it. Where a
# step of the baseline fills a block that often, each is a block of its own, without a lead-in.
BLOCK_STEPS = 3
LONG_S = BLOCK_STEPS * BLOCK_S
# A variant fails after this many rounds in a row without an optimizer step, or with a
# recompilation each: it would go on, since torch's own limit is 8 for one function.
MOST_LEFT_OUT = 10
COMPILES = "it compiles anew in every round: `%speedkit compile` says why"
OVERFLOW = "the GradScaler skipped every optimizer step: gradients overflow"
# The state of a variant in words, while it may change.
WORDS = {"too noisy": "not clear yet", "not checked": "not clear yet"}
# Verdicts of what can't win, and of what is proven faster by its times.
LOST, AHEAD = ("slower", "same"), ("faster", "accepted", "other model")
# Seconds of one step of a block, and those in which other processes may have held it up; None if
# the variant failed, or an optimizer step was skipped.
Block = tuple[float, float] | None


class VariantStatus(NamedTuple):
    """One variant so far: `speedup` over baseline with its interval, if known, and its state."""

    name: str
    speedup: float | None
    low: float | None
    high: float | None
    state: str


class Progress(NamedTuple):
    """Where a benchmark is: `done` of the budget (0 to 1), in words, and the known of variants."""

    done: float
    text: str
    known: tuple[VariantStatus, ...] = ()


class Policy:
    """Time each variant until its verdict is clear, then check it: for results that are printed.

    A search has subclasses. Records come baseline first; `racing` are those still in the rounds.
    """

    far_slower = math.inf  # a variant that is this many times slower in its warm-up is not timed
    checked: int | None = None  # about how many variants are checked; None for all
    proves = False  # whether all that is to be checked is checked, whatever time is left
    weighs = False  # whether the memory of each variant is measured before the rounds
    has_limits = True  # whether memory and machine limits are measured after them
    counts_warm_up = False  # whether the fastest step of each warm-up is a first round

    @property
    def rounds_s(self) -> float:
        """Return the most seconds that the rounds may take, of what the budget leaves."""
        return math.inf

    def least_rounds(self, others: int) -> int:
        """Return how many rounds decide about this many variants next to the baseline."""
        return least_rounds(others)

    def why_too_heavy(self, baseline: Record, record: Record) -> str:
        """Return why a weighed variant is not timed; empty where it is."""
        return ""

    def leaving(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return the records that leave after a round; a planned look has a `comparison`."""
        return ()

    def is_over(self, racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether the rounds end after this one; at a planned look with a `comparison`."""
        ratios = [comparison.ratio(record) for record in racing] if comparison else []
        return comparison is not None and all(ratio.settled for ratio in ratios if ratio)

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the records to check, which may win, the likeliest first; the next is asked for
        once the one before it is judged.
        """
        verdicts = {record.name: comparison.verdict(record) for record in comparison.records[1:]}
        timed = [r for r in comparison.records[1:] if r.times_s and verdicts[r.name] not in LOST]
        yield from sorted(timed, key=lambda r: (verdicts[r.name] not in AHEAD, median(r.times_s)))


class Sampler:
    """Takes the times, in rounds of about `budget_s` in all, as the whole `budget` allows.

    `skipped_rounds` and `compiled_rounds` count the rounds that were left out, because an optimizer
    step was skipped or a variant compiled.
    """

    def __init__(
        self, runners: Sequence[Runner], budget_s: float, throughput: bool, budget: Budget
    ) -> None:
        self._budget, self._interruptions = budget, clock.Interruptions()
        self._blocks_s: dict[int, deque[float]] = {}
        racing, start_s = list(runners), budget.spent_s
        self.runners, self.throughput, self._budget_s = racing, throughput, budget_s
        # No reference to this object, which would keep copies of the state until a collection.
        self._left_s = lambda: budget_s - (budget.spent_s - start_s)
        self._rounds = ShuffledRounds(
            lambda: racing, self._left_s, comparisons=max(len(racing) - 1, 1)
        )
        self._statuses: tuple[VariantStatus, ...] = ()
        self._banner = ""
        self.skipped_rounds = self.compiled_rounds = 0
        # Of each runner, by its id: blocks in a row with a skipped step, or with a compilation.
        self._skipped, self._compiled = Counter[int](), Counter[int]()
        self._all = tuple(runners)
        self._lead_in, self._length = block_steps(runners, throughput)
        self._is_long = bool(runners) and runners[0].step_s >= LONG_S
        self._steps = self._lead_in + self._length  # of one block

    @property
    def error(self) -> float:
        """Return the probability of a false verdict that the present look may have."""
        return self._rounds.error

    @property
    def round_s(self) -> float | None:
        """Return the mean seconds of a round; None before the first."""
        return self._rounds.round_s

    def run(self, policy: Policy, result: Callable[[], Comparison]) -> Iterator[Progress]:
        """Take rounds until the budget is spent or the `policy`, by the `result`, ends them."""
        if policy.counts_warm_up and self.runners and not self._lead_in:
            for runner in self.runners:
                runner.record.add(runner.fastest_s, 0.0)
            if not any(runner.was_disturbed for runner in self.runners):
                self._let_go(policy.leaving(self._racing, None))
        for order in self._rounds:
            blocks: dict[int, Block] = {}
            yield from self._round(self._arranged(order), blocks)
            if len(blocks) < len(order):  # no time for all of it
                self._rounds.end()
                return
            comparison = result() if self._note(blocks) else None
            if not self.runners:  # the baseline itself has failed
                continue
            if comparison is not None:
                self._statuses = statuses(comparison)
                self._banner = f"{BUSY}; " if comparison.busy else ""
            is_over = policy.is_over(self._racing, comparison)
            if not is_over and (gone := policy.leaving(self._racing, comparison)):
                self._let_go(gone)
                is_over = len(self.runners) == 1 or policy.is_over(self._racing, comparison)
                self._rounds.expect(self._shorter_round_s())
            if is_over:
                # At a planned look the interval pays for looking; else this is the run's end.
                if comparison is None:
                    self._rounds.end()
                return

    @property
    def _racing(self) -> list[Record]:
        return [runner.record for runner in self.runners]

    def _let_go(self, records: Sequence[Record]) -> None:
        gone = {id(record) for record in records}
        self.runners[1:] = [one for one in self.runners[1:] if id(one.record) not in gone]

    def _round(self, order: Sequence[Runner], blocks: dict[int, Block]) -> Iterator[Progress]:
        """Take a block of each variant, as far as there is time."""
        for runner in order:
            if not self._fits(runner):
                return
            blocks[id(runner)] = self._tried(runner)
            left_s = max(self._left_s(), 0.0)
            text = f"{self._banner}round {self._rounds.number}, {runner.record.name}"
            text += f", at most {left_s:.0f} s left"
            done = min(1 - left_s / max(self._budget_s, 1e-9), 1.0)
            yield Progress(done, text, self._statuses)

    def _arranged(self, order: Sequence[Runner]) -> list[Runner]:
        """Put the variants that keep memory, which the others hand back, next to each other, so
        that only the first of them gets it anew, in every other round.
        """
        return sorted(order, key=_keeps_memory, reverse=not self._rounds.number % 2)

    def _note(self, blocks: dict[int, Block]) -> bool:
        """Note a whole round, or leave it out; return whether to look at intervals after it."""
        known = {key: block for key, block in blocks.items() if block is not None}
        if len(known) == len(blocks):
            for runner in self.runners:
                runner.record.add(*known[id(runner)])
            return self._rounds.is_look()
        # A scaler skipped a step, one compiled, or a variant failed.
        self._rounds.leave_out()
        for runner in self.runners:
            if self._skipped[id(runner)] >= MOST_LEFT_OUT and not runner.record.times_s:
                runner.record.fail(OVERFLOW)
            if self._compiled[id(runner)] >= MOST_LEFT_OUT and not runner.record.times_s:
                runner.record.fail(COMPILES)
        is_left = not any(runner.record.failure for runner in self.runners)
        has_compiled = any(self._compiled[id(runner)] for runner in self.runners)
        self.compiled_rounds += is_left and has_compiled
        self.skipped_rounds += is_left and not has_compiled
        self.runners[:] = [runner for runner in self.runners if not runner.record.failure]
        return False

    def _fits(self, runner: Runner) -> bool:
        """Return whether its block ends within the budget; else the round is left out."""
        round_s = self._steps * sum(one.step_s for one in self.runners)
        # Under a minimal budget one round is taken anyway, if it adds little to its overhead.
        if self._rounds.number == 1 and self._budget.is_minimal and round_s <= OVERHEAD_S / 2:
            return True
        blocks_s = self._blocks_s.get(id(runner))
        return self._budget.allows(max(blocks_s) if blocks_s else self._steps * runner.worst_s)

    def _shorter_round_s(self) -> float:
        """Return the seconds of a round of the variants that are left, by their last times."""
        last_s = sum(runner.record.times_s[-1] for runner in self.runners if runner.record.times_s)
        return max(self._steps * last_s, 1e-6)

    def _tried(self, runner: Runner) -> Block:
        """Take a block; a variant that fails now is a row too, and the others go on."""
        begun = self._budget.spent_s
        try:
            return self._block_or_single_steps(runner)
        except Exception as error:
            if runner is self.runners[0]:  # the step itself: the user's error, as it is
                raise
            runner.fail(error)
            return None
        finally:
            blocks_s = self._blocks_s.setdefault(id(runner), deque(maxlen=RECENT))
            blocks_s.append(self._budget.spent_s - begun)

    def _block_or_single_steps(self, runner: Runner) -> Block:
        """Take a block. If steps can't follow each other (a schedule ends), each begins anew."""
        try:
            return self._block(runner)
        except StepError:
            raise
        except Exception as error:
            if runner.facts.afresh or self._steps < 2:
                raise
            ended = repeats.ended(error)
        block = self._block(replace(runner, facts=replace(runner.facts, repeats=ended)))
        for one in self._all:  # also those that left, which are checked
            one.begin_afresh(ended)
        return block

    def _block(self, runner: Runner) -> Block:
        """Time steps that start from the variant's warm state."""
        assert runner.warm is not None
        begun_s, before = self._budget.spent_s, compilations.graphs()
        with runner.applied(), runner.record.compilations.counted():
            if not runner.facts.afresh:
                runner.warm.restore()
            heap.occupy_free_addresses()
            for untimed in range(self._lead_in, -1, -1):
                scale, graphs = runner.scale(), compilations.graphs()
                if self._is_long or not untimed:  # a short one that leads in never counts
                    self._interruptions.begin()
                seconds = runner.timed() if untimed else self._timed(runner)
                if untimed and self._is_long and runner.has_settled:
                    break  # so this step counts
            waited_s = self._interruptions.seconds(seconds)
            skipped = runner.scale() < scale
            compiled = compilations.graphs() > graphs
        if compilations.graphs() > before:
            took_s = self._budget.spent_s - begun_s
            self._budget.exclude(max(took_s - self._steps * runner.step_s, 0.0))
        for count, is_one in ((self._compiled, compiled), (self._skipped, skipped)):
            count[id(runner)] = count[id(runner)] + 1 if is_one else 0
        return None if skipped or compiled else (seconds / self._length, waited_s / self._length)

    def _timed(self, runner: Runner) -> float:
        """Return the seconds of a block's timed steps."""
        if self.throughput and not runner.facts.afresh:
            steps = (runner.once() for _ in range(self._length))
            return clock.timed(lambda: deque(steps, maxlen=0), runner.device)
        return sum(runner.timed() for _ in range(self._length))


def block_steps(runners: Sequence[Runner], throughput: bool = False) -> tuple[int, int]:
    """Return how many steps of a block are not timed, which lead in, and how many are."""
    shortest_s = max(min((runner.step_s for runner in runners), default=1.0), 1e-7)
    # Twice as long where the device is awaited only at the block's end, so that its queue can fill.
    length = block_length(shortest_s, 2 * BLOCK_S if throughput else BLOCK_S)
    if runners and runners[0].step_s < LONG_S:
        # Half a millisecond after a switch of variants is not timed: caches and clocks settle.
        return block_length(shortest_s, block_s=BLOCK_S / 20), max(BLOCK_STEPS, length)
    # The first step may get what another variant's block has handed back to the system; what is
    # kept settles in two at most.
    toggles = any(map(_keeps_memory, runners))
    return (2 if heap.is_kept() else 1) if toggles else 0, length


def _keeps_memory(runner: Runner) -> bool:
    return "malloc" in runner.record.applied


def statuses(comparison: Comparison) -> tuple[VariantStatus, ...]:
    """Return a row for each variant of a benchmark that is not finished."""
    return tuple(_status(comparison, record) for record in comparison.records)


def _status(comparison: Comparison, record: Record) -> VariantStatus:
    verdict, ratio = comparison.verdict(record), comparison.ratio(record)
    state = WORDS.get(verdict, verdict)
    left = len(record.times_s) < len(comparison.baseline.times_s)
    if record.same_as_baseline:
        ratio, state = None, "changes nothing"
    elif ratio is None or verdict in ("failed", "declined"):
        is_known = record is comparison.baseline or record.failure
        ratio, state = None, state if is_known else "waiting"
    elif verdict != "wrong" and (left or not ratio.is_bounded):
        state = "slower than the best, dropped" if left else "measuring"
    low, high = (ratio.low, ratio.high) if ratio and ratio.is_bounded else (None, None)
    return VariantStatus(record.name, ratio.median if ratio else None, low, high, state)
