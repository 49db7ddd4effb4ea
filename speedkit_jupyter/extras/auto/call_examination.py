"""Check the numbers of a plan: repeat a call of the model under the plan, on the user's own batch.

The step that trains provides the results of the call, and the gradients of these results. So the
check needs no loss function, and repeats only the call and its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.auto.loop_plans import LoopPlans
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.right.deviations import beyond_limit, of_gradients, sums, total
from speedkit_jupyter.right.reference import replayed
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.state.snapshot import ProcessSettings, generators, generators_kept
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.modules import COMPILED_CALL, buffer_table
from speedkit_jupyter.torchglue.private import tree_map, version
from speedkit_jupyter.torchglue.storage import tensors_in

# A step with this many calls or more is not examined: a loop over time steps may have thousands.
MOST_CALLS = 32
LOWERED = (torch.bfloat16, torch.float16)
# The results of a step's calls, and the gradients of parameters by id.
Outcome = tuple[list[torch.Tensor], dict[int, torch.Tensor]]
# Expected time of an examination: a share of a step, plus seconds to plan and to compare.
EXAMINATION, PLANNING_S = 0.8, 0.01
# A plan is out if its repeated call takes longer than TOO_SLOW steps plus TOO_SLOW_S seconds. The
# seconds allow for the kernels that a first call builds.
TOO_SLOW, TOO_SLOW_S = 10.0, 0.5
# A plan is not at fault if a batch's call can't be repeated. This many batches are tried.
MOST_EXAMINATIONS = 3


@dataclass
class NotedCall:
    """A call of the step: its arguments, its results, and the gradients of the results."""

    module: torch.nn.Module
    arguments: tuple[Any, Any]
    versions: list[int]
    random: ProcessSettings
    results: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    drawn: ProcessSettings | None = None  # generators after the call, if it drew random numbers

    def ended(self, results: Any) -> None:
        """Note the results, and hook their gradients."""
        if self.random.changed():
            self.drawn = ProcessSettings(generators())
        self.results = [one for one in tensors_in(results) if one.is_floating_point()]
        for number, one in enumerate(self.results):
            if one.requires_grad and torch.is_grad_enabled():
                self.hooks.append(one.register_hook(partial(_add, self.gradients, number)))


class CallExamination:
    """The record of one plain step of the user's, with which a plan is compared.

    Repeating raises TimeoutError once it has taken `most_s` seconds.
    """

    def __init__(self, models: Sequence[torch.nn.Module], trains: bool = True) -> None:
        self._models = models
        self.calls: list[NotedCall] = []
        self.most_s = math.inf
        self._gradients: dict[int, torch.Tensor] = {}
        every = [one for model in models for one in model.parameters() if one.requires_grad]
        every = every if trains else []
        self._hooks = [one.register_hook(partial(_add, self._gradients, id(one))) for one in every]

    def begin_call(self, module: torch.nn.Module, args: Any, kwargs: Any) -> NotedCall | None:
        """Return the record of a call that begins; None after MOST_CALLS calls."""
        if len(self.calls) == MOST_CALLS:
            return None
        versions, drawn = _versions((args, kwargs)), ProcessSettings(generators())
        call = NotedCall(module, (args, kwargs), versions, drawn)
        self.calls.append(call)
        return call

    @property
    def draws(self) -> bool:
        """Return whether a call has drawn random numbers."""
        return any(call.drawn is not None for call in self.calls)

    def end(self) -> None:
        """Remove the hooks on gradients, which would keep the results alive."""
        for hook in (*self._hooks, *(one for call in self.calls for one in call.hooks)):
            hook.remove()

    def repeat(self, in_force: AbstractContextManager[Any]) -> None:
        """Repeat the calls under a plan that compiles them. Raises as `compare` does."""
        self._check_repeatable()
        with kept_state(self._models), in_force:
            self._repeated(compiles=True)

    def _check_repeatable(self) -> None:
        if not self.calls or len(self.calls) == MOST_CALLS:
            raise ValueError("a step of many calls")
        if any(call.versions != _versions(call.arguments) for call in self.calls):
            raise ValueError("the arguments of its call are written to")
        if self._hooks and not any(call.gradients for call in self.calls):
            raise ValueError("no gradient came back to a result")

    def compare(
        self, in_force: AbstractContextManager[Any], precision: str, compiles: bool = False
    ) -> str:
        """Return why the plan is wrong, in words; empty if its rounding explains all differences.

        The plan acts in the context `in_force`; `precision` is its lowest, as "bf16". Raises
        ValueError if the step can't be repeated.
        """
        self._check_repeatable()
        noted = [result for call in self.calls for result in call.results]
        with kept_state(self._models):
            with in_force:
                found = self._repeated(compiles)
            drawn = self.calls[-1].drawn
            if compiles and drawn is not None and drawn.changed():
                return "compiled code draws other random numbers"
            if name := keeps_lowered(self._models):
                return f"the model keeps {name}, a result that the plan lowers"
            why = self._differences(found, (noted, self._gradients), precision)
            if why:  # a penalty on parameters, say, adds gradients that bypass the calls
                why = self._differences(found, self._repeated(), precision)
            return why

    def _repeated(self, compiles: bool = False) -> Outcome:
        draw_again = nullcontext if compiles else partial(replayed, set())  # Dynamo skips modes
        every = (one for model in self._models for one in model.parameters())
        trained = [one for one in every if id(one) in self._gradients]
        found: dict[int, torch.Tensor] = {}
        results, begun_s = list[torch.Tensor](), clock.now()
        for call in self.calls:
            list(call.random.restore(compares=False))
            args, kwargs = tree_map(_apart, call.arguments)
            with torch.set_grad_enabled(bool(call.gradients)), draw_again():
                repeated = tensors_in(call.module(*args, **kwargs))
            floats = [one for one in repeated if one.is_floating_point()]
            results += floats
            if clock.now() - begun_s > self.most_s:
                raise TimeoutError
            if not call.gradients:
                continue
            ends = [floats[number] for number in call.gradients if number < len(floats)]
            pairs = zip(call.gradients.values(), ends, strict=False)
            given = [one.to(end.dtype) for one, end in pairs]
            again = torch.autograd.grad(ends, trained, given, allow_unused=True)
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
        every = (pair for model in self._models for pair in model.named_parameters())
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


class Examiner:
    """The examinations of a loop's plans: the one under way, and the outcomes by rounding.

    `step` is the record of the present step, and None unless it will be repeated under a plan.
    `seconds` is the time of the last examination.
    """

    def __init__(self, plans: LoopPlans, trains: bool) -> None:
        self._plans, self._trains = plans, trains
        self._outcomes: dict[frozenset[Any], str] = {}
        self._failures = 0
        self.step: CallExamination | None = None
        self.is_repeating = False
        self.seconds = 0.0

    def begin(self) -> None:
        """Record the next step, which must run without a plan."""
        self.end()
        self.step = CallExamination(self._plans.live_models, self._trains)

    def begin_call(self, module: Any, args: Any, kwargs: Any) -> NotedCall | None:
        """Record a call that begins; None without a recording."""
        return None if self.step is None else self.step.begin_call(module, args, kwargs)

    def end(self) -> None:
        if self.step is not None:
            self.step.end()
        self.step = None

    def objection(self, name: str) -> str | None:
        """Return why a plan may not race, empty if it may; None before its rounding is examined."""
        rounding = self._plans.rounding(name)
        right = (known for known, why in self._outcomes.items() if not why)
        if why := self._outcomes.get(rounding):
            return why
        if name in self._plans.learned:
            return None
        return "" if not rounding or any(rounding <= known for known in right) else None

    def reject(self, name: str, why: str) -> None:
        """Object to all plans with the rounding of a plan whose numbers went wrong later."""
        if name != BASELINE:
            self._outcomes[self._plans.rounding(name)] = why

    def examine(self, name: str, step_s: float) -> str | None:
        """Repeat the recorded step under a plan; return as `objection` does."""
        compiles = self._plans.is_compiled(name)
        try:
            with self._recorded() as step:
                if not compiles:  # else the call loads the compiled code
                    step.most_s = TOO_SLOW * step_s + TOO_SLOW_S
                precision = self._plans.precision(name)
                why = step.compare(self._plans.acting(name), precision, compiles)
                why = why or self._plans.compile_failure(name)
        except TimeoutError:
            return f"a call under it takes longer than {TOO_SLOW:.0f} steps"
        except ValueError as error:
            return self.not_examined(name, str(error))
        except Exception as error:
            why = f"it failed: {in_a_line(error)}"
        self._outcomes[self._plans.rounding(name)] = why
        return why

    def repeat(self, in_force: AbstractContextManager[Any]) -> str:
        """Repeat the recorded step, without comparing; return why that failed, or ""."""
        try:
            with self._recorded() as step:
                step.repeat(in_force)
        except Exception as error:
            return in_a_line(error)
        return ""

    @contextmanager
    def _recorded(self) -> Iterator[CallExamination]:
        """End the recording, and time the block that repeats it."""
        assert self.step is not None
        step, self.step = self.step, None
        step.end()
        begun_s, self.is_repeating = clock.now(), True
        try:
            yield step
        finally:
            self.is_repeating = False
            self.seconds = clock.now() - begun_s

    def not_examined(self, name: str, why: str) -> str | None:
        """Note a step that can't be repeated; return an objection after MOST_EXAMINATIONS."""
        self.end()
        self._failures += 1
        if self._failures < MOST_EXAMINATIONS:
            return None
        self._outcomes[self._plans.rounding(name)] = why = f"not checked: {why}"
        return why


