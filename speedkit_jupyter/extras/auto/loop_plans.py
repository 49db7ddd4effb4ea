"""Hold the plans of one loop, put a plan into force, and apply and store the winner."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch

from speedkit_jupyter.catalog import CATALOG, channels_last
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.applying import applied_to, apply_speedups, prepare
from speedkit_jupyter.plans.context import MeasuredContext, SpeedContext, hidden
from speedkit_jupyter.plans.planning import precision_of
from speedkit_jupyter.right.reference import lowest
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.search import learning
from speedkit_jupyter.search.candidates import Candidate, candidates, first_plans
from speedkit_jupyter.step.reachable import holding
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue import interrupts

# These optimizations never race: they move or distribute the model, record CUDA graphs, change the
# process, only save memory, or forbid training. A compiled plan races after a background compile.
LEFT = ("device", "cuda_graphs", "distributed", "threads", "activation_checkpointing", "inference")
COMPILE = "compile"
# Optimizations outside of a model's calls, and optimizations that change the calls' rounding.
OUTSIDE = {"fused_optimizer", "malloc"}
ROUNDS = {one.name for one in CATALOG if one.effect is not Effect.EXACT} - OUTSIDE
# Largest number of plans that race in one run, in addition to learned and compiled plans.
MOST_PLANS = 8


class LoopPlans:
    """The plans for the models and optimizers of one loop, and the plan in force.

    `candidates` holds the plans by name, and `facts` describes the models without a plan.
    `learned` has the proof of an earlier run's winner, by name. `trains` is false for prediction.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        keep: Sequence[str],
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        self.optimizers = weakref.WeakSet(optimizers)
        self.device = next(iter(models[0].parameters())).device
        self.in_force = BASELINE
        self.learned: dict[str, Ratio] = {}
        self.trains = bool(optimizers)
        self._contexts: dict[str, list[MeasuredContext]] = {}
        self._stack = ExitStack()
        self._applied: list[SpeedContext] = []
        self._task: learning.Task | None = None
        with hidden(*models):
            self.facts = [Facts.read(model, holding(optimizers, model)) for model in models]
            self._setting = learning.setting(models, Hardware.current())
        self._left = {*LEFT, *keep}
        singles = candidates(Hardware.current(), self.facts, self._left)
        self.can_compile = any(COMPILE in one.values for one in singles)
        singles = [one for one in singles if COMPILE not in one.values]
        plans = [plan for plan in first_plans(singles, steps_are_long=True) if plan.values]
        self.candidates = dict([*{plan.name: plan for plan in plans}.items()][:MOST_PLANS])

    @property
    def live_models(self) -> list[torch.nn.Module]:
        return [one for reference in self._models if (one := reference()) is not None]

    def compiled(self, name: str, draws: bool) -> str:
        """Add the plan `name` with torch.compile to `candidates`; return the new plan's name.

        If the model `draws` random numbers, compiled code draws the same numbers as eager code.
        """
        plan = self.candidates.get(name, Candidate({}))
        same = {"enabled": True, "draws": "same_random"}
        plan = plan.joined(Candidate({COMPILE: same if draws else plan.values.get(COMPILE, True)}))
        self.candidates[plan.name] = plan
        return plan.name

    def is_compiled(self, name: str) -> bool:
        return name in self.candidates and COMPILE in self.candidates[name].values

    def compile_failure(self, name: str) -> str:
        """Return why a model of a compiled plan runs uncompiled; empty if no model does."""
        for context in self.contexts_of(name):
            code, note = context.target.memo.compiled_call, context.notes.get(COMPILE, "")
            if code is not None and (code.failed or not code.forwards or "nothing" in note):
                return note or "no compiled call was made"
        return ""

    @interrupts.uninterrupted()
    def contexts_of(self, name: str) -> list[MeasuredContext]:
        """Return the contexts of a plan, one for each model; the first call creates them."""
        if name not in self._contexts:
            models, own = self.live_models, list(self.optimizers)
            config = self.candidates[name].config
            with hidden(*models):
                self._contexts[name] = [prepare(m, config, holding(own, m)) for m in models]
            for context in self._contexts[name]:  # else channels_last would break the user's views
                channels_last.note_views(context.target)
        return self._contexts[name]

    def rounding(self, name: str) -> frozenset[Any]:
        """Return names and values of a plan's optimizations that change how model calls round."""
        values = self.candidates[name].values
        return frozenset((one, str(values[one])) for one in values.keys() & ROUNDS)

    def precision(self, name: str) -> str:
        """Return the lowest precision of a plan on any of the models, such as `bf16`."""
        return lowest(*(precision_of(context.plan) for context in self.contexts_of(name)))

    def lowers(self, name: str) -> bool:
        """Return whether a plan runs the models' calls under autocast."""
        return name != BASELINE and "precision" in self.candidates[name].values

    # The plan in force.

    @contextmanager
    def acting(self, name: str) -> Iterator[None]:
        """Put a plan into force for the block, in place of any applied plan."""
        contexts = self.contexts_of(name)
        with hidden(*self.live_models), ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context.in_force())
            yield

    @interrupts.uninterrupted()
    def force(self, name: str, proof: Ratio | None = None) -> str:
        """Replace the plan in force with the plan `name`; return "", or why that failed.

        With a proof, `apply_speedups` applies the plan, unless the user has applied a plan.
        No plan is in force after a failure, or if a model was deleted.
        """
        models = self.live_models
        is_forced = proof is None or any(applied_to(model) is not None for model in models)
        if name == self.in_force and is_forced:
            return ""
        self.in_force = BASELINE
        self._stack.close()
        if name == BASELINE or len(models) < len(self._models):
            return ""
        try:
            if is_forced:
                self._stack.enter_context(self.acting(name))
            else:
                self._apply(name, f"measured: {name} {proof} by auto")
        except Exception as error:
            self.unapply()
            return f"it failed: {in_a_line(error)}"
        self.in_force = name
        return ""

    def _apply(self, name: str, reason: str) -> None:
        optimizers = list(self.optimizers)
        config = self.candidates[name].config.with_source("measured", reason)
        for model, known in zip(self.live_models, self.contexts_of(name), strict=True):
            _, context = apply_speedups(model, config, optimizer=holding(optimizers, model))
            self._applied.append(context)
            if self.is_compiled(name):
                with hidden(model):  # takes some 60 ms, to search for optimizers
                    context.adopt_compiled(known)

    @property
    def leaves_calls(self) -> bool:
        """Return whether the plan in force, if any, leaves the models' calls unchanged."""
        return self.in_force == BASELINE or self.candidates[self.in_force].values.keys() <= OUTSIDE

    @property
    def is_applied(self) -> bool:
        """Return whether `apply_speedups` applied the winner; True until `unapply`."""
        return bool(self._applied)

    @property
    def scales_gradients(self) -> bool:
        """Return whether gradients are scaled, so that the plan can't change within a step."""
        plan = self.candidates.get(self.in_force)
        return plan is not None and plan.values.get("precision") == "fp16"

    @property
    def was_restored(self) -> bool:
        """Return whether the user has undone the applied winner, or applied another plan."""
        return any(not one.active for one in self._applied)

    @interrupts.uninterrupted()
    def unapply(self) -> None:
        """Undo the applied winner, if there is one."""
        contexts, self._applied = self._applied, []
        for context in contexts:
            context.restore()
        if contexts:
            self.in_force = BASELINE

    def known_shapes_only(self) -> AbstractContextManager[Any]:
        """Return a context manager in which new shapes run eagerly instead of being compiled."""
        is_compiled = self.is_compiled(self.in_force)
        return torch.compiler.set_stance("eager_on_recompile") if is_compiled else nullcontext()

    # --- learned plans ---

    def look_up(self, args: Any, kwargs: Any) -> str:
        """On the first call, add a stored winner; return its plan's name without compile, or ""."""
        if self._task is not None:
            return ""
        optimizers = tuple(str(one) for facts in self.facts for one in facts.optimizers)
        name = type(unwrapped(self.live_models[0])).__name__
        self._task = learning.Task(name, learning.inputs(args, kwargs), optimizers, self.trains)
        learned = None
        with suppress(SpeedKitError):
            learned = learning.find(self._setting, self._task)
        if learned is None or not learned.value["values"] or not learned.value["low"]:
            return ""
        plan = Candidate(learned.value["values"])
        if plan.values.keys() & self._left:
            return ""
        speedup, low, high = (learned.value[key] for key in ("speedup", "low", "high"))
        if COMPILE not in plan.values or self.can_compile:
            self.candidates[plan.name] = plan
            self.learned[plan.name] = Ratio(speedup, low, high, 0)
        plan = plan.without(COMPILE)  # races until the compiled code is loaded
        if not plan.values:
            return ""
        self.candidates = {plan.name: plan, **self.candidates}
        return plan.name

    def store(self, name: str, proof: Ratio | None) -> None:
        """Store a winner proven in this run; without a proof, store that no plan is faster."""
        is_stored = proof is not None and not proof.pairs  # an earlier run's proof
        if self._task is None or is_stored:
            return
        values, stored = (self.candidates[name].values, name) if proof else ({}, BASELINE)
        plan = self.contexts_of(name)[0].plan
        with suppress(SpeedKitError):
            learning.store(self._setting, self._task, plan, values, stored, proof)
