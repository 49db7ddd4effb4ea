"""Calls of a function on fresh inputs: what one gives in this process, and in which form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.extras.check.parts import (
    Values,
    are_equal,
    form,
    laid_out,
    memory,
    numbers,
    places,
    tensors,
)
from speedkit_jupyter.extras.check.watch import PatchWatch
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.step.memory import MemoryUse, needed
from speedkit_jupyter.support.tracebacks import user_code_boundary
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue.private import tree_map

# The kinds of values, by how their names begin; what begins otherwise is an output.
GRADIENT, INPUT, BUFFER = "gradient of ", "input ", "buffer "
INCOMING = "incoming gradient of "
CHANGED = "a result changes after it was given: it shares memory with a later one, or comes late"


@dataclass(frozen=True)
class Drawn:
    """Fresh inputs of one call by name, and the gradients of its outputs that go backward.

    `weights` are values for a module's parameters and buffers, `seed` is for what the call draws.
    """

    arguments: Mapping[str, Any]
    by_keyword: bool
    seed: int = 0
    cotangents: Values = field(default_factory=dict)
    weights: Values = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the arguments and all that they hold, by place."""
        return {
            place: part
            for name, value in self.arguments.items()
            for place, part in places(value, name).items()
        }

    def with_own(self, copy: Callable[[Any], Any]) -> Drawn:
        """Return it with tensors of its own, the arguments' made by `copy`."""
        cotangents = {name: laid_out(one) for name, one in self.cotangents.items()}
        arguments = tree_map(copy, dict(self.arguments))
        return replace(self, arguments=arguments, cotangents=cotangents)

    def written(self, given: Drawn) -> list[str]:
        """Return what a call has left with other values in the copies that it was given."""
        now, before = given.inputs, self.inputs
        found = [n for n in {**before, **now} if not are_equal(now.get(n), before.get(n))]
        pairs = self.cotangents.items()
        return found + [INCOMING + n for n, t in pairs if not are_equal(given.cotangents[n], t)]


@dataclass
class Taken:
    """What a call gave: tensors by name, the form of each part of its result and gradient; the
    names of outputs that share memory with an input, that gradients go through, and that are
    contiguous, and of inputs that it has written; and what is wrong whatever the values are.
    """

    values: Values
    forms: dict[str, str]
    aliases: list[str]
    differentiable: list[str]
    contiguous: list[str]
    written: list[str]
    faults: list[str] = field(default_factory=list)


