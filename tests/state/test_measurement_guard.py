"""The measurement guard refuses or restores steps, and shows each of their warnings once."""

import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from training import training_step

from speedkit_jupyter import StateWarning, benchmark, tune_loader
from speedkit_jupyter.catalog.model_changes.tensors import has_views
from speedkit_jupyter.state import measurement_guard
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.support.exceptions import StepError


def test_what_another_thread_trains_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends = nn.Linear(2, 2), threading.Event()

    def train() -> None:
        while not ends.is_set():
            with torch.no_grad():
                model.weight.add_(1)
            time.sleep(0.001)

    def look(_: float) -> None:
        """Wait until the other thread has made 50 steps, even on a busy machine."""
        end = model.weight._version + 50
        while model.weight._version < end and not ends.is_set():
            time.sleep(0.001)

    monkeypatch.setattr(measurement_guard, "sleep", look)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        with pytest.raises(StepError, match=r"another thread changes .*weight"):
            step_of(lambda: model(torch.ones(1, 2))).guarded().__enter__()
    finally:
        ends.set()
        thread.join()
    with step_of(lambda: model(torch.ones(1, 2))).guarded() as kept:
        assert has_views(model.weight)
    assert not has_views(model.weight), kept  # even while `kept` is alive


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("by", [fully_shard, nn.parallel.DistributedDataParallel, nn.DataParallel])
def test_a_step_of_a_wrapped_model_is_measured_and_put_back(by):
    net = by(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    optimizer, x = torch.optim.AdamW(net.parameters()), torch.randn(8, 8)
    step = training_step(optimizer, lambda: net(x).square().mean())

    def state() -> str:
        return str([net.state_dict(), optimizer.state_dict(), torch.get_rng_state().tolist()])

    step()
    before = state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        with step_of(step).guarded() as guard:
            for _ in range(3):
                step()
                guard.state.restore()
    assert state() == before
    assert [str(one.message) for one in caught if one.category is StateWarning] == []
    step()
    assert state() != before


NET = nn.Linear(4, 2)


class Warns(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        warnings.warn("a broken picture", stacklevel=1)
        return torch.full((4,), float(index))


def step(x: torch.Tensor) -> None:
    warnings.warn("of the step", stacklevel=1)
    NET(x).sum().backward()


@pytest.mark.real_time
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "measure",
    [
        lambda: tune_loader(DataLoader(Warns(), batch_size=8), step, budget_s=1),
        lambda: benchmark(lambda: step(torch.ones(2, 4)), budget_s=0.5),
    ],
)
def test_a_warning_shows_once(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, *more: shown.append(str(text)))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        measure()
    mine = [text for text in shown if "broken" in text or "of the step" in text]
    assert sorted(set(mine)) == sorted(mine)
    assert "of the step" in mine
