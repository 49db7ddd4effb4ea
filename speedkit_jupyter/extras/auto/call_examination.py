"""Check the numbers of a plan: repeat a step's model calls under the plan, on the user's batch.

The user's own step provides the results of the calls, and the gradients of these results. So the
check needs no loss function, and repeats only the calls and their backward passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.auto.loop_plans import LoopPlans
from speedkit_jupyter.right.deviations import of_gradients, sums, total
from speedkit_jupyter.right.judge import beyond_limit
from speedkit_jupyter.right.reference import replayed
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.state.snapshot import ProcessSettings, generators, module_state_kept
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue import interrupts
from speedkit_jupyter.torchglue.private import tree_map, version
from speedkit_jupyter.torchglue.storage import tensors_in

# A step with this many calls or more is not examined: a loop over time steps may have thousands.
MOST_CALLS = 32
LOWERED = (torch.bfloat16, torch.float16)
# The floating-point results of a step's calls, and the gradients by the ids of parameters.
Outcome = tuple[list[torch.Tensor], dict[int, torch.Tensor]]
# Expected time of an examination: a share of a step, plus seconds to plan and to compare.
EXAMINATION, PLANNING_S = 0.8, 0.01
# A plan is dropped if the repeated calls take longer than TOO_SLOW steps plus TOO_SLOW_S seconds,
# which allow for the kernels that a first call builds. A compiled plan has no limit.
TOO_SLOW, TOO_SLOW_S = 10.0, 0.5
# Plans are rejected for a step that can't be repeated from this many such steps of a loop on.
MOST_EXAMINATIONS = 3


@dataclass
class NotedCall:
    """A model's call: arguments, floating-point results, and the results' gradients.

    `random` has the generators' states before the call, `drawn` the states after a call that draws.
    """

    module: torch.nn.Module
    arguments: tuple[Any, Any]
    versions: list[int]  # version counters of the tensors in the arguments
    random: ProcessSettings
    results: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    drawn: ProcessSettings | None = None

    def ended(self, results: Any) -> None:
        """Note the results, and the generators if the call drew; set hooks that note gradients."""
        if self.random.changed():
            self.drawn = ProcessSettings(generators())
        self.results = [one for one in tensors_in(results) if one.is_floating_point()]
        for number, one in enumerate(self.results):
            if one.requires_grad and torch.is_grad_enabled():
                self.hooks.append(one.register_hook(partial(_add, self.gradients, number)))


class Examiner:
    """The examinations of a loop's plans, each by repeating the calls of one plain step.

    While `is_recording`, a step is recorded, to be repeated under the plan `name` or, if `name`
    is empty, for the compiler. `seconds` is the duration of the last repetition and comparison.
    """

    def __init__(self, plans: LoopPlans, trains: bool) -> None:
        self._plans, self._trains = plans, trains
        self._outcomes: dict[frozenset[Any], str] = {}  # objections by rounding, or ""
        self._failures = Counter[str]()  # by plan
        self.name, self.is_recording, self.is_repeating, self.seconds = "", False, False, 0.0
        self._calls, self._gradients = list[NotedCall](), dict[int, torch.Tensor]()
        self._hooks: list[Any] = []

    def begin(self, name: str) -> None:
        """Record the next step, which must run without a plan; set hooks that note gradients."""
        self.end()
        self.name, self.is_recording = name, True
        every = (one for model in self._plans.live_models for one in model.parameters())
        for one in every:
            if self._trains and one.requires_grad:
                self._hooks.append(one.register_hook(partial(_add, self._gradients, id(one))))

    def begin_call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> NotedCall | None:
        """Return a new record for a call; None outside a recording, and after MOST_CALLS calls."""
        if not self.is_recording or len(self._calls) == MOST_CALLS:
            return None
        versions, drawn = _versions((args, kwargs)), ProcessSettings(generators())
        self._calls.append(NotedCall(module, (args, kwargs), versions, drawn))
        return self._calls[-1]

    def forget(self, call: NotedCall) -> None:
        """Drop the record of a call that raised an error, which the user may catch."""
        self._calls = [one for one in self._calls if one is not call]

    def end(self) -> None:
        """End a recording: remove its hooks, and drop its calls and gradients."""
        self.is_recording = False
        for hook in (*self._hooks, *(one for call in self._calls for one in call.hooks)):
            hook.remove()
        self._calls, self._gradients, self._hooks = [], {}, []

    def objection(self, name: str) -> str | None:
        """Return why a plan may not race, empty if it may; None if it must be examined first."""
        rounding, known = self._plans.rounding(name), self._outcomes
        if (why := known.get(rounding)) or name in self._plans.learned:
            return why or None
        is_right = any(rounding <= one for one, why in known.items() if not why)
        return "" if is_right or not rounding else None

    def reject(self, name: str, why: str) -> str:
        """Note an objection to all plans with a plan's rounding, or "" for none; return `why`."""
        self._outcomes[self._plans.rounding(name)] = why
        return why

    def examine(self, step_s: float) -> str | None:
        """Compare the recorded step with its repetition under the plan; return an `objection`."""
        name, compiles = self.name, self._plans.is_compiled(self.name)
        # The first call of a compiled plan loads the code.
        most_s = math.inf if compiles else TOO_SLOW * step_s + TOO_SLOW_S
        try:
            with self._repeating():
                why = self._compare(name, compiles, most_s) or self._plans.compile_failure(name)
        except TimeoutError:
            return f"a call under it takes longer than {TOO_SLOW:.0f} steps"
        except ValueError as error:
            return self.not_examined(str(error))
        except Exception as error:
            why = f"it failed: {in_a_line(error)}"
        return self.reject(name, why)

    def trace(self, tracing: Callable[[bool], AbstractContextManager[Any]]) -> str:
        """Repeat the recorded step for the compiler; return why tracing failed, or "".

        `tracing(draws)` returns a context for the repetition; `draws` tells whether calls draw.
        """
        try:
            with self._repeating(), tracing(any(call.drawn is not None for call in self._calls)):
                self._repeated(compiles=True)
        except Exception as error:
            return in_a_line(error)
        return ""

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """End the recording; time its repetition in the block, and restore modules and generators.

        Raises ValueError if the step can't be repeated. Signals wait for the end of the block.
        """
        with interrupts.held_back():
            begun_s, self.is_repeating = clock.now(), True
            has_hooks, recorded = bool(self._hooks), (self._calls, self._gradients)
            self.end()
            self._calls, self._gradients = recorded
            try:
                if not self._calls or len(self._calls) == MOST_CALLS:
                    raise ValueError(f"the step calls no model, or {MOST_CALLS} times or more")
                if any(call.versions != _versions(call.arguments) for call in self._calls):
                    raise ValueError("the model's inputs are changed in place")
                if has_hooks and not any(call.gradients for call in self._calls):
                    raise ValueError("the backward pass reaches no result of the model")
                with module_state_kept(self._plans.live_models):
                    yield
            finally:
                self.end()
                self.is_repeating, self.seconds = False, clock.now() - begun_s

    def not_examined(self, why: str) -> str | None:
        """Note a step that can't be repeated; from MOST_EXAMINATIONS on return an objection."""
        self.end()
        self._failures[self.name] += 1
        is_over = self.name and self._failures[self.name] >= MOST_EXAMINATIONS
        return self.reject(self.name, f"not checked: {why}") if is_over else None

    def _compare(self, name: str, compiles: bool, most_s: float) -> str:
        """Return why a plan is wrong, in words; empty if its rounding explains all differences."""
        precision = self._plans.precision(name)
        known = [result for call in self._calls for result in call.results], self._gradients
        with self._plans.acting(name):
            found = self._repeated(compiles, most_s)
        drawn = self._calls[-1].drawn
        if compiles and drawn is not None and drawn.changed():
            return "compiled code draws other random numbers"
        if kept := keeps_lowered(self._plans.live_models):
            return f"the model keeps {kept}, a result that the plan lowers"
        if not self._differences(found, known, precision):
            return ""  # else: gradients may bypass the calls, as from a penalty on parameters
        return self._differences(found, self._repeated(compiles=False), precision)

    def _repeated(self, compiles: bool, most_s: float = math.inf) -> Outcome:
        """Return the repeated calls' results and gradients. Raises TimeoutError after `most_s`."""
        draw_again = nullcontext if compiles else partial(replayed, set())  # modes disable Dynamo
        every = (one for model in self._plans.live_models for one in model.parameters())
        trained = [one for one in every if id(one) in self._gradients]
        found: dict[int, torch.Tensor] = {}
        results, begun_s = list[torch.Tensor](), clock.now()
        for call in self._calls:
            list(call.random.restore(compares=False))
            args, kwargs = tree_map(_apart, call.arguments)
            with torch.set_grad_enabled(bool(call.gradients)), draw_again():
                forward = partial(call.module, *args, **kwargs)
                repeated = tensors_in(interrupts.in_a_window(forward))
            floats = [one for one in repeated if one.is_floating_point()]
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
                if gradient is not None:
                    _add(found, id(one), gradient)
        return [one.detach() for one in results], found

    def _differences(self, found: Outcome, known: Outcome, precision: str) -> str:
        (results, gradients), (known_results, known_gradients) = found, known
        if [one.shape for one in results] != [one.shape for one in known_results]:
            return "its results have other shapes"
        for one in sums([(a, b.detach()) for a, b in zip(results, known_results, strict=True)]):
            if words := _beyond(one.deviation(), one.size, "output", precision):
                return f"a result is {words}"
        every = (pair for model in self._plans.live_models for pair in model.named_parameters())
        named = {name: id(one) for name, one in every if id(one) in known_gradients}
        pairs = [(gradients.get(key), known_gradients[key]) for key in named.values()]
        parts = dict(zip(named, sums(pairs), strict=True))
        whole = total([*parts.values()])
        if words := _beyond(whole.deviation(), whole.size, "gradients", precision):
            return f"the gradients are {words}"
        for (name, part), deviation in zip(parts.items(), of_gradients(parts), strict=True):
            if words := _beyond(deviation, part.size, "gradient", precision):
                return f"the gradient of {name} is {words}"
        return ""


def keeps_lowered(models: Sequence[torch.nn.Module]) -> str:
    """Return the name of a module's attribute that is a bf16 or fp16 tensor; empty without one."""
    for model in models:
        for name, part in model.named_modules():
            for key, value in vars(part).items():
                if isinstance(value, torch.Tensor) and value.dtype in LOWERED:
                    return f"{name}.{key}".lstrip(".")
    return ""


def _add(table: dict[int, torch.Tensor], key: int, gradient: torch.Tensor) -> None:
    known = table.get(key)
    table[key] = gradient.detach() if known is None else known + gradient


def _beyond(found: Any, size: int, kind: str, precision: str) -> str:
    excess, words = beyond_limit(found, size, None, kind, precision)
    return words if excess > 1 else ""


def _apart(value: Any) -> Any:
    """Return a tensor detached from its graph, which backward() has freed; return others as is."""
    is_tensor = isinstance(value, torch.Tensor) and value.requires_grad
    return value.detach().requires_grad_() if is_tensor else value


def _versions(values: Any) -> list[int]:
    """Return the tensors' version counters, raised by in-place writes; 0 for inference tensors."""
    return [0 if one.is_inference() else version(one) for one in tensors_in(values)]
