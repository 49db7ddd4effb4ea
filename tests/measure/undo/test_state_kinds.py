"""The table of kinds, and what must not be named: `tests/benchmarks/state_kinds.py` tries all of it
with real measurements; here the rarer families, by what a measurement does to a step's state.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import io
import re
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from _kinds import KINDS, PRELUDE, Kind
from torch import nn

from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.measure.undo.kinds.objects import locks

FAMILIES = (
    "weak references", "threads and locks", "views", "exceptions", "C objects", "arrays, more",
    "names of functions and classes", "torch's objects",
    "what holds others in C", "generators that are driven", "what mirrors a file",
)  # fmt: skip
TRIED = [kind for kind in KINDS if kind.family in FAMILIES]


def picture(value: Any) -> Any:
    """Something to compare; of objects what they print."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return [(picture(key), picture(one)) for key, one in value.items()]
    return [picture(one) for one in value] if isinstance(value, list | tuple) else repr(value)


def said(step: Any) -> list[str]:
    """What is named of what two steps do, which a rewind and a return undo."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = step_of(step)
        with measured.isolated() as visit:
            for _ in range(2):
                measured.rewind()
                step()
            visit.state.restore()
    return [str(one.message) for one in caught if "put back" in str(one.message)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", TRIED, ids=[f"{one.family}: {one.name}" for one in TRIED])
@pytest.mark.filterwarnings("ignore")
def test_it_is_as_before_or_it_is_named(kind: Kind, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PRELUDE, names)
    try:
        exec(kind.before, names)
    except ModuleNotFoundError as missing:
        pytest.skip(f"without {missing.name}")
    before = picture(eval(kind.probe, names))
    exec(f"model, optimizer, x = fresh()\n{kind.before}", names)  # some probes use it up
    assigned = [n for n in ("n", "t", "a") if n in compile(kind.step, "", "exec").co_names]
    rebinds = f"    global {', '.join(assigned)}\n" if assigned else ""
    exec(f"def step():\n{rebinds}    {kind.step}", names)
    words = said(names["step"])
    assert picture(eval(kind.probe, names)) == before or words


def test_what_a_partial_holds_is_put_back_unnamed_and_stays_the_same_object() -> None:
    lists: list[Any] = [[] for _ in range(3)]
    inner = functools.partial(list.extend, lists[0])
    calls = [
        inner,
        functools.partial(inner),
        functools.partial(lambda a, b: b.append(a), b=lists[1]),
    ]
    calls.append(functools.partial(lists[2].append))

    def step() -> None:
        for one in calls:
            one([1])

    assert said(step) == []
    assert lists == [[], [], []]
    assert inner.args[0] is lists[0]
    assert calls[2].keywords["b"] is lists[1]


def test_memory_is_put_back_through_a_pointer_whose_class_a_library_made_first() -> None:
    made: dict[str, Any] = {"__name__": "multiprocessing.somewhere"}
    exec("import ctypes\nclass Own(ctypes.Structure):\n    _fields_ = [('n', ctypes.c_int)]", made)
    exec("one = Own(3)\npointer = ctypes.POINTER(Own)(one)", made)
    pointer = made["pointer"]

    def step() -> None:
        pointer.contents.n += 1

    said(step)
    assert made["one"].n == 3


class Base(abc.ABC):
    """An abstract trainer."""

    @abc.abstractmethod
    def run(self) -> None:
        """One step."""


class Trainer(Base):
    """What trainers hold beside a model."""

    lock = threading.Lock()

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler, self.ready = torch.amp.GradScaler("cpu"), threading.Event()
        self.history: Any = collections.defaultdict(list)
        self.loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4, shuffle=True)
        self.sizes = collections.namedtuple("Sizes", "first last")(1, 2)

    def run(self) -> None:
        """One epoch."""
        for batch in self.loader:
            with self.lock:
                loss = self.model(batch).sum()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.history["loss"].append(loss.item())
        print(self.sizes.first, file=sys.stdout)


def test_nothing_is_named_of_a_trainer_with_locks_an_event_and_abstract_methods() -> None:
    trainer = Trainer()
    with contextlib.redirect_stdout(io.StringIO()):
        assert said(lambda: trainer.run()) == []
    assert not trainer.history


def test_nothing_is_named_of_a_bar_and_of_pictures() -> None:
    tqdm = pytest.importorskip("tqdm")
    image = pytest.importorskip("PIL.Image").new("L", (2, 2))
    model, bar = nn.Linear(4, 2), tqdm.tqdm(total=9, file=io.StringIO())

    def step() -> None:
        pixels = torch.tensor(list(image.tobytes())).float()
        model(pixels).sum().backward()
        bar.update(1)

    assert said(step) == []
    assert bar.n == 0


def test_a_lock_that_another_threads_code_may_hold_is_named_and_left_alone() -> None:
    beside = (
        locks.others_run()
    )  # the thread that feeds an earlier test's workers may not have ended
    lock, end = threading.Lock(), threading.Event()
    other = threading.Thread(target=lambda: end.wait(60))
    other.start()
    try:
        state = State(others=[lock])
        lock.acquire()
        state.restore()
        assert lock.locked()
        assert any("others may hold it" in why for why in state.failed.values())
    finally:
        end.set()
        other.join()
    assert locks.others_run() <= beside


@pytest.mark.slow
def test_what_did_not_change_is_the_same_by_every_kind() -> None:
    for kind in TRIED:
        names: dict[str, Any] = {"__name__": "__main__"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if re.search("open|memmap|Temp|Handler|ZipFile|mbox|input", kind.before):
                continue
            try:
                exec(f"{PRELUDE}\n{kind.before}", names)
            except ModuleNotFoundError:
                continue
            state = State(others=[one for name, one in names.items() if name in ("o", "t", "a")])
            unlike = [
                type(way).__name__ for way, one, memory in state._memories
                if not way.same(one, memory)
            ]  # fmt: skip
        assert unlike == [], kind
