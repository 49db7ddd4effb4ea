"""Run and time calls of a function, and detect the torch functions and flags that it changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from speedkit_jupyter.extras.check import inputs as check_inputs
from speedkit_jupyter.extras.check.inputs import CallInputs, Values, are_equal, numbers, tensors
from speedkit_jupyter.machines import flags
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.support.wrappers import unwrapped

# Name prefixes of values; all other names are outputs.
GRADIENT, INPUT, BUFFER = "gradient of ", "input ", "buffer "
CHANGED = "a result changes later: it shares memory with the next one, or is computed late"
# Modules and classes whose functions check() and references use; candidates mustn't replace them.
WATCHED: tuple[Any, ...] = (
    *(math, time, torch, torch.linalg, torch.autograd, torch.random, torch.cuda),
    *(torch.nn.functional, torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.nn.LayerNorm),
)
TORCH = str(Path(torch.__file__).parent)


@dataclass
class CallResult:
    """A call's results: tensors by name in `values`, and texts on dtypes and shapes in `forms`."""

    values: Values
    forms: dict[str, str]
    aliases: list[str]  # outputs that share memory with an input or parameter
    differentiable: list[str]  # outputs that require gradients
    written: list[str]  # inputs, incoming gradients and parameters that the call changed
    faults: list[str] = field(default_factory=list)


class Side:
    """The candidate or the reference; if `watched`, patches of torch are undone and reported."""

    def __init__(self, function: Any, gradients: bool, watched: bool = False) -> None:
        self.function, self._gradients, self._is_watched = function, gradients, watched
        self._watch: PatchWatch | None = None
        module = unwrapped(function) if isinstance(function, torch.nn.Module) else function
        self._parameters, self._buffers = (
            dict(getattr(module, kind, dict)()) for kind in ("named_parameters", "named_buffers")
        )
        state = {**self._parameters, **self._buffers}
        self.state, self.device = tensors(state), torch.device("cpu")
        self.shapes = {n: tuple(t.shape) if n in self.state else None for n, t in state.items()}
        self._start = {name: tensor.detach().clone() for name, tensor in self.state.items()}
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # results and their copies

    def close(self) -> None:
        self._put_back()
        self._set(self._start)

    def _put_back(self) -> list[str]:
        if self._watch is None:
            PatchWatch()  # scans torch, too, so that both sides begin with equally cold caches
        return self._watch.changes() if self._watch else []

    def _set(self, values: Mapping[str, Any]) -> None:
        with torch.no_grad():  # in place, as an optimizer does; bumps version counters
            for name, tensor in self.state.items():
                tensor.copy_(values.get(name, self._start[name]))

    def calls(
        self, drawn: Sequence[CallInputs], *around: Callable[[], AbstractContextManager[Any]]
    ) -> tuple[float, list[CallResult]]:
        """Set the weights and run calls on copies of `drawn`; return total seconds and results."""
        if self._is_watched and not self._watch:  # not before: the reference's imports may patch
            self._watch = PatchWatch()
        given = [one.copied(gradients=self._gradients) for one in drawn]
        self._set(drawn[0].weights)
        check_inputs.seed_generators(drawn[0].seed)
        every = [t.device for one in given for t in tensors(one.inputs).values()]
        self.device = next((one for one in every if one.type != "cpu"), torch.device("cpu"))
        results = list[dict[str, Any]]()
        with ExitStack() as stack:
            for surrounding in around:
                stack.enter_context(surrounding())
            try:
                taken_s = clock.timed(lambda: results.extend(map(self._call, given)), self.device)
            except BaseException:
                self._put_back()
                raise
            return taken_s, self._copied(drawn, given, results)

    @user_code_boundary
    def _call(self, given: CallInputs) -> dict[str, Any]:
        positional = () if given.by_keyword else given.arguments.values()
        result = self.function(*positional, **(given.arguments if given.by_keyword else {}))
        parts = check_inputs.places(result)
        outgoing = [n for n in given.cotangents if getattr(parts.get(n), "requires_grad", False)]
        if self._gradients and outgoing:
            every = {**tensors(given.inputs), **self._compared(self._parameters, given)}
            leaves = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
            outputs = [parts[name] for name in outgoing]
            cotangents = [given.cotangents[name] for name in outgoing]
            found = torch.autograd.grad(outputs, [*leaves.values()], cotangents, allow_unused=True)
            pairs = zip(leaves, found, strict=True)
            parts |= {GRADIENT + name: one for name, one in pairs if one is not None}
        return parts

    def _compared(self, state: Values, drawn: CallInputs) -> Values:
        """Return parameters or buffers to compare; none if the sides' names or shapes differ."""
        return {name: tensor for name, tensor in state.items() if name in drawn.weights}

    def _copied(
        self, drawn: Sequence[CallInputs], given: list[CallInputs], results: list[dict[str, Any]]
    ) -> list[CallResult]:
        copies = [check_inputs.copied(parts) for parts in results]  # before results can change
        every = zip(drawn, given, results, copies, strict=True)
        found, before = [self._result(*one) for one in every], self._kept
        self._kept = [
            (parts[name].detach(), result.values[name])
            for result, parts in zip(found, results, strict=True)
            for name in tensors(parts).keys() - {*result.aliases}
        ]
        found[0].faults += self._put_back()
        # Later calls must not change earlier results.
        if not all(are_equal(numbers(tensor), copy) for tensor, copy in (*before, *self._kept)):
            found[0].faults.append(CHANGED)
        return found

    def _result(
        self, drawn: CallInputs, given: CallInputs, parts: dict[str, Any], values: Values
    ) -> CallResult:
        outputs = {n: t for n, t in tensors(parts).items() if not n.startswith(GRADIENT)}
        weights = self._compared(self._parameters, drawn).items()
        inputs, written = given.inputs, drawn.written(given)
        for name, one in weights:
            is_same = are_equal(one.detach(), drawn.weights[name].to(one))
            written += [] if is_same else [f"parameter {name}"]
        left = {INPUT + name: inputs[name] for name in written if name in inputs}
        left |= {BUFFER + n: t for n, t in self._compared(self._buffers, drawn).items()}
        every = (*tensors(inputs).values(), *self._parameters.values())
        held = {t.untyped_storage().data_ptr() for t in every}
        aliases = (n for n, t in outputs.items() if t.untyped_storage().data_ptr() in held)
        return CallResult(
            values | check_inputs.copied(left),
            {name: check_inputs.form(part) for name, part in (parts | left).items()},
            [name for name in aliases if outputs[name].numel()],
            [name for name, tensor in outputs.items() if tensor.requires_grad],
            written,
        )


