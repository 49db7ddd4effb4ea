"""Plan the variants of a step, and warm up each of them from the user's state."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from speedkit_jupyter.plans import applying
from speedkit_jupyter.plans.context import hidden
from speedkit_jupyter.plans.planning import together
from speedkit_jupyter.right.judge import StepJudge
from speedkit_jupyter.rounds import budget as costs
from speedkit_jupyter.rounds import busy_machine, clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Progress, Record
from speedkit_jupyter.rounds.runner import Runner, Surrounding, release
from speedkit_jupyter.rounds.sampler import Policy, too_short
from speedkit_jupyter.state.measurement_guard import MeasurementGuard
from speedkit_jupyter.step import memory, watching
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import Variant, config_of
from speedkit_jupyter.step.watching import StepFacts
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue import heap

# Largest share of the budget for the warm-up of all variants, without each variant's first step.
WARM_UP = 0.05


@contextmanager
def pooled(step: Step, copies: int) -> Iterator[Pool]:
    """Hide plans, copy the user's state, and yield a pool; at the end restore state and plans.

    If the device has no room for `copies` of the state, copies are in main memory. Raises StepError
    during another measurement, or if another thread trains the models.
    """
    heap.settle()
    heap.occupy_free_addresses()
    with ExitStack() as stack:
        stack.callback(heap.give_back)
        # Plans are hidden first, because their settings are not part of the user's state.
        stack.enter_context(hidden(*step.models))
        parameters = [parameter for module in step.models for parameter in module.parameters()]
        state_bytes = memory.size(memory.state_tensors(step.models, step.optimizers))
        if step.optimizers:  # room for weights, gradients, and Adam's two tensors
            state_bytes = max(state_bytes, 4 * memory.size(parameters))
        fits = not parameters or memory.fits(copies * state_bytes, parameters[0].device)
        yield Pool(step, stack.enter_context(step.guarded(off_device=not fits)))


@dataclass
class Pool:
    """The runners of a step; `judge` compares their values with one trace."""

    step: Step
    guard: MeasurementGuard
    runners: dict[str, Runner] = field(default_factory=dict)
    judge: StepJudge = field(default_factory=StepJudge)

    def baseline(
        self, variants: Sequence[Variant], budget: Budget, around: Surrounding = nullcontext
    ) -> Generator[Progress, None, Runner]:
        """Warm up the first variant; return its runner, with facts about the step's calls.

        If the first call is slow, find out whether later calls do less work. The first call runs
        inside `around()`. The user's state is restored. A warm runner only gets a new record.
        """
        runner, start = self.runner(variants[0]), self.guard.state
        if runner.warm is not None:
            return runner
        yield Progress(0.0, f"warming up {runner.record.name} (1 of {len(variants)})")
        does, most_s = runner.facts.repeats, WARM_UP * budget.seconds / len(variants)
        given = budget, busy_machine.Interruptions(), most_s
        try:
            with runner.applied(), watching.optimizers_made(self.step.models) as made:
                runner.warm_up(*given, around=around)
        except StepError:
            raise
        except Exception as error:  # a learning-rate schedule may limit the calls
            if runner.warm is None or does is not watching.UNCOMPARED:
                raise
            does = watching.ended(error)
            release(error)
        first_s = runner.record.first_call_s or 0.0
        looks = does is watching.UNCOMPARED and budget.allows(2 * runner.fastest_s)
        if looks and watching.is_suspicious(first_s, runner.fastest_s):
            does = watching.compared_runs(
                self.step.models, start, runner.once, runner.applied, runner.warm
            )
        made_here = runner.facts.made or tuple(made)
        runner.facts = facts = replace(runner.facts, made=made_here, repeats=does)
        if does.afresh:
            start.restore()  # before the plan is applied: settings are part of the state
            with runner.applied():
                runner.warm_up(*given)
        draws = start.draws()
        start.restore()  # every variant warms up from the user's state
        runner.facts = replace(facts, leaves=draws or start.has_changed)
        self.runners[runner.record.name] = runner
        return runner

    def others(
        self,
        first: Runner,
        variants: Sequence[Variant],
        budget: Budget,
        policy: Policy,
        grows: bool = False,
    ) -> Generator[Progress, None, list[Runner]]:
        """Plan the other variants, and warm up each from the user's state; return all runners.

        Variants are not timed if they fail, don't fit into the budget, or take over
        `policy.most_times_slower` times as long as `first`; their records say why. If `grows`, the
        budget may grow to 600 s.
        """
        interruptions = busy_machine.Interruptions()
        # Variants are planned only now, when the optimizers that the step creates are known.
        runners = [first, *(self.runner(variant, first) for variant in variants[1:])]
        yield Progress(0.0, _time_ahead(working(runners), budget, grows))
        most_s = WARM_UP * budget.seconds / len(variants)
        cold = [runner for runner in working(runners[1:]) if runner.warm is None]
        for number, runner in enumerate(cold, 2):
            record = runner.record
            is_one_more = record.is_compiled and len(timed := warm(runners)) > 1
            if is_one_more and too_short(budget, [*timed, first], policy):  # if as fast as `first`
                runner.leave_out(first, budget)
                continue
            if not budget.allows(2 * first.worst_s):
                runner.leave_out(first, budget)
                continue
            doing = "compiling" if record.is_compiled else "warming up"
            yield Progress(0.0, f"{doing} {record.name} ({number} of {len(variants)})")
            begun_s, excluded_s = clock.now(), budget.excluded_s
            try:
                with runner.applied():
                    heap.occupy_free_addresses()
                    if record.is_compiled:  # the first compiled variant loads Inductor
                        budget.exclude(clock.now() - begun_s)
                    runner.warm_up(budget, interruptions, most_s, first.worst_s)
            except Exception as error:
                runner.fail(error)
                if record.is_compiled:  # usually because compiling failed
                    budget.exclude(clock.now() - begun_s - budget.excluded_s + excluded_s)
            is_slow = runner.times_slower(first) > policy.most_times_slower
            if is_slow and runner.fastest_s > first.worst_s and not runner.was_disturbed:
                record.notes["dropped"] = runner.far_slower(first)
                runner.warm = None
            self.guard.state.restore()
        self.runners |= {runner.record.name: runner for runner in runners}
        return runners

    def runner(self, variant: Variant, first: Runner | None = None) -> Runner:
        """Return a variant's runner: a new, cold one, or the known one with a new record.

        `first` knows the optimizers that the step creates, which the plan covers, too. A plan that
        changes nothing has failed if optimizations were declined; else it equals the baseline.
        """
        if (known := self.runners.get(variant.name)) is not None:
            return replace(known, record=known.record.anew())
        step, facts = self.step, StepFacts() if first is None else first.facts
        configs = [config_of(variant, model) for model in step.models]
        contexts = [
            applying.prepare(model, config, step.holders(model), facts.made)
            for model, config in zip(step.models, configs, strict=True)
        ]
        plan = together([context.plan for context in contexts])
        applied = {d.name: d.value for d in plan if d.active}
        declines = {d.name: d.reason for d in plan if d.declined}
        is_planned = first is not None and any(config is not None for config in configs)
        is_empty = is_planned and not applied
        reasons = (f"{name} declined: {reason}" for name, reason in declines.items() if is_empty)
        record = Record(
            variant.name,
            plan=plan.active_values(),
            applied=applied,
            changes_model={k: v for one in contexts for k, v in one.plan.changes_model().items()},
            declines=declines,
            declined=is_empty and bool(declines),
            same_as_baseline=is_empty and not declines,
            failure="; ".join(reasons) or None,
        )
        around = variant.around or nullcontext
        return Runner(step, contexts, record, facts, around=around, proof=variant.proof)

    def retain(self, names: Collection[str], at_work: Collection[str]) -> None:
        """Release runners not in `names`, and state copies of runners not in `at_work`."""
        self.runners = {name: one for name, one in self.runners.items() if name in names}
        for name in self.runners.keys() - at_work:
            self.runners[name].warm = None


def working(runners: Sequence[Runner]) -> list[Runner]:
    """Return the runners that have not failed, except duplicates of the baseline."""
    return [one for one in runners if not (one.record.failure or one.record.same_as_baseline)]


def warm(runners: Sequence[Runner]) -> list[Runner]:
    """Return the working runners that are warm and can be timed."""
    return [runner for runner in working(runners) if runner.warm is not None]


def _time_ahead(runners: Sequence[Runner], budget: Budget, grows: bool) -> str:
    """If `grows`, extend a short budget; return a text about the expected duration."""
    rounds = 14 * len(runners)  # about 14 steps per runner, two of them in warm-up
    needed_s = runners[0].worst_s * (costs.CHECK_STEPS + rounds)
    if grows:
        budget.grow(min(needed_s, 600.0))  # the longest default budget
    about_s = max(budget.seconds, costs.OVERHEAD_S)
    text = f"one step takes {runners[0].step_s:.2g} s: about {about_s:.0f} s"
    compiled = sum(runner.record.is_compiled for runner in runners)
    text += f" and the compiling of {compiled}" if compiled else ""
    is_short = needed_s > budget.seconds and budget.within is None
    return f"{text}, short for a clear answer; {costs.LONGER_BUDGET}" if is_short else text
