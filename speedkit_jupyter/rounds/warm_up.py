"""Warm up the variants of a step; the first calls of the baseline show how the step repeats."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from speedkit_jupyter.rounds import budget as costs
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.runner import Pool, Runner, Surrounding, release
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.step import watching
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import Variant
from speedkit_jupyter.step.watching import Repeats, counted, judged
from speedkit_jupyter.support import units
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import heap

# Share of the budget for the warm-up steps of all variants, if consecutive steps differ.
WARM_UP = 0.05


class WarmUp:
    """Warm up variants that are new to the `pool`: the `baseline()` first, then the `others()`.

    A failure becomes a row, a lack of time a reason. A budget that `grows` becomes long enough.
    """

    def __init__(
        self,
        step: Step,
        variants: Sequence[Variant],
        pool: Pool,
        budget: Budget,
        grows: bool = False,
    ) -> None:
        self._step, self._variants, self._pool = step, variants, pool
        self._budget, self._grows, self._start = budget, grows, pool.guard.state
        self._interruptions = clock.Interruptions()

    def baseline(self, around: Surrounding = nullcontext) -> Generator[Progress, None, Runner]:
        """Return the baseline's runner, warm, with the facts of the step's first calls.

        The very first call runs inside `around()`.
        """
        runner, start = self._pool.runner(self._step, self._variants[0]), self._start
        if runner.warm is not None:
            return runner
        yield Progress(0.0, f"warming up {runner.record.name} (1 of {len(self._variants)})")
        does, given = runner.facts.repeats, (self._budget, self._interruptions, self._most_s)
        try:
            with runner.applied(), watching.optimizers_made(self._step.models) as made:
                runner.warm_up(*given, around=around)
        except StepError:
            raise
        except Exception as error:  # a schedule may limit the calls
            if runner.warm is None or does is not watching.UNCOMPARED:
                raise
            does = watching.ended(error)
            release(error)
        first_s = runner.record.first_call_s or 0.0
        looks = does is watching.UNCOMPARED and self._budget.allows(2 * runner.fastest_s)
        if looks and watching.is_suspicious(first_s, runner.fastest_s):
            does = compared_runs(runner.step, start, runner.once, runner.applied, runner.warm)
        facts = replace(runner.facts, made=runner.facts.made or tuple(made), repeats=does)
        runner = replace(runner, facts=facts)
        if facts.repeats.afresh:
            start.restore()  # before the plan is applied: settings are part of the state
            with runner.applied():
                runner.warm_up(*given)
        draws = start.draws()
        start.restore()  # every variant warms up from the user's state
        runner = replace(runner, facts=replace(facts, leaves=draws or start.has_changed))
        self._pool.add([runner])
        return runner

    def others(self, first: Runner, far_slower: float) -> Generator[Progress, None, list[Runner]]:
        """Return all runners, with the `first`; drop variants that are `far_slower`."""
        budget, step, names = self._budget, self._step, self._variants[1:]
        # Planned only now, because the optimizers that the step creates are known.
        runners = [first, *(self._pool.runner(step, variant, first) for variant in names)]
        yield Progress(0.0, self._time_ahead(working(runners)))
        cold = [runner for runner in working(runners[1:]) if runner.warm is None]
        for number, runner in enumerate(cold, 2):
            record = runner.record
            if not budget.allows(2 * first.worst_s):
                leave_out(runner, first, budget)
                continue
            doing = "compiling" if record.is_compiled else "warming up"
            yield Progress(0.0, f"{doing} {record.name} ({number} of {len(self._variants)})")
            begun_s, excluded_s = clock.now(), budget.excluded_s
            try:
                with runner.applied():
                    heap.occupy_free_addresses()
                    if record.is_compiled:  # the first compiled variant loads Inductor
                        budget.exclude(clock.now() - begun_s)
                    runner.warm_up(budget, self._interruptions, self._most_s, first.worst_s)
            except Exception as error:
                runner.fail(error)
                if record.is_compiled:  # it has made no step
                    budget.exclude(clock.now() - begun_s - budget.excluded_s + excluded_s)
            is_slow = runner.times_slower(first) > far_slower
            if is_slow and runner.fastest_s > first.worst_s and not runner.was_disturbed:
                record.notes["dropped"] = _far_slower(runner, first)
                runner.drop_state()
            self._start.restore()
        self._pool.add(runners)
        return runners

    @property
    def _most_s(self) -> float:
        return WARM_UP * self._budget.seconds / len(self._variants)

    def _time_ahead(self, runners: Sequence[Runner]) -> str:
        """Return a text about the expected duration; a default budget grows as needed."""
        budget, rounds = self._budget, len(runners) * (costs.APART + 12)  # approximately
        needed_s = runners[0].worst_s * (costs.CHECK_STEPS + rounds)
        if self._grows:
            budget.grow(min(needed_s, 600.0))  # the longest default
        about_s = max(budget.seconds, costs.OVERHEAD_S)
        text = f"one step takes {runners[0].step_s:.2g} s: about {about_s:.0f} s"
        compiled = sum(runner.record.is_compiled for runner in runners)
        text += f" and the compiling of {compiled}" if compiled else ""
        is_short = needed_s > budget.seconds and budget.within is None
        return f"{text}, short for a clear answer; {costs.LONGER}" if is_short else text


def leave_out(runner: Runner, first: Runner, budget: Budget) -> None:
    """Stop measuring a variant and record the reason, with its speed if it is twice as slow."""
    given = f"{units.seconds(budget.seconds)} are"
    if budget.within is not None:  # users don't know the parts of a search's budget
        given = "the rest of the budget is"
    told = f"{given} too short for this many variants of it"
    if runner.was_disturbed:
        told = f"the machine was busy; {given} too short to time it"
    elif runner.times_slower(first) > 2.0:
        told = f"{_far_slower(runner, first)}; {given} too short to time it"
    runner.record.notes["left out"] = told
    runner.drop_state()


def _far_slower(runner: Runner, first: Runner) -> str:
    times = runner.times_slower(first)
    return f"far slower than {first.record.name}: {times:.1f} times in its fastest step"


def working(runners: Sequence[Runner]) -> list[Runner]:
    """Return the runners of variants that differ from the baseline and have not failed."""
    return [one for one in runners if not (one.record.failure or one.record.same_as_baseline)]


def compared_runs(
    step: Step,
    start: Snapshot,
    run: Callable[[], object],
    in_force: Surrounding = nullcontext,
    warm: Snapshot | None = None,
) -> Repeats:
    """Compare the work of two calls: from the `warm` or current state, and from `start`."""
    with in_force():
        if warm is not None:
            warm.restore()
        start.restore_randomness()  # the user's generators, because a step may draw its length
        with counted(step.models) as later:
            run()
    start.restore()
    with in_force():
        start.restore_randomness()
        with counted(step.models) as first:
            run()
    return judged(first, later)