class PatchWatch:
    """Detect replaced functions of WATCHED and changed flags; `changes` undoes and lists them."""

    def __init__(self) -> None:
        self._before = [(owner, _functions(owner)) for owner in WATCHED]
        self._flags, self._grad = flags.snapshot(), torch.is_grad_enabled()

    def changes(self) -> list[str]:
        faults = []
        for owner, before in self._before:
            now = _functions(owner)
            # In a class, a new name counts too, because it hides an inherited one.
            names = {**before, **now} if isinstance(owner, type) else before
            for name in [name for name in names if now.get(name) is not before.get(name)]:
                code = getattr(now.get(name), "__code__", None)
                # Replacements by torch itself, such as torch.compile's wrappers, are allowed.
                if not getattr(code, "co_filename", "").startswith(TORCH):
                    faults.append(f"it replaces {owner.__name__}.{name}")
                    setattr(owner, name, before[name]) if name in before else delattr(owner, name)
        switched = flags.diff(self._flags, flags.snapshot())
        faults += [f"it changes the flag {one.name} to {one.after}" for one in switched]
        if switched:
            flags.restore(self._flags)
        if torch.is_grad_enabled() != self._grad:
            faults.append("it leaves gradients switched on or off")
            torch.set_grad_enabled(self._grad)
        return faults


def _functions(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if callable(value)}
