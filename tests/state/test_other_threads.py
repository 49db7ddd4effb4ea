"""A model that another thread trains is refused."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.state import guard
from speedkit_jupyter.support.exceptions import StepError

pytestmark = pytest.mark.usefixtures("made_time")


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
