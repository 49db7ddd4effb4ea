"""What a second run has to find as the first did, beside what torch looks after."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.attention import sdp_kernels
from speedkit_jupyter.optimizations.properties.wishes import MISSING, put_back_entries

if TYPE_CHECKING:
    import torch

CONTAINERS = (list, dict, set)
PLAIN = (bool, int, float, str, type(None))


class OutsideState:
    """What a run of a block finds now, beside what it is passed and its buffers' values."""

    def __init__(self, block: torch.nn.Module) -> None:
        self._block = block
        self._random, self._kernels = random_states(), kernels()
        self._generators = own_generators(block)
        self._attributes, self._held = plain_attributes(block), _held_tensors(block)
        self._asked = [(weight, weight.requires_grad) for weight in block.parameters()]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Another run in the block finds all of it, and leaves no trace."""
        with ExitStack() as stack:
            stack.enter_context(attributes_kept(self._block))
            stack.enter_context(_tensors_held(self._held))
            _set_plain_attributes(self._block, self._attributes)
            stack.enter_context(_gradients_asked_for(self._asked))
            stack.callback(set_random_states, random_states())
            set_random_states(self._random)
            for generator, state in self._generators:
                stack.callback(_write, generator, _read(generator))
                _write(generator, state)
            stack.callback(set_kernels, kernels())
            set_kernels(self._kernels)
            yield


def kernels() -> dict[str, Any]:
    """Those of attention, which may be chosen around the forward pass alone."""
    return {name: switch.read() for name, switch in sdp_kernels.switches().items()}


def set_kernels(values: dict[str, Any]) -> None:
    for name, switch in sdp_kernels.switches().items():
        if switch.read() != values[name]:
            switch.write(values[name])


def random_states() -> tuple[Any, Any]:
    """Python's and NumPy's, which torch does not look after."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def own_generators(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Generators that its parts have as attributes, and the state of each."""
    values = {id(v): v for part in module.modules() for v in vars(part).values()}
    return [(value, _read(value)) for value in values.values() if _is_generator(value)]


def _is_generator(value: Any) -> bool:
    import torch

    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, kinds)


def _read(generator: Any) -> Any:
    if hasattr(generator, "bit_generator"):  # numpy's present ones
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _write(generator: Any, state: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def plain_attributes(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Of each part what a call may go by: its mode, a switch, a factor."""
    return [
        {name: value for name, value in vars(part).items() if type(value) in PLAIN}
        for part in module.modules()
    ]


def _set_plain_attributes(module: torch.nn.Module, before: list[dict[str, Any]]) -> None:
    """On the same parts; whoever asks for it puts back what there is now."""
    for part, attributes in zip(module.modules(), before, strict=False):
        part.__dict__.update(attributes)


@contextmanager
def _gradients_asked_for(asked: Sequence[tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """Of the same parameters as before: one may have been frozen since."""
    changed = [(one, one.requires_grad) for one, before in asked if one.requires_grad != before]
    for one, now in changed:
        one.requires_grad_(not now)
    try:
        yield
    finally:
        for one, now in changed:
            one.requires_grad_(now)


def _held_tensors(module: torch.nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The parameters and buffers of each part, and where they lie: `torch.func.functional_call`
    puts others there for the length of a call.
    """
    holders = [h for part in module.modules() for h in (part._parameters, part._buffers)]
    return [(holder, dict(holder)) for holder in holders if holder]


@contextmanager
def _tensors_held(before: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Where others lie by now, these do in the block."""
    changed = [
        (holder, name, holder.get(name, MISSING), tensor)
        for holder, tensors in before
        for name, tensor in tensors.items()
        if holder.get(name, MISSING) is not tensor
    ]
    for holder, name, _, tensor in changed:
        holder[name] = tensor
    try:
        yield
    finally:
        for holder, name, now, _ in changed:
            put_back_entries(holder, {name: now})


def _is_same(now: Any, before: Any) -> bool:
    """Whether a container holds the same objects in the same order."""
    items = (list(one.items() if type(one) is dict else one) for one in (now, before))
    mine, other = items
    return len(mine) == len(other) and all(
        one is two or (type(one) is tuple and all(a is b for a, b in zip(one, two, strict=True)))
        for one, two in zip(mine, other, strict=True)
    )


@contextmanager
def attributes_kept(block: torch.nn.Module) -> Iterator[None]:
    """What a run counts or notes on the modules is not counted and noted twice, in lists, dicts and
    sets of theirs neither.
    """
    before = [(part, dict(part.__dict__)) for part in block.modules()]
    noted = [
        (value, copy(value))
        for _, attributes in before
        for name, value in attributes.items()
        if type(value) in CONTAINERS and not name.startswith("_")
    ]
    try:
        yield
    finally:
        for value, contents in noted:
            if not _is_same(value, contents):
                value.clear()
                (value.extend if type(value) is list else value.update)(contents)
        for part, attributes in before:
            for name in part.__dict__.keys() | attributes.keys():
                if part.__dict__.get(name, MISSING) is not attributes.get(name, MISSING):
                    put_back_entries(part.__dict__, {name: attributes.get(name, MISSING)})
