"""What the tests with real frameworks share: small models, and a look at everything they hold."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

VARIANTS = "baseline,bf16,fused_optimizer,channels_last,threads:1"
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Frameworks say at each of hundreds of runs that they found no GPU."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Small models, beside other test processes."""


@pytest.fixture
def net() -> nn.Module:
    """A small convolutional net with buffers and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 36, 4),
    )


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """For `net`."""
    return torch.randn(8, 3, 8, 8), torch.randint(4, (8,))


@pytest.fixture
def loader(batch) -> torch.utils.data.DataLoader:
    """Two batches in a shuffled order."""
    data = torch.utils.data.TensorDataset(*batch)
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)


class Look:
    """Everything that objects hold, by path: values, tensors bit for bit, and which objects."""

    def __init__(self, *objects: Any) -> None:
        self.seen: dict[str, Any] = {}
        self._objects: dict[int, Any] = {}
        for number, one in enumerate(objects):
            self._add(one, str(number))
        numbers = np.random.get_state()[1]
        self.seen["random"] = (random.getstate(), numbers.tobytes())
        self.seen["torch's random"] = ("tensor", torch.get_rng_state().clone())

    def changes(self, other: Look) -> list[str]:
        """The paths that are otherwise there."""
        paths = [*self.seen, *(path for path in other.seen if path not in self.seen)]
        return [path for path in paths if not _same(self.seen.get(path), other.seen.get(path))]

    def _add(self, found: Any, path: str) -> None:
        if isinstance(found, PLAIN):
            self.seen[path] = found
        elif id(found) in self._objects or isinstance(found, type):
            self.seen[path] = ("object", id(found))
        else:
            self._objects[id(found)] = found
            self._look_into(found, path)

    def _look_into(self, found: Any, path: str) -> None:
        if isinstance(found, torch.Tensor):
            self.seen[path] = ("tensor", found.detach().clone(), id(found), found.stride())
            if found.is_leaf:
                self._add(found.grad, f"{path}.grad")
        elif isinstance(found, dict):
            self.seen[path] = [key if isinstance(key, PLAIN) else id(key) for key in found]
            for number, (key, value) in enumerate(list(found.items())):
                name = key if isinstance(key, str) else number
                self._add(value, f"{path}[{name}]")
        elif isinstance(found, list | tuple):
            self.seen[path] = len(found)
            for number, value in enumerate(found):
                self._add(value, f"{path}[{number}]")
        elif isinstance(getattr(found, "__dict__", None), dict) and _is_data(found):
            self.seen[path] = type(found)
            for name, value in list(vars(found).items()):
                self._add(value, f"{path}.{name}")


def _is_data(found: Any) -> bool:
    kind = type(found)
    return kind.__name__ not in ("module", "function", "method") and not kind.__module__.startswith(
        ("speedkit_jupyter", "weakref", "logging", "threading")
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and one[:1] == ("tensor",) == other[:1]:
        was, now = one[1], other[1]
        equal = was.dtype == now.dtype and was.shape == now.shape
        return equal and one[2:] == other[2:] and torch.equal(was.nan_to_num(), now.nan_to_num())
    return bool(one == other) or one != one


@pytest.fixture
def look():
    """`look(objects...)` now, `before.changes(after)` later."""
    return Look


@pytest.fixture
def variants() -> str:
    """What a user of a framework would compare."""
    return VARIANTS
