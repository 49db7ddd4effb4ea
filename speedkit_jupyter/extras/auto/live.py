"""Carry out the decisions of a race on models and optimizers, between two steps of a loop."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.extras.auto.examination import CallExamination
from speedkit_jupyter.extras.auto.race import BASELINE, Race
from speedkit_jupyter.extras.auto.steps import Kinds, beats
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.applying import applied_to, apply_speedups, hidden, prepare
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.candidates import Candidate, candidates, first_plans
from speedkit_jupyter.step.discovery import holding
from speedkit_jupyter.support.database import Kept
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue import interrupts

# Optimizations that never race: they move the model, need seconds before they pay off, record the
# tensors of one call, or change the whole process.
LEFT = ("device", "compile", "cuda_graphs", "distributed", "threads", "activation_checkpointing")
# Optimizations that leave the numbers of a model's call unchanged.
OUTSIDE = ("fused_optimizer", "malloc")
# Largest number of plans that race in one run.
MOST_PLANS = 8
# Expected time of an examination: a share of a step, plus seconds to plan.
EXAMINATION, PLANNING_S = 0.8, 0.005
# A plan is out if its repeated call takes longer than TOO_SLOW steps plus TOO_SLOW_S seconds. The
# seconds allow for the kernels that a first call builds.
TOO_SLOW, TOO_SLOW_S = 10.0, 0.5
# A plan is not at fault if a batch's call can't be repeated. This many batches are tried.
MOST_EXAMINATIONS = 3
# A plan's losses are compared with the last PLAIN_LOSSES losses of plain steps. The plan is dropped
# if IN_A_ROW losses exceed their maximum by ABOVE times their range plus a RELATIVE share of it.
PLAIN_LOSSES, ABOVE, RELATIVE, IN_A_ROW = 20, 3.0, 0.1, 3
# Devices whose events time the steps, so that the loop never waits for the device.
WITH_EVENTS = ("cuda", "xpu")
# The winner races again, once, if RECENT_STEPS steps have a median SLOWER times as long as before.
SLOWER, RECENT_STEPS = 1.25, 50


@dataclass
class Totals:
    """The steps of one cell, and their seconds, by plan."""

    steps: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    begun_s: float = field(default_factory=clock.now)
    predictions: int = 0  # evaluation calls under a plan

    def add(self, name: str, seconds: float) -> None:
        """Count a step of the plan `name`."""
        self.steps[name] = self.steps.get(name, 0) + 1
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class Work:
    """One loop: its models and optimizers, the plans that race on it, and the plan in force.

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
        keep: Sequence[str] = (),
    ) -> None:
        self._kept = keep
        self.models = weakref.WeakSet(models)
        self._models = [weakref.ref(model) for model in models]
        self.optimizers, self._period, self._say = weakref.WeakSet(optimizers), period, say
        self.device = next(models[0].parameters()).device
        self._exact_evaluation = exact_evaluation
        self.kinds, self.totals = Kinds(), Totals()
        self.log: deque[tuple[float, str, float]] = deque(maxlen=5000)
        self.candidates: dict[str, Candidate] = {}
        self._contexts: dict[str, list[SpeedContext]] = {}
        self._stack = ExitStack()
        self.in_force = BASELINE
        self._applied: list[SpeedContext] = []
        self._stepped, self._begun_s, self._calls = 0, 0.0, 0
        self._kind: Hashable = None
        self._last_kind: Hashable = None
        self._task: learning.Task | None = None
        self.learned: tuple[str, Ratio] | None = None
        self._events: Any = None
        self._waiting: deque[tuple[Any, str, Hashable, Any]] = deque()
        self._examined: dict[frozenset[Any], str] = {}
        self._failures = 0
        self._is_examining = self.is_paused = False
        self._then: Callable[[], None] | None = None
        self._examination: CallExamination | None = None
        self._losses: dict[str, deque[float]] = {}
        self._loss: torch.Tensor | None = None
        self._layers = ExitStack()
        self._began_s = clock.now()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._warned = False
        self._plan()
        self.race = Race([*self.candidates][:MOST_PLANS], overhead, self._objection)
        for name in self.race.waiting:
            self.race.expect(name, 0.05)
        self._layers.enter_context(beats(models, self._call))

    @property
    def live_models(self) -> list[torch.nn.Module]:
        """Return the models that still exist."""
        return [one for reference in self._models if (one := reference()) is not None]

    @property
    def is_applied(self) -> bool:
        """Return whether the winner is applied, as by `apply_speedups`."""
        return bool(self._applied)

    @property
    def trains(self) -> bool:
        """Return whether the loop trains: an optimizer steps in it."""
        return bool(self._period)

    def _plan(self) -> None:
        """Find the plans to race, the strongest first."""
        models, optimizers = self.live_models, list(self.optimizers)
        with hidden(*models):
            facts = [Facts.read(model, holding(optimizers, model)) for model in models]
            self._setting = learning.setting(models, Hardware.current())
        self._facts = facts
        keep = [*LEFT, *self._kept, *([] if not self.trains else ["inference"])]
        singles = candidates(Hardware.current(), facts[0], keep, facts[1:])
        for plan in first_plans(singles, steps_are_long=True):
            if plan.values:
                self.candidates.setdefault(plan.name, plan)

    def begin_cell(self) -> None:
        """Reset the totals of steps and seconds."""
        self.totals = Totals()

    # The steps.

    def _call(
        self, module: torch.nn.Module, below: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a call of one of the models under the plan in force."""
        if self._is_examining or self.is_paused:
            return below(*args, **kwargs)
        if not self.trains:
            return self._predict(below, args, kwargs)
        if not torch.is_grad_enabled():
            return self._evaluate(module, below, args, kwargs)
        if not self._calls:
            self._turn()
            self._look(args, kwargs)
            self._begin()
        self._calls += 1
        if self._examination is not None:
            noted = self._examination.begin_call(module, args, kwargs)
            result = below(*args, **kwargs)
            if noted is not None:
                noted.ended(result)
            return result
        return self._guarded(module, below, args, kwargs)

    def _look(self, args: Any, kwargs: Any) -> None:
        """Note the kind of the step that begins; at the first step, look up a learned plan."""
        self._kind = self.kinds.of(args, kwargs)
        if self._task is not None:
            return
        optimizers = tuple(str(one) for facts in self._facts for one in facts.optimizers)
        name = type(unwrapped(self.live_models[0])).__name__
        self._task = learning.Task(name, learning.inputs(args, kwargs), optimizers, self.trains)
        with suppress(SpeedKitError):
            self._begin_with(learning.find(self._setting, self._task))

    def _begin_with(self, learned: Kept | None) -> None:
        """Put a learned plan first; after its examination it wins without a race."""
        if learned is None or not learned.value["values"] or not learned.value["low"]:
            return
        plan = Candidate(learned.value["values"])
        if plan.values.keys() & set(LEFT):
            return
        self.candidates = {plan.name: plan, **self.candidates}
        self.race.waiting = [plan.name, *(one for one in self.race.waiting if one != plan.name)]
        speedup, low, high = (learned.value[key] for key in ("speedup", "low", "high"))
        self.learned = plan.name, Ratio(speedup, low, high, 0)

    def _keep(self) -> None:
        """Store the winner for later runs."""
        leader, proof = self.race.leader, self.race.proof
        if proof is None or self._task is None or not proof.pairs:
            return
        plan = self._contexts_of(leader)[0].plan
        values = self.candidates[leader].values
        with suppress(SpeedKitError):
            learning.keep(self._setting, self._task, plan, values, leader, proof)

    def _begin(self) -> None:
        if self.device.type in WITH_EVENTS:
            module = torch.get_device_module(self.device)
            begin, end = (module.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._events = begin, end
        self._begun_s = clock.now()

    def _guarded(self, module: torch.nn.Module, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a call; if it fails under the plan and not without it, drop the plan."""
        if self.in_force == BASELINE or self._applied:
            return below(*args, **kwargs)
        try:
            return below(*args, **kwargs)
        except Exception as error:
            name, line = self.in_force, in_a_line(error)
            self.force(BASELINE)
            result = module(*args, **kwargs)  # an error of the user's own code is raised here
            self.race.drop(name, f"it failed: {line}")
            self._say(f"{name} failed and is not tried again: {line}")
            return result

    def _evaluate(self, module: Any, below: Any, args: Any, kwargs: Any) -> Any:
        """Run a call without gradients; between steps, only under the winner or no plan."""
        is_winner = self.race.is_settled and self.in_force == self.race.leader
        may_follow = self._calls or (is_winner and not self._exact_evaluation)
        if self.in_force == BASELINE or may_follow:  # a plan never changes within a step
            self.totals.predictions += not self._calls and self.in_force != BASELINE
            return below(*args, **kwargs)
        if self._applied:
            with hidden(*self.live_models):
                return below(*args, **kwargs)
        name = self.in_force
        self.force(BASELINE)
        try:
            return module(*args, **kwargs)
        finally:
            self.force(name)

    def _turn(self) -> None:
        """Change the plan as the race decided; not within hooks, which must not change then."""
        then, self._then = self._then, None
        if then is not None:
            then()

    def _predict(self, below: Any, args: Any, kwargs: Any) -> Any:
        self._turn()
        self._look(args, kwargs)
        if self._examination is not None:
            noted = self._examination.begin_call(self.live_models[0], args, kwargs)
            result = below(*args, **kwargs)
            if noted is not None:
                noted.ended(result)
            self._examine()
            return result
        self._begin()
        result = self._guarded(self.live_models[0], below, args, kwargs)
        self.ended()
        return result

    def differentiated(self, loss: Any) -> None:
        """Note the loss of a backward pass; compare gradients if the step is examined."""
        if not self._calls:
            return
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss = loss.detach().to("cpu", non_blocking=True)  # read once the step is done
        if self._examination is not None:
            self._examine()

    def stepped(self) -> None:
        """Note the end of an optimizer's step."""
        if self._examination is not None and self._calls:
            self._end_examination()
            self._not_examined("no backward pass was seen")
        self._stepped += 1
        if self._stepped >= self._period:
            self.ended()

    def ended(self) -> None:
        """Note the end of a loop step, and put the plan of the next step into force."""
        calls, self._calls, self._stepped = self._calls, 0, 0
        if self.trains and not calls:  # a step without the model
            return
        kind, loss, self._loss = (self._kind, calls), self._loss, None
        if self._events is not None:
            events, self._events = self._events, None
            events[1].record()
            self._waiting.append((events, self.in_force, kind, loss))
            self._read_events()
            return
        self._noted(clock.now() - self._begun_s, kind, loss)

    def _read_events(self) -> None:
        """Note the steps that the device has finished, without waiting for the others."""
        while self._waiting and self._waiting[0][0][1].query():
            (begin, end), name, kind, loss = self._waiting.popleft()
            if name == self.in_force:
                self._noted(begin.elapsed_time(end) / 1e3, kind, loss)

    def _noted(self, seconds: float, kind: Hashable, loss: torch.Tensor | None) -> None:
        if self._applied and not self._applied[0].active:  # the user restored it
            self._applied.clear()
            self.in_force = BASELINE
            self.race.drop(self.race.leader, "you restored it, or applied another plan")
            self.race.waiting.clear()
        self._last_kind = kind
        self.totals.add(self.in_force, seconds)
        self.log.append((clock.now() - self._began_s, self.in_force, seconds))
        if loss is not None and self._watch_loss(float(loss)):
            return
        if self._applied:
            self._watch_speed(seconds)
            return
        race = self.race
        name = race.step_ended(seconds, kind, clock.now() - self._began_s)
        if race.duel is None and race.waiting and self._affords_examination(race.waiting[0]):
            name = BASELINE
            self._end_examination()
            self._examination = CallExamination(self.live_models, self.trains)
        self._then = self.settle if race.is_settled else partial(self.force, name)

    # Is it right?

    def _objection(self, name: str) -> str | None:
        """Return why a plan may not race, empty if it may; None before its rounding is examined."""
        rounding = self._rounding(self.candidates[name])
        right = (known for known, why in self._examined.items() if not why)
        if self.learned is not None and self.learned[0] == name:
            return self._examined.get(rounding) or None
        if any(rounding <= known for known in right) or not rounding:
            return ""
        return self._examined.get(rounding)

    def _affords_examination(self, name: str) -> bool:
        """Return whether the overhead limit allows an examination of the plan `name`."""
        is_learned = self.learned is not None and self.learned[0] == name
        return is_learned or self.race.affords(PLANNING_S + EXAMINATION * self.race.step_s)

    def _rounding(self, plan: Candidate) -> frozenset[Any]:
        """Return the parts of a plan that change the rounding of a model's calls."""
        rounds = {one.name for one in CATALOG if one.effect is not Effect.EXACT}
        return frozenset(
            (name, str(value))
            for name, value in plan.values.items()
            if name in rounds and name not in OUTSIDE
        )

    def _examine(self) -> None:
        """Examine the plan that races next, on the recorded step."""
        race, examination, self._examination = self.race, self._examination, None
        assert examination is not None
        examination.end()
        if not race.waiting:
            return
        plan = self.candidates[race.waiting[0]]
        begun_s, rounding = clock.now(), self._rounding(plan)
        self._is_examining = True
        try:
            self._examined[rounding] = examination.compare(
                self._acting(plan.name), self._precision(plan.name)
            )
        except ValueError as error:
            self._not_examined(str(error))
        except Exception as error:
            self._examined[rounding] = f"it failed: {in_a_line(error)}"
        finally:
            self._is_examining = False
        race.charge(clock.now() - begun_s)
        limit_s = TOO_SLOW * race.step_s + TOO_SLOW_S
        if examination.repeated_s > limit_s:
            times = examination.repeated_s / race.step_s
            race.drop(plan.name, f"a call under it took as long as {times:.0f} steps")
        elif why := self._examined.get(rounding):
            race.drop(plan.name, why)
        elif self.learned is not None and self.learned[0] == plan.name and why == "":
            race.begin_with(*self.learned)

    def _end_examination(self) -> None:
        examination, self._examination = self._examination, None
        if examination is not None:
            examination.end()

    def _not_examined(self, why: str) -> None:
        """Note a step that can't be repeated; after MOST_EXAMINATIONS such steps drop the plan."""
        self._failures += 1
        if self._failures >= MOST_EXAMINATIONS and self.race.waiting:
            rounding = self._rounding(self.candidates[self.race.waiting[0]])
            self._examined[rounding] = f"not checked: {why}"

    def _precision(self, name: str) -> str:
        plans = [context.plan for context in self._contexts_of(name)]
        words = {str(plan["precision"].value) for plan in plans if plan["precision"].active}
        if any(plan["tf32"].active and plan["tf32"].value != "highest" for plan in plans):
            words.add("bf16" if self.device.type == "cpu" else "tf32")
        return min(
            words, default="fp32", key=lambda word: ("bf16", "fp16", "tf32", "fp32").index(word)
        )

    def _watch_loss(self, value: float) -> bool:
        """Drop the plan in force if its losses exceed plain losses; return whether they do."""
        plain = self._losses.setdefault(BASELINE, deque(maxlen=PLAIN_LOSSES))
        if self.in_force == BASELINE:
            plain.append(value)
            return False
        own = self._losses.setdefault(self.in_force, deque(maxlen=IN_A_ROW))
        own.append(value)
        if len(plain) < IN_A_ROW or not all(map(math.isfinite, plain)):
            return False
        most = max(plain)
        limit = most + ABOVE * (most - min(plain)) + RELATIVE * abs(most)
        is_above = len(own) == IN_A_ROW and all(not one <= limit for one in own)
        if is_above or not math.isfinite(value):
            self._leave(f"its loss was {value:.3g} where plain steps had at most {most:.3g}")
        return is_above or not math.isfinite(value)

    def _leave(self, why: str) -> None:
        name = self.in_force
        self._then = self._go_plain
        self.race.drop(name, why)
        self._say(f"{name} is off and is not tried again: {why}")

    def _go_plain(self) -> None:
        self.unsettle()
        self.force(BASELINE)

    def _watch_speed(self, seconds: float) -> None:
        """Race again, once, if steps became slower than in the race."""
        self._recent.append(seconds)
        usual = self.race.usual_s(self._last_kind, self.race.leader)
        if usual is None or self._warned or len(self._recent) < RECENT_STEPS:
            return
        middle = sorted(self._recent)[RECENT_STEPS // 2]
        if middle > SLOWER * usual:
            self._warned = True
            self._say(
                f"steps take {middle / usual:.2f} times as long as they did; plans race again"
            )
            self.race = Race([self.race.leader], self.race.overhead, self._objection)
            self._then = self._go_plain

    # What is in force.

    def _contexts_of(self, name: str) -> list[SpeedContext]:
        if name not in self._contexts:
            models, optimizers = self.live_models, list(self.optimizers)
            config = self.candidates[name].variant().config
            with hidden(*models):
                self._contexts[name] = [
                    prepare(model, config, holding(optimizers, model)) for model in models
                ]
        return self._contexts[name]

    @contextmanager
    def _acting(self, name: str) -> Iterator[None]:
        contexts = self._contexts_of(name)
        with hidden(*self.live_models), ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context.in_force())
            yield

    def force(self, name: str) -> None:
        """Put the plan `name` into force instead of the current plan, between two steps."""
        if name == self.in_force:
            return
        begun_s = clock.now()
        with interrupts.uninterrupted():
            self.in_force = BASELINE
            stack, self._stack = self._stack, ExitStack()
            stack.close()
            if name != BASELINE:
                try:
                    self._stack.enter_context(self._acting(name))
                    self.in_force = name
                except Exception as error:
                    self._stack.close()
                    self.race.drop(name, f"it failed: {in_a_line(error)}")
        if not self._applied:
            self.race.switched(clock.now() - begun_s)

    def settle(self) -> None:
        """Apply the leader as `apply_speedups` does, so that reports and `code` show it.

        If the user already applied a plan, the leader stays in force only as in the race.
        """
        leader, models = self.race.leader, self.live_models
        if self._applied:
            return
        if leader == BASELINE or any(applied_to(model) is not None for model in models):
            self.force(leader)
            return
        self.force(BASELINE)
        optimizers = list(self.optimizers)
        config = self.candidates[leader].variant().config
        if config is not None and self.race.proof is not None:
            config = config.with_source("measured", f"measured: {leader} {self.race.proof} by auto")
        for model in models:
            _, context = apply_speedups(model, config, optimizer=holding(optimizers, model))
            self._applied.append(context)
        self.in_force = leader
        self._keep()

    def unsettle(self) -> None:
        """Restore the models from the applied winner."""
        contexts, self._applied = self._applied, []
        for context in contexts:
            context.restore()
        if contexts:
            self.in_force = BASELINE

    def pause(self) -> None:
        """Stop the race for now, as at the end of a cell; the winner stays in force, or no plan."""
        self._end_examination()
        self._then = None
        self._calls = self._stepped = 0
        self._events = self._loss = None
        self._waiting.clear()
        leader = self.race.pause()
        if leader == BASELINE:
            self.force(BASELINE)
        else:
            self.settle()

    def end(self) -> None:
        """Restore everything except the trained parameters."""
        self.pause()
        self.unsettle()
        self.force(BASELINE)
        self._layers.close()
