"""Fixtures for tests with real frameworks: a model, its data, and a comparison of objects."""

import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@pytest.fixture(autouse=True)
def as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make frameworks quiet and offline; afterwards reset Accelerate's process-wide state."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture
def net() -> nn.Module:
    head = nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 36, 4)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 8, 8), torch.randint(4, (8,))


@pytest.fixture
def loader(batch) -> torch.utils.data.DataLoader:
    data = torch.utils.data.TensorDataset(*batch)
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


class Look:
    """A record, by path, of the values, tensor copies and object identities in some objects."""

    def __init__(self, *objects: Any) -> None:
        numbers = np.random.get_state()[1]
        self.seen: dict[str, Any] = {
            "random": (random.getstate(), numbers.tobytes()),
            "torch's random": ("tensor", torch.get_rng_state().clone()),
        }
        self._objects: dict[int, Any] = {}
        for number, one in enumerate(objects):
            self._add(one, str(number))

    def changes(self, other: "Look") -> list[str]:
        """Return the paths at which `other` differs."""
        paths = dict.fromkeys([*self.seen, *other.seen])
        return [path for path in paths if not _same(self.seen.get(path), other.seen.get(path))]

    def _add(self, found: Any, path: str) -> None:
        if isinstance(found, PLAIN):
            self.seen[path] = found
        elif id(found) in self._objects or isinstance(found, type):
            self.seen[path] = ("object", id(found))
        elif isinstance(found, torch.Tensor):
            self._objects[id(found)] = found
            self.seen[path] = ("tensor", found.detach().clone(), id(found), found.stride())
            self._add(found.grad if found.is_leaf else None, f"{path}.grad")
        else:
            self._objects[id(found)] = found
            parts = _parts(found)
            keys = found if isinstance(found, dict) else ()
            self.seen[path] = (type(found), [k if isinstance(k, PLAIN) else id(k) for k in keys])
            for name, value in parts.items():
                self._add(value, f"{path}.{name}")


def _parts(found: Any) -> dict[Any, Any]:
    """Return the items or attributes of an object, by name or number."""
    if isinstance(found, dict):
        named = enumerate(found.items())
        return {key if isinstance(key, str) else number: value for number, (key, value) in named}
    if isinstance(found, list | tuple):
        return dict(enumerate(found))
    kind = type(found)
    is_code = kind.__name__ in ("module", "function", "method") or kind.__module__.startswith(
        ("speedkit_jupyter", "weakref", "logging", "threading")
    )
    held = getattr(found, "__dict__", None)
    return dict(held) if isinstance(held, dict) and not is_code else {}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and one[:1] == ("tensor",) == other[:1]:
        was, now = one[1], other[1]
        equal = was.dtype == now.dtype and was.shape == now.shape
        return equal and one[2:] == other[2:] and torch.equal(was.nan_to_num(), now.nan_to_num())
    return bool(one == other) or one != one


@pytest.fixture
def look() -> type[Look]:
    """Return the class Look: `before = look(model)`, later `before.changes(look(model))`."""
    return Look


@pytest.fixture
def variants() -> str:
    """Return the variants that a framework's user would compare."""
    return "baseline,bf16,fused_optimizer,channels_last,threads:1"
