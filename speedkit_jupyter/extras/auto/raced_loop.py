"""Follow one loop: put a plan into force for each step, and note what came of it."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog.properties.calls import CALLS
from speedkit_jupyter.extras.auto.call_examination import EXAMINATION, PLANNING_S, Examiner
from speedkit_jupyter.extras.auto.compiling import BackgroundCompile, Remaining
from speedkit_jupyter.extras.auto.loop_plans import LoopPlans
from speedkit_jupyter.extras.auto.loss_watch import RECENT_STEPS, Watch
from speedkit_jupyter.extras.auto.race import BASELINE, Race
from speedkit_jupyter.extras.auto.steps import Beat, Kinds, hide_when_interrupted
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.support.exceptions import in_a_line

# Between the rounds of a duel a step is watched every WATCH_S seconds, without a duel every
# IDLE_WATCH_S. Others are only counted: to watch a step takes 0.2 ms, a third of a tiny model's.
WATCH_S, IDLE_WATCH_S = 0.02, 0.1


@dataclass
class Totals:
    """The steps of one cell, and their seconds, by plan."""

    steps: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    predictions: int = 0  # evaluation calls under a plan


@dataclass
class EndedStep:
    """A step that has ended: its plan, and values that the device may still compute."""

    plan: str
    kind: Hashable
    is_usual: bool  # its time includes no examination
    loss: torch.Tensor | None
    norm: torch.Tensor | None


class RacedLoop:
    """One loop: its models and optimizers, its race, and the plan in force.

    `log` holds for each step its end (seconds since the loop began), its plan and its seconds.
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
        self.plans = LoopPlans(models, optimizers, self.trains, keep)
        self._examiner = Examiner(self.plans, self.trains)
        self._watch = Watch()
        self._kinds, self.totals = Kinds(), Totals()
        self.log: deque[tuple[float, str, float]] = deque(maxlen=5000)
        self._stepped, self._calls, self._begun_s = 0, 0, 0.0
        self._is_only_counted, self._watched_s = False, -WATCH_S
        self._kind: Hashable = None
        self._was_examined, self._examined, self._doubted = False, "", ""
        self._evaluates = 0  # watched steps until the winner is applied again
        self._events: Any = None
        self._waiting: deque[tuple[Any, EndedStep]] = deque()
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self.is_paused = False
        self._users_errors: set[type[Exception]] = set()
        self._then: Callable[[], None] | None = None
        self._compile = BackgroundCompile(self.plans, remaining)
        self._began_s = self._paused_s = clock.now()
        self.race = self._race_of([*self.plans.candidates], overhead)
        self._layers = ExitStack()
        self._beats = [Beat(model, self._call) for model in models]
        self._layers.enter_context(CALLS.overriding(zip(models, self._beats, strict=True)))

    def _race_of(self, names: Sequence[str], overhead: float) -> Race:
        told = self._examiner.objection, self._remaining.seconds, self._examination_s
        return Race(names, overhead, *told, clock.Interruptions())

    def begin_cell(self) -> None:
        """Reset the totals, and leave the time between two cells out of the run."""
        self.totals = Totals()
        if self.is_paused:
            self._began_s += clock.now() - self._paused_s
        self.is_paused, self.race.load = False, clock.Interruptions()

    # A step's beginning.

    def _call(self, module: torch.nn.Module, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a call of one of the models under the plan in force."""
        __tracebackhide__ = True  # in errors of the user's model
        if self._examiner.is_repeating or self.is_paused:
            return below(*args, **kwargs)
        if self.trains and not torch.is_grad_enabled():
            return self._evaluate(module, below, args, kwargs)
        if not self._calls:
            self._begin(args, kwargs)
        self._calls += 1
        if self.trains and self.plans.in_force == BASELINE and self._examiner.step is None:
            for beat in self._beats:  # a rollout calls a small model many times
                beat.pass_calls(counted=not self._is_only_counted)
            return below(*args, **kwargs)
        recorded = self._examiner.begin_call(module, args, kwargs)
        if recorded is not None:
            result = below(*args, **kwargs)
            recorded.ended(result)
        else:
            result = self._guarded(module, below, args, kwargs)
        if not self.trains:
            self._examine()
            self.ended()
        return result

    def _passed(self) -> int:
        """Return the number of calls that have passed, and watch calls again."""
        return sum(beat.take() for beat in self._beats)

    @hide_when_interrupted
    def _begin(self, args: Any, kwargs: Any) -> None:
        """Put the chosen plan into force, and start to time; torch's hooks can't change plans."""
        then, self._then = self._then, None
        if then is not None:
            then()
        self._begun_s = clock.now()
        is_between = not self.race.in_round and self.plans.in_force == self.race.active
        is_busy = self._examiner.step is not None or self._compile.is_running
        if is_between and not is_busy:
            every_s = IDLE_WATCH_S if self.race.duel is None else WATCH_S
            self._is_only_counted = self._begun_s - self._watched_s < every_s
            if self._is_only_counted:
                return
        self._watched_s = self._begun_s
        self._kind, self._was_examined = self._kinds.of(args, kwargs), False
        if learned := self.plans.look_up(args, kwargs):
            self.race.waiting = [*dict.fromkeys([learned, *self.race.waiting])]
        if self.plans.device.type != "cpu":  # events time the step, and the loop never waits
            module = torch.get_device_module(self.plans.device)
            self._events = [module.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._begun_s = clock.now()

    def _guarded(self, module: torch.nn.Module, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a call; if it fails under a plan and not without it, drop the plan."""
        __tracebackhide__ = True
        name = self.plans.in_force
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
        self._then = self._go_on
        self._users_errors.add(kind)  # unless the call works without the plan
        result = module(*args, **kwargs)
        self._users_errors.discard(kind)
        self._drop(name, f"it failed: {line}")
        return result

    def _evaluate(self, module: Any, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a call without gradients; between steps, only under the winner or no plan."""
        __tracebackhide__ = True
        name = self.plans.in_force
        is_winner = name == self.race.leader and not self.race.in_round
        may_follow = self._calls or (is_winner and not self._exact_evaluation)
        if name == BASELINE or may_follow:  # a plan never changes within a step
            self.totals.predictions += not self._calls and name != BASELINE
            with self.plans.known_shapes_only():
                return below(*args, **kwargs)
        if self.plans.is_applied:
            self._evaluates = RECENT_STEPS  # to apply it again takes some 60 ms
        self._force(BASELINE)  # until the next step begins
        self._then = self._then or self._go_on
        return module(*args, **kwargs)

    # A step's end.

    @property
    def is_watched(self) -> bool:
        """Return whether a step has begun that is not only counted."""
        return bool(self._calls) and not self._is_only_counted

    def differentiated(self, loss: Any) -> None:
        """Note the loss of a backward pass; compare gradients if the step is examined."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss = loss.detach().to("cpu", non_blocking=True)  # read once the step is done
        self._examine()

    def stepped(self) -> None:
        if self._examiner.step is not None and self._calls:
            self._examiner.end()
            name, why = self._examined, "no backward pass was seen"
            if name and (why_not := self._examiner.not_examined(name, why)):
                self.race.drop(name, why_not)
        self._stepped += 1
        if self._stepped >= self._period:
            self.ended()

    @hide_when_interrupted
    def ended(self) -> None:
        """Note the end of a loop step, and decide on the plan of the next step."""
        calls, self._calls, self._stepped = self._calls + self._passed(), 0, 0
        if self.trains and not calls:  # a step without the model
            return
        if self._is_only_counted:
            self._is_only_counted = False
            name, seconds = self.plans.in_force, clock.now() - self._begun_s
            if self.plans.device.type != "cpu":  # which computes later
                seconds = self.race.usual_s((self._kind, calls), name) or seconds
            self._counted(name, seconds)
            return
        kind, is_usual = (self._kind, calls), not self._was_examined
        step = EndedStep(self.plans.in_force, kind, is_usual, self._loss, self._norm)
        events, self._events, self._loss, self._norm = self._events, None, None, None
        ended_s = clock.now()
        if events is not None:
            events[1].record()
        norms = self.plans.optimizers if self.trains else ()
        norm, why = self._watch.signals(step.plan, ended_s, norms, self.plans.device)
        if events is None:
            step.norm = norm
            self._noted(ended_s - self._begun_s, step, why)
            return
        self._norm = norm  # ready when the next step's events are
        self._waiting.append((events, step))
        if why:
            self._leave(step.plan, why)
        while self._waiting and self._waiting[0][0][1].query():
            (begin, end), step = self._waiting.popleft()
            if step.plan == self.plans.in_force:
                self._noted(begin.elapsed_time(end) / 1e3, step, "")

    def _noted(self, seconds: float, step: EndedStep, why: str) -> None:
        race, elapsed_s = self.race, clock.now() - self._began_s
        race.elapsed_s = elapsed_s
        if self.plans.was_restored:
            self.plans.unapply()
            race.drop(race.leader, "you restored it, or applied another plan")
            race.waiting.clear()
        self._counted(self.plans.in_force, seconds)
        if wrong := self._watch.values(step.plan, step.loss, step.norm):
            self._examiner.reject(step.plan, wrong)
        if why := wrong or why:
            self._leave(step.plan, why)
            return
        usual_s = race.usual_s(step.kind, step.plan) if step.is_usual else None
        has_usual = self._kinds.usual is not None
        if has_usual and self._compile.is_due(race, sum(self.totals.steps.values())):
            self._then = self._record_plain_step
            return
        self._follow_compiler(seconds, usual_s)
        if race.is_settled and step.plan == race.leader != BASELINE:
            if line := self._watch.speed(seconds, usual_s):
                self._say(line)
                self.plans.learned.clear()  # its proof no longer holds
                self._doubted = race.leader
                self.race = self._race_of([race.leader], race.overhead)
                self._then = partial(self._force, BASELINE)
            elif not self.plans.is_applied:
                self._then = self._go_on
            return
        is_timed = step.is_usual and step.plan == race.active  # events arrive after a change, too
        race.step_ended(seconds if is_timed else None, step.kind, elapsed_s)
        self._then = self._go_on
        if name := race.to_examine():
            self._then = partial(self._record_plain_step, name)

    def _counted(self, name: str, seconds: float) -> None:
        self.totals.steps[name] += 1
        self.totals.seconds[name] += seconds
        self.log.append((clock.now() - self._began_s, name, seconds))

    def _leave(self, name: str, why: str) -> None:
        self._then = partial(self._force, BASELINE)
        if name != BASELINE and name not in self.race.reasons:
            self._drop(name, why)

    def _drop(self, name: str, why: str) -> None:
        """Drop a plan for good, also if an earlier run or this one stored it as the fastest."""
        if name == self.race.leader:
            self.plans.forget(name)
        self.race.drop(name, why)
        self._say(f"{name} is off and is not tried again: {why}")

    # Is it right?

    def _examination_s(self, name: str) -> float:
        """Return the expected seconds of an examination; an earlier run's winner is free."""
        if name in self.plans.learned:
            return 0.0
        loading_s = self._compile.loading_s if self.plans.is_compiled(name) else 0.0
        return loading_s + PLANNING_S + EXAMINATION * self.race.step_s

    @hide_when_interrupted
    def _examine(self) -> None:
        """Repeat the recorded step under the plan that races next, or trace it to compile it."""
        if self._examiner.step is None:
            return
        self._was_examined = True
        name = self._examined
        is_usual = self._kind == self._kinds.usual
        if self._compile.is_tracing and is_usual:
            self._trace()
            return
        if not name or (self.plans.is_compiled(name) and not is_usual):  # code is for one shape
            self._examiner.end()
            return
        why = self._examiner.examine(name, self.race.step_s)
        self.race.charge(self._examiner.seconds, self._examination_s(name))
        if why:
            self.race.drop(name, why)
        elif why == "" and name in self.plans.learned:
            self.race.begin_with(name, self.plans.learned[name])

    # --- compiling next to the loop ---

    def _follow_compiler(self, seconds: float, usual_s: float | None) -> None:
        """Charge the compiling process for a step, and have the plan race once it is compiled."""
        race, compiling = self.race, self._compile
        race.charge(compiling.slowed_by(seconds, usual_s))
        if why := compiling.outcome(may_go_on=race.affords(0.0)):
            self._decline(why)
        elif why == "":
            race.waiting.insert(0, compiling.name)

    def _record_plain_step(self, name: str = "") -> None:
        """Record the next step for the examination of a plan, or for the compiler."""
        self._examined = name
        self._force(BASELINE)
        self._examiner.begin()

    def _trace(self) -> None:
        """Trace the recorded step for the compiler, and continue under the winner."""
        step, self._then = self._examiner.step, self._go_on
        assert step is not None
        if why := self._examiner.repeat(self._compile.tracing(self.race.leader, step.draws)):
            self._decline(why)
        self.race.charge(self._examiner.seconds)

    def _decline(self, why: str) -> None:
        self.race.reasons[self._compile.name] = f"not compiled: {why}"
        self._say(f"{self._compile.name} is not tried, since compiling ended early: {why}")

    # The plan in force.

    def _go_on(self) -> None:
        """Put the race's choice for the next step into force."""
        if self.race.is_settled and not self._evaluates:
            self.settle()
        else:
            self._evaluates = max(self._evaluates - 1, 0)
            self._force(self.race.active)

    def _force(self, name: str) -> None:
        """Put a plan into force instead of the current one, between two steps."""
        is_applied = self.plans.is_applied
        if name == self.plans.in_force and (is_applied or name == BASELINE):
            return
        begun_s = clock.now()
        self.plans.unapply()
        if name == self.plans.in_force:
            return
        if name != BASELINE:
            with suppress(Exception):  # `force` tells the error
                self.plans.contexts_of(name)  # once, so this is not part of a change
        prepared_s = clock.now()
        self.race.charge(prepared_s - begun_s, 0.0)
        if why := self.plans.force(name):
            self.race.drop(name, why)
        self.race.switched(clock.now() - prepared_s)

    def settle(self) -> None:
        """Apply the leader as `apply_speedups` does, so that reports and `code` show it."""
        leader = self.race.leader
        if self.plans.is_applied and self.plans.in_force == leader:
            return
        begun_s = clock.now()
        self.plans.unapply()
        why = self.plans.apply(leader, self.race.proof)
        self.race.charge(clock.now() - begun_s, 0.0)
        if why:
            self.race.drop(leader, why)
            self._force(BASELINE)
        elif self.plans.is_applied:
            self.plans.remember(leader, self.race.proof)
        elif self.race.is_settled and (doubted := self._doubted):
            self.plans.forget(doubted)
            self._doubted = ""

    def pause(self) -> None:
        """Stop the race for now, as at the end of a cell; the winner stays in force, or no plan."""
        self._examiner.end()
        self._compile.is_tracing = False  # it begins anew in the next cell
        self._calls = self._stepped = 0
        self._evaluates, self._is_only_counted = 0, False
        self._passed()
        self._then = self._events = self._loss = self._norm = None
        self._waiting.clear()
        self.is_paused, self._paused_s = True, clock.now()
        self.race.pause()
        self.settle()

    def end(self) -> None:
        """Restore everything except the trained parameters."""
        self.pause()
        self._compile.end()
        self._force(BASELINE)
        self._layers.close()
