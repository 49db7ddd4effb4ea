"""Check the results of a plan: repeat the model calls of one of the user's steps under the plan.

The step itself runs without a plan, and so gives the right results and gradients. The check needs
no loss function: it repeats only the model calls and their backward passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.catalog.model_changes.calls import HOOKS, parts_of
from speedkit_jupyter.extras.auto.loop_plans import LoopPlans
from speedkit_jupyter.right.deviations import of_gradients, sums, total
from speedkit_jupyter.right.judge import beyond_limit
from speedkit_jupyter.right.reference import LOW, parameters_of, replayed
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.state import snapshot
from speedkit_jupyter.state.handlers.base import MOST_COPIED_BYTES
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.support.source_lines import is_users
from speedkit_jupyter.torchglue import interrupts
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map, version
from speedkit_jupyter.torchglue.storage import is_in_memory, tensors_in

# A step with this many calls or more is not examined: a loop over time steps may have thousands.
MOST_CALLS = 32
# The floating-point results of a step's calls, and the gradients by the id of the parameter.
Outcome = tuple[list[torch.Tensor], dict[int, torch.Tensor]]
# A plan is dropped if the repeated calls take longer than TOO_SLOW steps plus TOO_SLOW_S seconds: a
# first call may build kernels. A compiled plan has no limit.
TOO_SLOW, TOO_SLOW_S = 10.0, 0.5
# A plan is rejected after this many recorded steps that could not be repeated.
MOST_EXAMINATIONS = 3


@dataclass
class NotedCall:
    """A recorded model call: its arguments, floating-point results and the results' gradients.

    `random` has the states of the random generators before the call, and `drawn` the states after
    it. `drawn` is None if the call uses no random numbers.
    """

    module: torch.nn.Module
    arguments: tuple[Any, Any]
    versions: list[int]
    random: snapshot.ProcessSettings
    drawn: snapshot.ProcessSettings | None
    results: list[torch.Tensor]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


class Examiner:
    """Record a step that runs without a plan, and repeat its model calls under a plan.

    `name` is the plan to examine; it is empty if the calls are traced for the compiler instead.
    `seconds` is the duration of the last repetition and comparison.
    """

    def __init__(self, plans: LoopPlans) -> None:
        self._plans = plans
        self._outcomes: dict[frozenset[Any], str] = {}  # the objection, or "", by `rounding`
        self._failures = Counter[str]()  # failed examinations by plan
        self.name, self.is_recording, self.is_repeating, self.seconds = "", False, False, 0.0
        self._calls, self._gradients = list[NotedCall](), dict[int, torch.Tensor]()
        self._hooks: list[Any] = []
        self._obstacle = ""  # why a recorded call can't be repeated
        self._is_large = False  # True if a call's arguments hold too much to compare

    def begin(self, name: str) -> None:
        """Begin to record a step, which must run without a plan; register gradient hooks."""
        self.end()
        self.name, self.is_recording, self._obstacle = name, True, ""
        for one in parameters_of(self._plans.live_models):
            if self._plans.trains and one.requires_grad:
                self._hooks.append(one.register_hook(partial(self._note, self._gradients, id(one))))

    def recorded(self, module: torch.nn.Module, below: Any, args: Any, kwargs: Any) -> Any:
        """Run `below`, a module's call, and record it, up to MOST_CALLS calls.

        A call that raises an error, or that runs a backward pass itself, is not recorded.
        """
        __tracebackhide__ = True  # hides this frame in errors of the user's model
        if len(self._calls) == MOST_CALLS:
            return below(*args, **kwargs)
        if not self._calls:
            with suppress(ValueError):  # too much data: `repeating` raises it, too
                self._before = snapshot.ModuleState(self._plans.live_models)
        versions = _versions((args, kwargs))
        random = snapshot.ProcessSettings(snapshot.generators())
        values = self._values()
        before = self._copied([*args, *kwargs.values()])
        result = below(*args, **kwargs)
        plain = (torch.Tensor, np.ndarray)
        others = [r for r in tree_leaves(result) if not (isinstance(r, plain) or parts_of(r))]
        if values != self._values():
            self._obstacle = "the model changes its parameters in a call"
        elif before is not None and before.changed({}):
            self._obstacle = "a call changes its arguments, such as a cache"
        elif not self._plans.trains and Walk(others).found:
            self._obstacle = "a call returns an object that may be a cache for later calls"
        if not self.is_recording:  # a backward pass inside the call ended the recording
            return result
        drawn = snapshot.ProcessSettings(snapshot.generators()) if random.changed() else None
        floats = _floats(result)
        call = NotedCall(module, (args, kwargs), versions, random, drawn, floats)
        for number, one in enumerate(floats):
            if one.requires_grad and torch.is_grad_enabled():
                self._hooks.append(one.register_hook(partial(self._note, call.gradients, number)))
        self._calls.append(call)
        return result

    def _note(self, table: dict[int, torch.Tensor], key: int, gradient: Any) -> None:
        """Add a hook's gradient to `table`. With `create_graph`, the step can't be repeated."""
        if torch.is_grad_enabled():
            self._obstacle = "its gradients are differentiated again"
        _add(table, key, gradient)

    def _copied(self, arguments: list[Any]) -> snapshot.Snapshot | None:
        """Return a snapshot of arguments that aren't tensors; None without any or if that fails."""
        walk = Walk([] if self._is_large else [a for a in arguments if type(a) is not torch.Tensor])
        size = sum(getattr(one, "nbytes", 0) for one in walk.found.values())
        self._is_large |= len(walk.found) > snapshot.MOST_HELD or size > MOST_COPIED_BYTES
        if self._is_large:
            self._obstacle = "its arguments hold too much to compare"
        elif any(hasattr(type(one), "__next__") for one in walk.found.values()):
            self._obstacle = "a call draws from an argument"
        return snapshot.Snapshot(walk) if walk.found and not self._obstacle else None

    def _values(self) -> list[tuple[int, int]]:
        """Return parameters' versions and addresses, to detect in-place writes and `.data = …`."""
        every = parameters_of(self._plans.live_models)
        return [(version(one), one.data_ptr() if is_in_memory(one) else 0) for one in every]

    def end(self) -> None:
        """End a recording: remove its hooks, and drop its calls and gradients."""
        self.is_recording = False
        for hook in self._hooks:
            hook.remove()
        self._calls, self._gradients, self._hooks = [], {}, []
        self._before = snapshot.ModuleState([])

    def objection(self, name: str) -> str | None:
        """Return why a plan may not race, empty if it may; None if it must be examined first."""
        rounding, known = self._plans.rounding(name), self._outcomes
        if (why := known.get(rounding)) or name in self._plans.learned:
            return why or None
        is_right = any(rounding <= one for one, why in known.items() if not why)
        return "" if is_right or not rounding else None

    def reject(self, name: str, why: str) -> str:
        """Store and return `why`, an objection or "", for all plans that round as `name` does."""
        self._outcomes[self._plans.rounding(name)] = why
        return why

    def examine(self, step_s: float) -> str | None:
        """Repeat the step under the plan; return an objection, "" for none, or None to retry."""
        name, compiles = self.name, self._plans.is_compiled(self.name)
        # A compiled plan has no limit: its first call loads the code.
        most_s = math.inf if compiles else TOO_SLOW * step_s + TOO_SLOW_S
        try:
            with self.repeating():
                why = self._compare(name, compiles, most_s) or self._plans.compile_failure(name)
        except TimeoutError:
            return f"a call under it takes longer than {TOO_SLOW:.0f} steps"
        except ValueError as error:
            return self.not_examined(str(error)) if self._plans.rounding(name) else ""
        except Exception as error:
            why = f"it failed: {in_a_line(error)}"
        return self.reject(name, why)

    @property
    def draws(self) -> bool:
        """Return whether a recorded call draws random numbers."""
        return any(call.drawn is not None for call in self._calls)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let the block repeat the recorded calls; then restore modules and random generators.

        Raises ValueError if they can't be repeated. Ctrl-C takes effect in user code or at the end.
        """
        with interrupts.interrupts_delayed():
            begun_s, self.is_repeating = clock.now(), True
            recorded = self._calls, self._gradients, self._before
            self.end()
            self._calls, self._gradients, self._before = recorded
            try:
                if not self._calls or len(self._calls) == MOST_CALLS:
                    raise ValueError(f"the step calls no model, or {MOST_CALLS} times or more")
                if self._obstacle:
                    raise ValueError(self._obstacle)
                if any(call.versions != _versions(call.arguments) for call in self._calls):
                    raise ValueError("the model's inputs are changed in place")
                if self._plans.trains and not any(call.gradients for call in self._calls):
                    raise ValueError("the backward pass reaches no result of the model")
                with snapshot.module_state_kept(self._plans.live_models):
                    self._before.restore()  # such as a queue, or a hidden state
                    yield
            finally:
                self.end()
                self.is_repeating, self.seconds = False, clock.now() - begun_s

    def not_examined(self, why: str) -> str | None:
        """Count a failed recording and end it. After MOST_EXAMINATIONS, return an objection."""
        self.end()
        self._failures[self.name] += 1
        is_over = self.name and self._failures[self.name] >= MOST_EXAMINATIONS
        return self.reject(self.name, f"not checked: {why}") if is_over else None

    def _compare(self, name: str, compiles: bool, most_s: float) -> str:
        """Return why results under a plan are wrong; empty if rounding explains all differences."""
        precision = self._plans.precision(name)
        known = [result for call in self._calls for result in call.results], self._gradients
        with self._plans.acting(name):
            found = self.repeat(compiles, most_s)
        drawn = self._calls[-1].drawn
        if compiles and drawn is not None and drawn.changed():
            return "compiled code draws other random numbers"
        if self._plans.lowers(name) and (kept := keeps_lowered(self._plans.live_models)):
            return f"{kept}, which the plan lowers"
        if not self._differences(found, known, precision):
            return ""  # else: a penalty may add gradients, so compare with a plain repetition
        self._before.restore()
        return self._differences(found, self.repeat(compiles=False), precision)

    def repeat(self, compiles: bool, most_s: float = math.inf) -> Outcome:
        """Repeat the calls, inside `repeating`; return their results and the parameters' gradients.

        Raises TimeoutError if a forward pass ends over `most_s` seconds after the first began.
        """
        every = parameters_of(self._plans.live_models)
        trained = [one for one in every if id(one) in self._gradients]
        found: dict[int, torch.Tensor] = {}
        results, begun_s = list[torch.Tensor](), clock.now()
        for call in self._calls:
            list(call.random.restore(compares=False))
            args, kwargs = tree_map(_apart, call.arguments)
            plain = compiles or call.drawn is None  # replayed() disables Dynamo
            draw_again = nullcontext() if plain else replayed(set())
            with torch.set_grad_enabled(bool(call.gradients)), draw_again:
                floats = _floats(interrupts.in_a_window(partial(call.module, *args, **kwargs)))
            results += floats
            if clock.now() - begun_s > most_s:
                raise TimeoutError
            if not call.gradients:
                continue
            ends = [floats[number] for number in call.gradients if number < len(floats)]
            pairs = zip(call.gradients.values(), ends, strict=False)
            given = [one.to(end.dtype) for one, end in pairs]
            backward = partial(torch.autograd.grad, ends, trained, given, allow_unused=True)
            again = interrupts.in_a_window(backward)
            for one, gradient in zip(trained, again, strict=True):
                _add(found, id(one), gradient)
        return [one.detach() for one in results], found

    def _differences(self, found: Outcome, known: Outcome, precision: str) -> str:
        (results, gradients), (known_results, known_gradients) = found, known
        if [one.shape for one in results] != [one.shape for one in known_results]:
            return "its results have other shapes"
        of_results = sums([(a, b.detach()) for a, b in zip(results, known_results, strict=True)])
        rows = [("a result is", one.deviation(), one.size, "output") for one in of_results]
        every = (pair for model in self._plans.live_models for pair in model.named_parameters())
        named = {name: id(one) for name, one in every if id(one) in known_gradients}
        pairs = [(gradients.get(key), known_gradients[key]) for key in named.values()]
        parts = dict(zip(named, sums(pairs), strict=True))
        whole = total([*parts.values()])
        rows.append(("the gradients are", whole.deviation(), whole.size, "gradients"))
        for (name, part), deviation in zip(parts.items(), of_gradients(parts), strict=True):
            rows.append((f"the gradient of {name} is", deviation, part.size, "gradient"))
        for what, deviation, size, kind in rows:
            excess, words = beyond_limit(deviation, size, None, kind, precision)
            if excess > 1:
                return f"{what} {words}"
        return ""


def expected_s(step_s: float) -> float:
    """Return the expected seconds of an examination: part of a step, planning and comparing."""
    return 0.8 * step_s + 0.01


def keeps_lowered(models: Sequence[torch.nn.Module]) -> str:
    """Return why a model or a hook may keep bf16 or fp16 tensors; "" if none does."""
    try:
        held = [*snapshot.held_objects(models)]
    except ValueError as error:
        return str(error)
    for name, one in held:
        if isinstance(one, torch.Tensor) and one.dtype in LOW:
            return f"the model keeps {name}"
    for model in models:
        for name, part in model.named_modules():
            for hook in (hook for kind in HOOKS for hook in getattr(part, kind).values()):
                code = getattr(getattr(hook, "func", hook), "__code__", None)
                if code is None or is_users(code.co_filename):
                    return f"your hook of {f'`{name}`' if name else 'the model'} may keep a result"
    return ""


def _floats(result: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of a call's result, also in dataclasses."""
    every = tensors_in(tree_map(lambda one: parts_of(one) or one, result))
    return [one for one in every if one.is_floating_point()]


def _add(table: dict[int, torch.Tensor], key: int, gradient: torch.Tensor | None) -> None:
    if gradient is None:  # an autograd.Function may ignore a parameter
        return
    known, gradient = table.get(key), gradient.detach()
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    table[key] = gradient if known is None else known + gradient


def _apart(value: Any) -> Any:
    """Return a new leaf for a tensor that requires grad (its graph may be freed), else `value`."""
    is_tensor = isinstance(value, torch.Tensor) and value.requires_grad
    return value.detach().requires_grad_() if is_tensor else value


def _versions(values: Any) -> list[int]:
    """Return the tensors' version counters, which in-place writes increment."""
    return [version(one) for one in tensors_in(values)]
