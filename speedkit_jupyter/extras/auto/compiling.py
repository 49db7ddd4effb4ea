"""Compile the best plan of a loop in another process, if the expected gain exceeds the cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from speedkit_jupyter import catalog
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.compile import Compile, expected_s
from speedkit_jupyter.catalog.model_changes.background_compile import SubprocessCompiler
from speedkit_jupyter.catalog.model_changes.calls import CALLS
from speedkit_jupyter.catalog.model_changes.compiled import CompiledCode
from speedkit_jupyter.extras.auto.loop_plans import COMPILE, LoopPlans
from speedkit_jupyter.extras.auto.race import Race
from speedkit_jupyter.extras.auto.steps import Remaining
from speedkit_jupyter.rounds import clock

# Tracing the model takes TRACING_S seconds. The compiling process slows the loop down by the share
# SLOWED of the compile time, and loading the code takes the share LOADING of it. COMPILING_S is the
# estimated compile time in seconds for a model that is not on a CPU.
TRACING_S, SLOWED, LOADING, COMPILING_S = 1.5, 0.1, 0.25, 20.0
# The share of time that compiling is expected to save, and the fewest steps before compiling.
GAIN, COMPILE_AFTER_STEPS = 0.1, 50


class BackgroundCompile:
    """The background compilation of a loop's best plan, which happens at most once.

    `name` is the compiled plan's name, empty until a step is traced. `loading_s` is the expected
    time to load the finished code.
    """

    def __init__(self, plans: LoopPlans, remaining: Remaining) -> None:
        self.name, self._plans, self._remaining = "", plans, remaining
        self._compilers: list[SubprocessCompiler] = []
        self._slowed_s = self._charged_s = self._begun_s = self.loading_s = 0.0
        self.is_running = False
        known = [expected_s(one, Compile.default) for one in plans.facts if plans.can_compile]
        compiling_s = sum(COMPILING_S if one is None else one for one in known)
        self._cost_s = TRACING_S + (SLOWED + LOADING) * compiling_s

    def is_due(self, race: Race, steps: int) -> bool:
        """Return whether to trace the next step for the compiler; if so, pause the race.

        An earlier run's compiled winner is due at once. The leader of a settled race is due after
        COMPILE_AFTER_STEPS, if the race can afford it. The expected gain must exceed the cost.
        """
        plans = self._plans
        if self.name or not plans.can_compile:
            return False
        known = plans.learned.get(self._learned)
        is_new = race.is_settled and not plans.is_compiled(race.leader)
        is_new = is_new and steps >= COMPILE_AFTER_STEPS
        if known is None and not (is_new and race.affords(self._cost_s)):
            return False
        gain = GAIN if known is None else 1 - 1 / known.low
        if self._cost_s > gain * self._remaining.seconds(race.elapsed_s):
            return False
        race.pause()
        race.allowed_s = self._cost_s if known else 0.0
        return True

    @property
    def _learned(self) -> str:
        """Return the name of an earlier run's winner if it is a compiled plan, else ""."""
        return next(filter(self._plans.is_compiled, self._plans.learned), "")

    def choose(self, leader: str, draws: bool) -> None:
        """Set `name` to the plan to compile; `draws` is true if the model draws random numbers."""
        self.name = self._plans.compiled(self._learned or leader, draws)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the calls in the block under the plan, then start the compiling processes."""
        codes: list[CompiledCode] = []
        with self._plans.acting(self.name), ExitStack() as stack:
            for context in self._plans.contexts_of(self.name):
                decision, target = context.own_plan[COMPILE], Target(context.target.model)
                decision = replace(decision, details={**decision.details, "background": True})
                layers = catalog.named(COMPILE).calls(decision, target)
                stack.enter_context(CALLS.overriding([(one.module, one) for one in layers]))
                codes.append(target.memo.compiled_call)
            yield
            self._compilers = [one for code in codes if (one := code.background) is not None]
            for one in self._compilers:
                one.begin()
        self._begun_s, self.is_running = clock.now(), True

    def outcome(self, may_go_on: bool) -> str | None:
        """Return "" if compiled, the reason if that failed, else None; stop unless `may_go_on`."""
        is_done = self.is_running and all(one.is_done() for one in self._compilers)
        if not self.is_running or (may_go_on and not is_done):
            return None
        if not is_done:
            self.end()
            return "it slowed the loop down"
        self.is_running = False
        self.loading_s = max(TRACING_S, LOADING * (clock.now() - self._begun_s))
        return next((one.why_not for one in self._compilers if one.why_not), "")

    def slowed_by(self, seconds: float, usual_s: float | None) -> float:
        """Return the cost in seconds of a step that the compiling process may have slowed down.

        Steps that are faster than usual by chance offset slower steps.
        """
        if not self.is_running or usual_s is None:
            return 0.0
        self._slowed_s += min(seconds - usual_s, usual_s)
        charged_s, self._charged_s = self._charged_s, max(self._charged_s, self._slowed_s)
        return self._charged_s - charged_s

    def end(self) -> None:
        self.is_running = False
        for one in self._compilers:
            one.end()
