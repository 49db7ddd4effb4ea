"""What a trial call leaves behind: seen, and taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties.wishes import MISSING, put_back_entries
from speedkit_jupyter.optimizations.recomputing.outside_state import (
    random_states,
    set_random_states,
)

if TYPE_CHECKING:
    import torch

CONTAINERS = (list, dict, set, deque)


@contextmanager
def put_back(model: torch.nn.Module) -> Iterator[Left]:
    """Buffers, attributes and random generators end as they began."""
    import torch

    devices = _devices(model)
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices=devices, device_type=kind):
        left = Left(model, devices)
        try:
            yield left
        finally:
            left.take_back()


class Left:
    """Knows how the modules of a model, and the random generators, were."""

    def __init__(self, model: torch.nn.Module, devices: list[torch.device]) -> None:
        self._devices, self._others = devices, random_states()
        self._drawn_from = self._generators()
        self._parts = [_Part(part) for part in model.modules()]

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since, of torch's, Python's or NumPy's."""
        others = _comparable(random_states()) != _comparable(self._others)
        return others or self._generators() != self._drawn_from

    def written_to(self) -> str:
        """The name of something on a module that is another now; empty where all is the same."""
        return next((name for part in self._parts for name in part.written_to()), "")

    def take_back(self) -> None:
        """All but torch's random generators."""
        for part in self._parts:
            part.take_back()
        set_random_states(self._others)

    def _generators(self) -> list[bytes]:
        import torch

        states = [torch.get_device_module(one).get_rng_state(one) for one in self._devices]
        return [bytes(state.tolist()) for state in (torch.get_rng_state(), *states)]


class _Part:
    """One module: its attributes, what lies in those that are containers, and its tensors."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._attributes = module.__dict__
        self._before = dict(self._attributes)
        self._inside = {
            name: (value, value.copy())
            for name, value in self._before.items()
            if type(value) in CONTAINERS
        }
        tensors = {**module._parameters, **module._buffers}
        self._versions = {
            name: (tensor, tensor._version)
            for name, tensor in tensors.items()
            if tensor is not None and not tensor.is_inference()
        }
        self._copies = {n: b.clone() for n, b in module._buffers.items() if b is not None}

    def written_to(self) -> Iterator[str]:
        yield from self._changed(self._attributes, self._before)
        for name, (value, before) in self._inside.items():
            if not _same(value, before):
                yield name
        for name, (tensor, version) in self._versions.items():
            if tensor._version != version or not self._is_as_before(name, tensor):
                yield name

    def take_back(self) -> None:
        import torch

        for name in [*self._changed(self._attributes, self._before)]:
            put_back_entries(self._attributes, {name: self._before.get(name, MISSING)})
        for value, before in self._inside.values():
            if not _same(value, before):
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(before)
        with torch.no_grad():
            for name, (tensor, _) in self._versions.items():
                if not self._is_as_before(name, tensor):
                    tensor.copy_(self._copies[name])

    def _is_as_before(self, name: str, tensor: torch.Tensor) -> bool:
        """A buffer, by its values: not every kernel that writes counts as one."""
        import torch

        copy = self._copies.get(name)
        if copy is None:
            return True
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor._version == self._versions[name][1]
        return torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True)

    def _changed(self, now: Any, before: Any) -> Iterator[str]:
        names = now.keys() | before.keys()
        return (n for n in names if now.get(n, MISSING) is not before.get(n, MISSING))


def _comparable(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """Python's state and NumPy's, whose numbers are an array."""
    python, numpy = states
    return python, None if numpy is None else (numpy[1].tobytes(), *numpy[2:])


def _same(value: Any, before: Any) -> bool:
    """By identity of what is inside."""
    if isinstance(value, set):
        return bool(value == before)
    if isinstance(value, dict):
        value, before = [*value.items()], [*before.items()]
        return len(value) == len(before) and all(
            a is c and b is d for (a, b), (c, d) in zip(value, before, strict=True)
        )
    return len(value) == len(before) and all(a is b for a, b in zip(value, before, strict=True))


def _devices(model: torch.nn.Module) -> list[torch.device]:
    """Those beside the CPU."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return [device for device in found if device.type not in ("cpu", "meta")]
