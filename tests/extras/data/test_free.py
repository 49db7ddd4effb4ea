"""Objects that no user variable refers to are released and reported."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from speedkit_jupyter.extras.data import free as freeing
from speedkit_jupyter.extras.data.free import LAST, Freed, HeldMemory, MemoryHolder

MIB = 1 << 20


@pytest.fixture(autouse=True)
def last_error() -> Iterator[None]:
    before = {name: vars(sys).pop(name) for name in LAST if hasattr(sys, name)}
    yield
    for name in LAST:
        vars(sys).pop(name, None)
    vars(sys).update(before)


def fails(x: torch.Tensor) -> None:
    hidden = x.repeat(2, 1)
    raise RuntimeError("out of memory", len(hidden))


def remember_error(call: Callable[[], object]) -> None:
    """As Python and IPython do."""
    try:
        call()
    except Exception as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def freed(names: dict[str, Any], holders: list[MemoryHolder] | None = None) -> Freed:
    return freeing.free([freeing.last_error()] if holders is None else holders, names, [names])


def test_the_last_error_lets_go_of_what_its_frames_hold() -> None:
    x = torch.zeros(MIB // 4)
    remember_error(lambda: fails(x.view(1, -1)))
    found = freed({"x": x})
    assert [one.name for one in found.let_go] == ["the last error"]
    assert found.let_go[0].bytes == 2 * MIB
    assert not hasattr(sys, "last_traceback")
    assert not hasattr(sys, "last_value")
    remember_error(lambda: 1 / 0)  # holds nothing, and stays for the debugger
    assert freed({}).let_go == []
    assert isinstance(sys.last_value, ZeroDivisionError)


def test_what_a_name_of_the_users_holds_is_no_holders() -> None:
    x = torch.zeros(MIB)
    held = [x[:10]]
    out = MemoryHolder("Out[1]", lambda: list(held), held.clear)
    assert freed({"x": x}, [out]).let_go == []
    assert held
    assert freed({}, [out]).let_go[0].bytes == 4 * MIB
    assert not held


def test_names_are_not_touched_and_say_what_they_hold() -> None:
    net, small = nn.Linear(512, 1024), nn.Linear(4, 4)
    losses = [small(torch.ones(2, 4)).sum() for _ in range(3)]
    names = {"net": [net], "losses": losses, "small": small}
    before = dict(names)
    found = freed(names)
    assert names == before
    assert found.kept[0].what == "1024×512 float32"
    assert [(one.name, one.graphs) for one in found.kept] == [("net", 0), ("losses", 3)]
    assert "3 tensors with a graph" in repr(found)


def test_circles_that_nothing_refers_to_are_collected() -> None:
    gc.collect()
    gc.disable()
    try:
        circle: list[Any] = [torch.zeros(MIB)]
        circle.append(circle)
        gone = weakref.ref(circle[0])
        del circle
        found = freed({}, [])
    finally:
        gc.enable()
    assert gone() is None
    assert found.let_go[-1].name == "circles of objects that nothing refers to"
    assert found.let_go[-1].bytes >= 4 * MIB


def test_views_of_one_piece_of_memory_count_once() -> None:
    x = torch.zeros(MIB)
    assert freeing.size([x, x[:5], x.view(2, -1)]) == 4 * MIB
    array = np.zeros(MIB, np.float32)
    assert freeing.size([torch.from_numpy(array), array, array[:100_000]]) == 4 * MIB


def test_the_headline_says_no_less_than_what_came_back() -> None:
    held = [HeldMemory("the last error", 1 << 30, 3, "1024 float32")]
    said = repr(Freed(held, process_bytes=(18 << 30, 2 << 30))).splitlines()[0]
    assert said == "Let go of 16 GiB"
    assert repr(Freed(held, process_bytes=(2 << 30, 2 << 30))).splitlines()[0] == "Let go of 1 GiB"


def test_dead_proxies_are_passed_over() -> None:
    gone = weakref.proxy(type("Bar", (), {})())
    assert freeing.reached([[gone]]) == []
