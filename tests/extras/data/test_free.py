"""Memory that no user variable holds is released; variables are listed and not touched."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from speedkit_jupyter.extras.data.free import Freed, free

MIB = 1 << 20


class Dead:
    pass


def freed(names: dict[str, Any]) -> Freed:
    return free([], names)


def test_variables_are_not_touched_and_listed_with_their_memory() -> None:
    net, small = nn.Linear(512, 1024), nn.Linear(4, 4)
    losses = [small(torch.ones(2, 4)).sum() for _ in range(3)]
    names = {"losses": losses, "net": net, "small": small, "dead": weakref.proxy(Dead())}
    before = dict(names)
    found = freed(names)
    assert names == before
    assert [(row["name"], row["graphs"]) for row in found.rows()] == [("net", 0), ("losses", 3)]
    assert found.rows()[0]["bytes"] == 4 * (512 * 1024 + 1024)
    assert "3 tensors with a graph" in repr(found)


def test_circles_that_nothing_refers_to_are_collected() -> None:
    gc.disable()
    try:
        circle: list[Any] = [torch.zeros(MIB)]
        circle.append(circle)
        gone = weakref.ref(circle[0])
        del circle
        freed({})
    finally:
        gc.enable()
    assert gone() is None


def test_released_holders_are_named() -> None:
    held = [torch.zeros(MIB)]
    found = free([lambda: held.clear() or "an output", lambda: ""], {})  # type: ignore[func-returns-value]
    assert not held
    assert found.released == ["an output"]
    assert repr(found).startswith("Released: an output")
