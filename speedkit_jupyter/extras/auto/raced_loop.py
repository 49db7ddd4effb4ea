"""Follow one loop: put a plan into force for each step, and note the step's time and loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from speedkit_jupyter.catalog.model_changes.calls import CALLS, HOOKS
from speedkit_jupyter.extras.auto import call_examination
from speedkit_jupyter.extras.auto.compiling import BackgroundCompile
from speedkit_jupyter.extras.auto.discovery import needs_gradients
from speedkit_jupyter.extras.auto.loop_plans import LoopPlans
from speedkit_jupyter.extras.auto.race import BASELINE, Race
from speedkit_jupyter.extras.auto.run_watch import RECENT_STEPS, RunWatch
from speedkit_jupyter.extras.auto.steps import Beat, Kinds, Remaining, TimedStep, Totals
from speedkit_jupyter.extras.auto.tracebacks import hide_when_interrupted
from speedkit_jupyter.rounds import busy_machine, clock
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.private import current_node

# Between rounds of a duel a step is watched every WATCH_S seconds, otherwise every IDLE_WATCH_S: it
# takes 0.2 ms. Steps below WATCH_S / 4 are counted together, which saves 7 of 27 microseconds.
WATCH_S, IDLE_WATCH_S = 0.02, 0.1


class RacedLoop:
    """One loop: its models and optimizers, its race, and the plan in force, until `end`.

    `log` has the last 5,000 steps: seconds since the loop began, the plan, the step's seconds.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        period: int,
        overhead: float,
        exact_evaluation: bool,
        say: Callable[[str], None],
        remaining: Remaining,
        keep: Sequence[str] = (),
    ) -> None:
        self.trains = bool(period)
        self._period, self._say, self._remaining = period, say, remaining
        self._exact_evaluation = exact_evaluation
        self.plans = LoopPlans(models, optimizers, keep)
        self._examiner = call_examination.Examiner(self.plans)
        self._watch, self._kinds, self.totals = RunWatch(), Kinds(), Totals()
        self.log: deque[tuple[float, str, float]] = deque(maxlen=5000)
        self._stepped, self._calls, self._hooks = 0, 0, -1
        self._begun_s = self._count_at_s = self._short_s = 0.0
        self._is_only_counted, self._watched_s = False, -math.inf
        self._short = 0  # short steps that are not counted yet; `_short_s` are their seconds
        self._step: TimedStep  # the latest watched step
        self._waiting: deque[TimedStep] = deque()
        self._evaluates = 0  # watched steps until the winner is applied again
        self.is_paused, self._began_s = False, clock.now()
        self._users_errors: set[type[Exception]] = set()
        # The plan to examine in the next step; "" to trace the step instead; None for neither.
        self._to_record: str | None = None
        self._compile = BackgroundCompile(self.plans, remaining)
        self.race = self._race_of([*self.plans.candidates], overhead)
        parts = [part for model in models for part in model.modules()]
        self._hooked = [getattr(part, kind) for part in parts for kind in HOOKS]
        self._layers = ExitStack()
        is_plain = lambda: self.trains and self.plans.leaves_calls  # noqa: E731
        self._beats = [Beat(model, self._call, is_plain) for model in models]
        self._layers.enter_context(CALLS.overriding(zip(models, self._beats, strict=True)))

    def _race_of(self, names: Sequence[str], overhead: float) -> Race:
        told = self._examiner.objection, self._remaining.seconds, self._examination_s
        return Race(names, overhead, *told, busy_machine.Interruptions())

    def begin_cell(self) -> None:
        """Reset the totals, and exclude the time between two cells from the run."""
        self.totals, self.race.load = Totals(), busy_machine.Interruptions()
        self.is_paused, self._began_s = False, clock.now() - self.race.elapsed_s

    # A step's beginning.

    def _call(self, module: torch.nn.Module, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a model's call under the plan in force; the first call of a step begins the step."""
        __tracebackhide__ = True  # hides this frame in errors of the user's model
        if self._examiner.is_repeating or current_node() is not None:  # a checkpoint recomputes
            return below(*args, **kwargs)
        if not self.trains and needs_gradients(module, args, kwargs):  # gradients aren't examined
            return self._plainly(module, below, args, kwargs)
        if self.is_paused:
            return self._guarded(module, below, args, kwargs)
        if self.trains and not torch.is_grad_enabled():
            return self._evaluate(module, below, args, kwargs)
        if not self._calls:
            if self._short:
                self._begun_s = clock.now()
            else:
                self._begin(args, kwargs)
        self._calls += 1
        if self.trains and self.plans.leaves_calls and not self._examiner.is_recording:
            for beat in self._beats:  # a rollout calls a small model many times
                beat.pass_calls(counted=not self._is_only_counted)
            return below(*args, **kwargs)
        run = self._examiner.recorded if self._examiner.is_recording else self._guarded
        result = run(module, below, args, kwargs)
        if not self.trains:
            self._examine()
            self.ended()
        return result

    @hide_when_interrupted
    def _begin(self, args: Any, kwargs: Any) -> None:
        """Put the step's plan into force and begin to time the step, or only count the step."""
        self._begun_s = clock.now()
        is_between = not self.race.in_round and self.plans.in_force == self.race.active
        is_busy = self._to_record is not None or self._compile.is_running
        every_s = IDLE_WATCH_S if self.race.duel is None else WATCH_S
        is_recent = self._begun_s - self._watched_s < every_s
        self._is_only_counted = is_between and is_recent and not is_busy
        if self._is_only_counted:
            self._count_at_s = self._watched_s + every_s
            return
        if self._to_record is None:
            self._go_on()
        else:  # this step runs without a plan, and is then repeated under a plan
            self._force(BASELINE)
            self._examiner.begin(self._to_record)
            self._to_record = None
        if learned := self.plans.look_up(args, kwargs):
            self.race.waiting = [*dict.fromkeys([learned, *self.race.waiting])]
        self._step = TimedStep(self._kinds.of(args, kwargs), self.plans.device)
        self._watched_s = self._begun_s

    def _guarded(self, module: torch.nn.Module, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a call; if the plan fails or leaves bf16 or fp16 values, drop it and call again."""
        __tracebackhide__ = True
        name = self.plans.in_force
        if self.plans.lowers(name) and self._hooks != (now := sum(map(len, self._hooked))):
            self._hooks = now
            if why := call_examination.keeps_lowered(self.plans.live_models):
                self._force(BASELINE)
                self._drop(name, why)
                return module(*args, **kwargs)
        if name == BASELINE:
            return below(*args, **kwargs)
        try:
            with self.plans.known_shapes_only():
                return below(*args, **kwargs)
        except Exception as error:
            if type(error) in self._users_errors:
                raise
            line, kind = in_a_line(error), type(error)
        self._force(BASELINE)
        self._users_errors.add(kind)  # unless the call works without the plan
        result = module(*args, **kwargs)
        self._users_errors.discard(kind)
        self._drop(name, f"it failed: {line}")
        return result

    def _evaluate(self, module: Any, below: Any, args: Any, kwargs: Any) -> Any:
        """Run an evaluation call under the plan of the current step, the winner, or no plan."""
        __tracebackhide__ = True
        is_winner = self.plans.in_force == self.race.leader and not self.race.in_round
        is_within = self._calls and (module.training or self.plans.scales_gradients)
        if is_within or (is_winner and not self._exact_evaluation):  # no change of the plan
            self.totals.predictions += not self._calls
            return self._guarded(module, below, args, kwargs)
        return self._plainly(module, below, args, kwargs)

    def _plainly(self, module: Any, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a call without a plan; no plan is in force until the next step begins."""
        __tracebackhide__ = True
        if self.plans.in_force == BASELINE:
            return below(*args, **kwargs)
        if self.plans.is_applied:
            self._evaluates = RECENT_STEPS  # applying a plan takes some 60 ms
        self._force(BASELINE)
        return module(*args, **kwargs)

    # A step's end.

    def differentiated(self, loss: Any) -> None:
        """Note the loss of a backward pass; if the step is recorded, repeat its calls."""
        if not self._calls or self._is_only_counted:
            return
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._step.loss = loss.detach().to("cpu", non_blocking=True)
        self._examine()

    def stepped(self) -> None:
        examiner, unseen = self._examiner, "no backward pass was seen"
        if examiner.is_recording and self._calls and (why := examiner.not_examined(unseen)):
            self.race.drop(examiner.name, why)
        self._stepped += 1
        if self._stepped >= self._period:
            self.ended()

    @hide_when_interrupted
    def ended(self) -> None:
        """Note the end of a loop step, and decide on the plan of the next step."""
        calls = self._calls + sum(beat.take() for beat in self._beats)
        self._calls = self._stepped = 0
        if self.trains and not calls:  # a step without the model
            return
        step, plans = self._step, self.plans
        if self._is_only_counted:
            now_s = clock.now()
            self._short, self._short_s = self._short + 1, self._short_s + now_s - self._begun_s
            is_short = now_s - self._begun_s < WATCH_S / 4
            if not is_short or now_s >= self._count_at_s:
                self._count()
            return
        step.plan, step.kind = plans.in_force, (step.kind, calls)
        step.end.record()
        given = clock.now(), plans.optimizers if self.trains else (), plans.device
        step.norm, step.why = self._watch.signals(step.plan, *given)
        step.ready.record()
        self._waiting.append(step)
        while self._waiting and self._waiting[0].ready.query():
            step = self._waiting.popleft()
            if step.plan == plans.in_force:
                self._noted(step)

    def _noted(self, step: TimedStep) -> None:
        race, seconds = self.race, step.seconds
        race.elapsed_s = clock.now() - self._began_s
        if self.plans.was_restored:
            self.plans.unapply()
            race.drop(race.leader, "you restored it, or applied another plan")
            race.waiting.clear()
        self._counted(self.plans.in_force, seconds)
        self._to_record = None
        if wrong := self._watch.values(step.plan, step.loss, step.norm):
            self._examiner.reject(step.plan, wrong)
        if why := wrong or step.why:
            if step.plan not in race.reasons:
                self._drop(step.plan, why)
            return
        usual_s = race.usual_s(step.kind, step.plan) if step.is_usual else None
        has_usual = self._kinds.usual is not None
        if has_usual and self._compile.is_due(race, self.totals.steps.total()):
            self._to_record = ""
            return
        race.charge(self._compile.slowed_by(seconds, usual_s))
        if failure := self._compile.outcome(may_go_on=race.affords(0.0)):
            self._decline(failure)
        elif failure == "":
            race.waiting.insert(0, self._compile.name)
        if race.is_settled and step.plan == race.leader != BASELINE:
            if line := self._watch.speed(seconds, usual_s):
                self._say(line)
                self.plans.learned.clear()  # the leader's proof is outdated
                self.plans.store(race.leader, None)
                self.race = self._race_of([race.leader], race.overhead)
            return
        is_timed = step.is_usual and step.plan == race.active  # events may complete after a switch
        race.step_ended(seconds if is_timed else None, step.kind, race.elapsed_s)
        self._to_record = race.to_examine() or None

    def _count(self) -> None:
        """Count the steps since the latest watched step, or since the latest count."""
        if self._short:
            seconds = self._short_s / self._short
            if self.plans.device.type != "cpu":  # the device runs asynchronously
                seconds = self.race.usual_s(self._step.kind, self.plans.in_force) or seconds
            self._counted(self.plans.in_force, seconds, self._short)
        self._is_only_counted, self._short, self._short_s = False, 0, 0.0

    def _counted(self, name: str, seconds: float, steps: int = 1) -> None:
        self.totals.steps[name] += steps
        self.totals.seconds[name] += steps * seconds
        self.log.extend([(clock.now() - self._began_s, name, seconds)] * steps)

    def _drop(self, name: str, why: str) -> None:
        """Drop a plan for good, and tell the user; for a leader, store that no plan is faster."""
        if name == self.race.leader:
            self.plans.store(name, None)
        self.race.drop(name, why)
        self._say(f"{name} is off and is not tried again: {why}")

    # Examination of a plan's results.

    def _examination_s(self, name: str) -> float:
        """Return the expected seconds of an examination; 0 for an earlier run's winner."""
        if name in self.plans.learned:
            return 0.0
        loading_s = self._compile.loading_s if self.plans.is_compiled(name) else 0.0
        return loading_s + call_examination.expected_s(self.race.step_s)

    @hide_when_interrupted
    def _examine(self) -> None:
        """If a step is recorded, repeat it under the next plan, or trace it for the compiler."""
        examiner, name = self._examiner, self._examiner.name
        if not examiner.is_recording:
            return
        self._step.is_usual = False
        is_compiled = not name or self.plans.is_compiled(name)  # compiled code is for one shape
        if is_compiled and self._step.kind != self._kinds.usual:
            examiner.end()
        elif not name:  # trace the step; then the loop goes on, while another process compiles
            self._compile.choose(self.race.leader, examiner.draws)
            try:
                with examiner.repeating(), self._compile.tracing():
                    examiner.repeat(compiles=True)
            except Exception as error:
                self._decline(in_a_line(error))
            self.race.charge(examiner.seconds)
        else:
            why = examiner.examine(self.race.step_s)
            self.race.charge(examiner.seconds, self._examination_s(name))
            if why:
                self.race.drop(name, why)
            elif why == "" and name in self.plans.learned:
                self.race.begin_with(name, self.plans.learned[name])

    def _decline(self, why: str) -> None:
        self.race.reasons[self._compile.name] = f"not compiled: {why}"
        self._say(f"{self._compile.name} is not tried, since compiling ended early: {why}")

    # The plan in force.

    def _go_on(self) -> None:
        """Put this step's plan into force; if the race is settled, apply the winner."""
        if self.race.is_settled and not self._evaluates:
            self._force(self.race.leader, self.race.proof)
        else:
            self._evaluates = max(self._evaluates - 1, 0)
            self._force(self.race.active)

    def _force(self, name: str, proof: Ratio | None = None) -> None:
        """Put the plan `name` into force, count the time as a cost, and drop the plan if it fails.

        With a proof, also apply the plan, so that reports show it, and store the plan.
        """
        race, plans, begun_s = self.race, self.plans, clock.now()
        if name != plans.in_force:
            plans.unapply()
        if name == plans.in_force and (proof is None or plans.is_applied):
            return
        if name != BASELINE:
            with suppress(Exception):  # `plans.force` reports the error
                plans.contexts_of(name)  # planned once, so not counted as a switch
        prepared_s = clock.now()
        race.charge(prepared_s - begun_s, 0.0)
        if why := plans.force(name, proof):
            race.drop(name, why)
        if proof is None:
            race.switched(clock.now() - prepared_s)
        else:
            race.charge(clock.now() - prepared_s, 0.0)
        if plans.is_applied:
            plans.store(name, proof)

    def pause(self) -> None:
        """Stop the race, such as at the end of a cell; the winner, if any, stays in force."""
        self._examiner.end()
        self._count()
        self._calls = self._stepped = self._evaluates = 0
        self._is_only_counted, self._to_record = False, None
        for beat in self._beats:
            beat.take()
        self._waiting.clear()
        self.is_paused = True
        self._force(self.race.pause(), self.race.proof)

    def end(self) -> None:
        """End the race and the compiling; restore everything except the trained parameters."""
        self.pause()
        self._compile.end()
        self._force(BASELINE)
        self._layers.close()