class Here:
    """The candidate or the reference in this process, to prepare calls, time them, and take what
    they gave. A module has its own weights and buffers again on exit.

    `names` are names for parameters and buffers, by identity: what the reference calls them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        gradients: bool,
        watch: Callable[[], PatchWatch] | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.function, self._gradients, self._watch = function, gradients, watch
        self._watching: PatchWatch | None = None
        module = unwrapped(function) if isinstance(function, torch.nn.Module) else function
        every = (
            {(names or {}).get(id(t), name): t for name, t in getattr(module, kind, dict)()}
            for kind in ("named_parameters", "named_buffers")
        )
        self._parameters, self._buffers = every
        state = {**self._parameters, **self._buffers}
        self.state = tensors(state)
        self.shapes = {n: tuple(t.shape) if n in self.state else None for n, t in state.items()}
        self._start = {name: tensor.detach().clone() for name, tensor in self.state.items()}
        self._drawn: list[Drawn] = []
        self.given: list[Drawn] = []
        self.results: list[dict[str, Any]] = []  # of each call of the last `run`, as they are
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back()
        self._set(self._start)

    def _put_back(self) -> list[str]:
        return self._watching.changes() if self._watching else []

    def _set(self, values: Mapping[str, Any]) -> None:
        """Write weights as an optimizer does: torch counts it."""
        with torch.no_grad():
            for name, tensor in self.state.items():
                tensor.copy_(values.get(name, self._start[name]))

    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None:
        """Copy the inputs of the next calls, and set weights and seed.

        They are written into the memory of the last inputs where these are to `reuse` it.
        """
        if self._watch and not self._watching:  # what the reference has loaded is there by now
            self._watching = self._watch()
        self._drawn = list(drawn)
        fresh = [one.with_own(self._copy) for one in drawn]
        if reuse and len(fresh) == len(self.given):
            fresh = [
                replace(new, arguments=tree_map(_written, old.arguments, new.arguments))
                for old, new in zip(self.given, fresh, strict=True)
            ]
        self.given, self.results = fresh, []
        self._set(drawn[0].weights)
        seed_torch(drawn[0].seed)
        synchronize(self.device)

    def _copy(self, value: Any) -> Any:
        """Return a value of its own for each call; of floats one that wants a gradient."""
        if isinstance(value, np.ndarray):
            return value.copy()
        if not isinstance(value, torch.Tensor):
            return value
        is_float = value.is_floating_point() or value.is_complex()
        return laid_out(value).requires_grad_(self._gradients and is_float)

    @property
    def device(self) -> torch.device:
        """Return where the first tensor that it is given is."""
        every = [t.device for one in self.given for t in tensors(one.inputs).values()]
        return next((one for one in every if one.type != "cpu"), torch.device("cpu"))

    def run(self, computes: bool = True) -> None:
        """Make the calls; or else do all but computing, which is nothing here."""
        if not computes:
            return
        try:
            self.results = [self._call(given) for given in self.given]
        except BaseException:
            self._put_back()
            raise

    @user_code_boundary
    def _call(self, given: Drawn) -> dict[str, Any]:
        arguments = given.arguments
        result = (
            self.function(**arguments) if given.by_keyword else self.function(*arguments.values())
        )
        parts = places(result)
        through = {
            n: parts[n] for n in given.cotangents if getattr(parts.get(n), "requires_grad", 0)
        }
        if self._gradients and through:
            every = {**tensors(given.inputs), **self._compared(self._parameters, given)}
            leaves = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
            outputs, cotangents = list(through.values()), [given.cotangents[n] for n in through]
            found = torch.autograd.grad(outputs, [*leaves.values()], cotangents, allow_unused=True)
            pairs = zip(leaves, found, strict=True)
            parts |= {GRADIENT + name: one for name, one in pairs if one is not None}
        return parts

    def _compared(self, state: Values, drawn: Drawn) -> Values:
        """Return the parameters or buffers that both sides have."""
        return {name: tensor for name, tensor in state.items() if name in drawn.weights}

    def take(self, keep: bool = False) -> list[Taken]:
        """Return copies of what the calls gave, its form, and what is wrong with it by itself.

        What is to be kept is looked at the next time, too: a later call must not change it.
        """
        copies, kept = [copied(parts) for parts in self.results], []  # at once: it may come late
        every = zip(self._drawn, self.given, self.results, copies, strict=True)
        found = [self._taken(*one) for one in every]
        for taken, parts in zip(found, self.results, strict=True):
            own = tensors(parts).keys() - {*taken.aliases}
            kept += [(parts[name].detach(), taken.values[name]) for name in own]
        faults = found[0].faults
        faults += self._put_back()
        if any(not are_equal(tensor, before) for tensor, before in (*self._kept, *kept)):
            faults.append(CHANGED)
        # Results that are kept take the timed calls the memory that they would use again.
        self._kept = kept if keep else []
        return found

    def _taken(self, drawn: Drawn, given: Drawn, parts: dict[str, Any], values: Values) -> Taken:
        outputs = {n: t for n, t in tensors(parts).items() if not n.startswith(GRADIENT)}
        weights = self._compared(self._parameters, drawn).items()
        is_same = {n: are_equal(t.detach(), drawn.weights[n].to(t)) for n, t in weights}
        inputs = given.inputs
        written = drawn.written(given) + [f"parameter {n}" for n in is_same if not is_same[n]]
        left = {INPUT + name: inputs[name] for name in written if name in inputs}
        left |= {BUFFER + n: t for n, t in self._compared(self._buffers, drawn).items()}
        held = {_address(t) for t in (*tensors(inputs).values(), *self._parameters.values())}
        return Taken(
            values | copied(left),
            {name: form(part) for name, part in (parts | left).items()},
            [name for name, tensor in outputs.items() if _address(tensor) in held - {0}],
            [name for name, tensor in outputs.items() if tensor.requires_grad],
            [name for name, tensor in outputs.items() if tensor.is_contiguous()],
            written,
        )

    def memory(self) -> MemoryUse:
        """Return what the calls need."""
        every = [t for one in self.given for t in tensors(one.inputs).values()]
        return needed(self.run, self.device, [*every, *self.state.values()])


def _written(old: Any, new: Any) -> Any:
    """Return the old tensor with the new values, at the same address and of the same version."""
    if not isinstance(old, torch.Tensor) or form(old) != form(new):
        return new
    if old.stride() != new.stride() or old.storage_offset() != new.storage_offset():
        return new
    memory(old.data).copy_(memory(new.data))
    return old


def copied(parts: Mapping[str, Any]) -> Values:
    """Return copies of what has numbers."""
    known = {name: numbers(part) for name, part in parts.items()}
    return {name: one.detach().clone() for name, one in known.items() if one is not None}


def seed_torch(seed: int) -> None:
    """Seed all generators; torch's own function formats a traceback for each missing device."""
    seed_all = torch.manual_seed if torch.accelerator.is_available() else None
    (seed_all or torch.default_generator.manual_seed)(seed)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # made of other tensors
        return 0
