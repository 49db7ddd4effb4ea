"""Plan the time for a benchmark's rounds, and time the variants in shuffled rounds."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from speedkit_jupyter.rounds import budget as costs
from speedkit_jupyter.rounds import busy_machine
from speedkit_jupyter.rounds.budget import OVERHEAD_S, Budget, graphs
from speedkit_jupyter.rounds.comparison import Comparison, Progress, Record
from speedkit_jupyter.rounds.runner import LEFT_OUT_FIRST, OVERFLOW, RECENT, Runner
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S, ShuffledRounds, block_length
from speedkit_jupyter.rounds.statistics import least_rounds
from speedkit_jupyter.step import watching
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import heap

# A block has at least BLOCK_STEPS steps, so that one slow step weighs less. If the baseline's step
# takes LONG_S seconds or more, a block may have one step, and usually has no untimed lead-in.
BLOCK_STEPS = 3
LONG_S = BLOCK_STEPS * BLOCK_S
# A variant without times fails after this many consecutive rounds with a skipped optimizer step, or
# with a recompilation. The number exceeds torch's limit of 8 recompilations per function.
MOST_LEFT_OUT = 10
COMPILES = "it recompiles in every round: `%speedkit compile` shows the reason"
# A block's seconds per step, and its possible delay per step by other processes. None if the
# variant failed, an optimizer step was skipped, or code was compiled.
Block = tuple[float, float] | None
# Verdicts on variants that can't win, and on variants that are ahead.
LOST, AHEAD = ("slower", "same"), ("faster", "other model")


class Policy:
    """Time all variants until every verdict is clear, then check possible winners.

    The table says when a benchmark uses each member. The baseline is the first record; `racing` has
    the records of variants that are still timed. A search overrides members in a race
    (`search.races.PlanRace`) and in a proof (`search.races.Proof`).

    | member | used | overridden in |
    | --- | --- | --- |
    | `most_times_slower` | after the first steps of each variant | race |
    | `checked`, `deciding_rounds`, `rounds_s` | to plan the time | race; proof: `checked` |
    | `staying` | after every round | race, proof |
    | `measures_memory` | after the rounds | race, proof |
    | `proves`, `to_check` | last, for the checks | proof |
    """

    most_times_slower = math.inf  # variants this many times slower than the baseline are not timed
    checked: int | None = None  # approximate number of checked variants; 0 for none, None for all
    deciding_rounds: int | None = None  # fewest rounds that decide; None: as intervals need
    proves = False  # True if the first check ignores the budget
    measures_memory = True

    @property
    def rounds_s(self) -> float:
        """Return the policy's own limit on the duration of the rounds, in seconds."""
        return math.inf

    def staying(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        """Return the records of the next round; empty if the rounds are over.

        `comparison` is None except at planned tests; this policy ends rounds only there.
        """
        return () if self.are_settled(racing, comparison) else racing

    @staticmethod
    def are_settled(racing: Sequence[Record], comparison: Comparison | None) -> bool:
        """Return whether more rounds would change no verdict; False without a comparison."""
        ratios = [comparison.ratio(record) for record in racing] if comparison else []
        return comparison is not None and all(ratio.settled for ratio in ratios if ratio)

    def to_check(self, comparison: Comparison) -> Iterator[Record]:
        """Yield the records to check, likely winners first."""
        verdicts = {record.name: comparison.verdict(record) for record in comparison.records[1:]}
        timed = [r for r in comparison.records[1:] if r.times_s and verdicts[r.name] not in LOST]
        yield from sorted(timed, key=lambda r: (verdicts[r.name] not in AHEAD, median(r.times_s)))


# --- the seconds of the rounds and of the checks after them ---


def checks_s(runners: Sequence[Runner], policy: Policy) -> float:
    """Return the estimated seconds for checking all variants, or `policy.checked` of them."""
    number = len(runners[1:]) if policy.checked is None else min(len(runners[1:]), policy.checked)
    if not number:
        return 0.0
    lowered = {runner.precision for runner in runners} - {runners[0].precision}
    steps = costs.REFERENCE + costs.CHECKED * (len(lowered) + number)
    return steps * runners[0].usual_s + costs.CHECK_S * number


def least_s(runners: Sequence[Runner], policy: Policy) -> float:
    """Return the estimated seconds of the fewest rounds that decide on every variant."""
    rounds = policy.deciding_rounds or least_rounds(len(runners) - 1)
    return costs.LATEST * rounds * sum(runner.usual_s for runner in runners)


def too_short(budget: Budget, runners: Sequence[Runner], policy: Policy) -> bool:
    """Return whether a budget that isn't minimal is too short for the fewest rounds and checks."""
    needed_s = least_s(runners, policy) + checks_s(runners, policy)
    return not budget.is_minimal and needed_s > budget.left_s


def shares_of_time(
    warm: Sequence[Runner], policy: Policy, budget: Budget
) -> tuple[list[Runner], float, float]:
    """Return the runners that the budget allows, the seconds for rounds, the seconds for checks.

    Variants far slower than the baseline are left out first, then the last variants. The baseline
    and one variant stay if a step of each fits. A minimal budget keeps all variants.
    """

    def fits_a_pair() -> bool:
        return len(kept) == 2 and budget.allows(sum(runner.worst_s for runner in kept))

    kept, left_s = list(warm), budget.left_s
    while len(kept) > 1 and too_short(budget, kept, policy) and not fits_a_pair():
        slowest = max(kept[1:], key=lambda runner: runner.fastest_s)
        gone = slowest if slowest.times_slower(kept[0]) > LEFT_OUT_FIRST else kept[-1]
        gone.leave_out(kept[0], budget)
        kept = [runner for runner in kept if runner is not gone]
    one_s = min(checks_s(kept[:2], policy), left_s / 2)
    reserved_s = max(min(checks_s(kept, policy), left_s - least_s(kept, policy)), one_s, 0.0)
    rounds_s = left_s - reserved_s
    if budget.is_minimal:
        rounds_s = max(rounds_s, min(budget.seconds, costs.OVERHEAD_S / 2))
    return kept, min(rounds_s, policy.rounds_s), reserved_s


# --- the rounds ---


class Sampler:
    """Time the runners `every` in rounds, for about `rounds_s` seconds of the `budget`.

    `records` has the records of all variants, and `runners` the runners that are still timed.
    Rounds with skipped steps (`skipped_rounds`) or compiling (`compiled_rounds`) are left out.
    """

    def __init__(
        self, every: Sequence[Runner], rounds_s: float, records: Sequence[Record], budget: Budget
    ) -> None:
        self._every, self._rounds_s = every, rounds_s
        self._records, self._budget = tuple(records), budget
        self.runners = racing = list(every)
        # The lambda must not refer to this object: a cycle would keep copies of the state alive.
        end_s = budget.spent_s + rounds_s
        self._left_s = lambda: end_s - budget.spent_s
        others = max(len(racing) - 1, 1)
        self.rounds = ShuffledRounds(racing, self._left_s, comparisons=others)
        self.skipped_rounds = self.compiled_rounds = 0
        # For each runner's id: seconds of recent blocks, and number of blocks left out in a row.
        self._blocks_s: dict[int, deque[float]] = {}
        self._skipped, self._compiled = Counter[int](), Counter[int]()
        self._interruptions = busy_machine.Interruptions()
        self._lead_in, self._length = block_steps(racing)
        self._is_long = bool(racing) and racing[0].step_s >= LONG_S
        self._steps = self._lead_in + self._length  # steps per block

    def run(self, policy: Policy) -> Iterator[Progress]:
        """Run rounds until the budget is spent or the `policy` ends them."""
        known: Comparison | None = None
        for order in self.rounds:
            blocks: dict[int, Block] = {}
            for runner in order:
                if not self._fits(runner):  # incomplete rounds don't count
                    self.rounds.end()
                    return
                blocks[id(runner)] = self._block_or_failure(runner)
                left_s, name = max(self._left_s(), 0.0), runner.record.name
                text = f"round {self.rounds.number}, {name}, at most {left_s:.0f} s left"
                text = f"{busy_machine.BUSY}; {text}" if known and known.busy else text
                yield Progress(min(1 - left_s / max(self._rounds_s, 1e-9), 1.0), text, known)
            comparison = self._record(blocks)
            if not self.runners:  # all variants have failed
                continue
            staying = policy.staying([one.record for one in self.runners], comparison)
            if not staying:
                # If rounds end between planned tests, the last test's error probability is used.
                if comparison is None:
                    self.rounds.end()
                return
            kept = set(map(id, staying))
            self.runners[:] = [one for one in self.runners if id(one.record) in kept]
            known = comparison or known

    def _fits(self, runner: Runner) -> bool:
        """Return whether the runner's block fits into the budget."""
        round_s = self._steps * sum(one.step_s for one in self.runners)
        # A minimal budget still gets one round, if the round adds little to the overhead.
        if self.rounds.number == 1 and self._budget.is_minimal and round_s <= OVERHEAD_S / 2:
            return True
        # One step of the first block may be as slow as the slowest warm-up step.
        first_s = (self._steps - 1) * runner.fastest_s + runner.worst_s
        return self._budget.allows(max(self._blocks_s.get(id(runner), [first_s])))

    def _block_or_failure(self, runner: Runner) -> Block:
        """Return a timed block, or record an error and return None. Raises the baseline's errors.

        After an error, a retry starts each step from the warm state; if it works, later steps do.
        """
        begun = self._budget.spent_s
        try:
            try:
                return self._block(runner)
            except StepError:
                raise
            except Exception as error:
                if runner.facts.repeats.afresh or self._steps < 2:
                    raise
                ended = watching.ended(error)
            block = self._block(replace(runner, facts=replace(runner.facts, repeats=ended)))
            for one in self._every:  # including dropped variants, which may be checked
                one.facts = replace(one.facts, repeats=ended)
            return block
        except Exception as error:
            if runner is self.runners[0]:
                raise
            runner.fail(error)
            return None
        finally:
            blocks_s = self._blocks_s.setdefault(id(runner), deque(maxlen=RECENT))
            blocks_s.append(self._budget.spent_s - begun)

    def _block(self, runner: Runner) -> Block:
        """Return the times of a block; None if an optimizer step is skipped or code compiles."""
        assert runner.warm is not None
        usual_s, counted = self._steps * runner.step_s, runner.record.compilations.counted()
        with self._budget.compiling_excluded(usual_s), runner.applied(), counted:
            if not runner.facts.repeats.afresh:
                runner.warm.restore()
            heap.occupy_free_addresses()
            for untimed in range(self._lead_in, -1, -1):
                scale, compiled = runner.scale(), graphs()
                if self._is_long or not untimed:  # short lead-in steps never count
                    self._interruptions.begin()
                steps = 1 if untimed else self._length
                times_s = [runner.timed() for _ in range(steps)]
                if untimed and self._is_long and runner.has_settled:
                    break  # this step counts
            seconds = sum(times_s)
            waited_s = self._interruptions.seconds(seconds)
            skipped = runner.scale() < scale
            compiled = graphs() - compiled
        for count, is_one in ((self._compiled, compiled), (self._skipped, skipped)):
            count[id(runner)] = count[id(runner)] + 1 if is_one else 0
        if skipped or compiled:
            return None
        runner.record.steps_s += times_s
        return seconds / steps, waited_s / steps

    def _record(self, blocks: dict[int, Block]) -> Comparison | None:
        """Record a complete round, drop failed variants, return results at a planned test."""
        known = {key: block for key, block in blocks.items() if block is not None}
        if len(known) == len(blocks):
            for runner in self.runners:
                runner.record.add(*known[id(runner)])
            return self.comparison() if self.rounds.is_look() else None
        # A scaler skipped a step, code was compiled, or a variant failed.
        self.rounds.leave_out()
        for count, why in ((self._skipped, OVERFLOW), (self._compiled, COMPILES)):
            for runner in self.runners:
                if count[id(runner)] >= MOST_LEFT_OUT and not runner.record.times_s:
                    runner.record.fail(why)
        is_left = not any(runner.record.failure for runner in self.runners)
        has_compiled = any(self._compiled[id(runner)] for runner in self.runners)
        self.compiled_rounds += is_left and has_compiled
        self.skipped_rounds += is_left and not has_compiled
        self.runners[:] = [runner for runner in self.runners if not runner.record.failure]
        return None

    def comparison(self) -> Comparison:
        """Return the results so far, with the error probability of the current test."""
        return Comparison(self._records, {}, self._budget.seconds, error=self.rounds.error)


def block_steps(runners: Sequence[Runner]) -> tuple[int, int]:
    """Return the numbers of untimed lead-in steps and timed steps per block."""
    shortest_s = min((runner.step_s for runner in runners), default=1.0)
    length = block_length(shortest_s)
    if runners and runners[0].step_s < LONG_S:
        # The first half millisecond after a switch is not timed, so that caches and clocks settle.
        return block_length(shortest_s, block_s=BLOCK_S / 20), max(BLOCK_STEPS, length)
    # The first step may request memory that another variant's block has returned to the system;
    # kept memory settles within two steps.
    toggles = any("malloc" in runner.record.applied for runner in runners)
    return (2 if heap.is_kept() else 1) if toggles else 0, length