@contextmanager
def kept_state(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put back buffers, attributes of modules, and generators after the block."""
    parts = [part for model in models for part in model.modules()]
    attributes = [dict(vars(part)) for part in parts]
    tables = [dict(buffer_table(part)) for part in parts]
    held = [(one, one.detach().clone()) for model in models for one in model.buffers()]
    try:
        with generators_kept():
            yield
    finally:
        for part, found, table in zip(parts, attributes, tables, strict=True):
            for name in (vars(part).keys() | found.keys()) - {COMPILED_CALL}:
                if name not in found:
                    del vars(part)[name]
                elif vars(part).get(name) is not found[name]:
                    vars(part)[name] = found[name]
            buffer_table(part).update(table)
        with torch.no_grad():
            for buffer, value in held:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def keeps_lowered(models: Sequence[torch.nn.Module]) -> str:
    """Return the attribute of a module that holds a tensor of bf16 or fp16; empty without one."""
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
    """Return a tensor without its graph, which the user's backward pass has already freed."""
    is_tensor = isinstance(value, torch.Tensor) and value.requires_grad
    return value.detach().requires_grad_() if is_tensor else value


def _versions(values: Any) -> list[int]:
    """Return the version of each tensor, which each write increases; 0 for inference tensors."""
    return [0 if one.is_inference() else version(one) for one in tensors_in(values)]
