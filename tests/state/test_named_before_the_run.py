"""Lasting effects are named: before the run, or before the step has them."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import StateWarning, benchmark
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.state import guard
from speedkit_jupyter.support.exceptions import StepError

pytestmark = pytest.mark.usefixtures("made_time")


def said(step: Callable[[], Any]) -> str:
    """Measure a step that does this, and return what was said."""
    model = nn.Linear(1, 1)

    def whole() -> None:
        step()
        model(torch.ones(1, 1))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        benchmark(whole, "baseline", budget_s=0.01)
    return "\n".join(str(one.message) for one in caught if one.category is StateWarning)


def generate() -> Any:
    total = 0
    while True:
        total += (yield total) or 0


DRIVEN = generate()
next(DRIVEN)
CALLS = queue.SimpleQueue()  # type: ignore[var-annotated]
STEPS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an object in C": (lambda p: CALLS.put(1), "CALLS (SimpleQueue) can't be copied"),
    "a generator that is sent to": (lambda p: DRIVEN.send(1), "DRIVEN (generator) is drawn from"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STEPS)
def test_it_is_named(kind: str, tmp_path: Path) -> None:
    do, words = STEPS[kind]
    assert words in said(lambda: do(tmp_path))


def test_what_stays_inside_the_process_is_not_named() -> None:
    for step in (lambda: print(end="", file=sys.stderr), lambda: Path(os.devnull).write_text("x")):
        assert said(step) == ""


def test_what_another_thread_trains_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends = nn.Linear(2, 2), threading.Event()

    def train() -> None:
        while not ends.is_set():
            with torch.no_grad():
                model.weight.add_(1)
            time.sleep(0.001)

    def look(_: float) -> None:
        """Wait until the other thread has made 50 steps, on a busy machine too."""
        end = model.weight._version + 50
        while model.weight._version < end and not ends.is_set():
            time.sleep(0.001)

    monkeypatch.setattr(guard, "sleep", look)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        with pytest.raises(StepError, match=r"another thread changes .*weight"):
            step_of(lambda: model(torch.ones(1, 2))).guarded().__enter__()
    finally:
        ends.set()
        thread.join()
    with step_of(lambda: model(torch.ones(1, 2))).guarded():
        pass
