"""Test batch_sizes(), which times a step with batches of many sizes and restores all state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_time import install
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import everything

from speedkit_jupyter import StepError, batch_sizes
from speedkit_jupyter.extras.data import batch_sizes as sweeping
from speedkit_jupyter.extras.data.batch_report import BatchSizes, Size
from speedkit_jupyter.extras.data.batch_sizes import is_out_of_memory, resized


class Training:
    """A model with its optimizer, whose step runs out of memory with more than `fits` rows."""

    def __init__(self, width: int = 16) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.fits = 10_000

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        assert len(x) == len(y)
        self.optimizer.zero_grad()
        F.cross_entropy(self.net(x), y).backward()
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        self.optimizer.step()


def batch(number: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(number, 6), torch.randint(0, 3, (number,))


def loader_of(x, y) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=len(x))


def goes_through_a_loader(training, x, y):
    loader = loader_of(x, y)

    def epoch() -> None:
        for batch in loader:
            training.step(*batch)

    return epoch, {"loader": loader}


STEPS: dict[str, Callable[..., tuple[Callable[..., Any], dict[str, Any]]]] = {
    "takes a batch": lambda training, x, y: (training.step, {"batch": (x, y)}),
    "takes one of a loader": lambda training, x, y: (training.step, {"loader": loader_of(x, y)}),
    "goes through a loader": goes_through_a_loader,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Install a clock that each reading advances; return the set of batch sizes made so far."""
    install(monkeypatch, tick_s=0.02)
    sizes, original = set[int](), sweeping.resized
    monkeypatch.setattr(sweeping, "resized", lambda x, n, *of: sizes.add(n) or original(x, n, *of))
    return sizes


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_gets_every_size_and_everything_is_put_back(kind: str, made: set[int]) -> None:
    training = Training()
    step, given = STEPS[kind](training, *batch())
    before = everything(training.net, training.optimizer)

    found = batch_sizes(step, **given, sizes=(4, 64), budget_s=2.0)
    assert made == {12, 4, 8, 16, 32, 64}
    assert [row["batch"] for row in found.rows()] == [4, 8, 16, 32, 64]
    assert all(row["samples_per_s"] > 0 for row in found.rows())
    peaks = [row["peak_bytes"] for row in found.rows()]
    assert peaks == sorted(set(peaks))
    assert found.now == 12
    assert everything(training.net, training.optimizer) == before


@pytest.mark.usefixtures("made")
def test_running_out_of_memory_is_survived_and_said() -> None:
    training = Training()
    training.fits, given = 40, batch()
    before = everything(training.net, training.optimizer)
    found = batch_sizes(training.step, given, sizes=(8, 1024), budget_s=2.0)

    notes = {row["batch"]: row["note"] for row in found.rows()}
    assert notes[32] == ""
    assert "out of memory" in notes[64]
    assert max(notes) == 64
    assert found.largest == 32
    assert everything(training.net, training.optimizer) == before


def test_what_would_not_fit_is_not_even_tried(made, monkeypatch):
    monkeypatch.setattr(sweeping, "free_bytes", lambda device: 10_000_000)
    found = batch_sizes(Training(width=1024).step, batch(), sizes=(128, 4096), budget_s=3.0)
    tried = max(made)
    refused = next(row for row in found.rows() if row["note"])
    assert refused["batch"] == 2 * tried
    assert "would not fit" in refused["note"]
    assert found.largest == tried


@pytest.mark.usefixtures("made")
def test_a_batch_alone_in_a_tuple_is_one_argument() -> None:
    net = nn.Linear(6, 3)
    found = batch_sizes(lambda x: net(x), (torch.randn(64, 6),), sizes=(8, 16), budget_s=1.0)
    assert (found.now, [size.number for size in found.measured]) == (64, [8, 16])


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no batch": (lambda: batch_sizes(lambda x: None), "takes a batch: give one"),
    "downwards": (lambda: batch_sizes(lambda x: 0, torch.ones(3), sizes=(8, 4)), "from 8 to 4"),
    "other": (lambda: batch_sizes(lambda: 0, loader=DataLoader([1, 2])), "never goes through this"),
    "no argument": (lambda: batch_sizes(lambda: None, torch.ones(3)), "takes no batch"),
    "half": (lambda: batch_sizes(lambda x: 0, torch.ones(3), sizes=(1.5, 4)), "whole number"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "words"), ERRORS.values(), ids=ERRORS)
def test_what_cant_be_done_is_said_in_one_line(call, words) -> None:
    with pytest.raises(StepError, match=words):
        call()


def found_with(rates: list[float]) -> BatchSizes:
    sizes = [Size(8 * 2**at, first_s=1.0) for at in range(len(rates))]
    for size, rate in zip(sizes, rates, strict=True):
        size.times_s = [size.number / rate] * 9
    return BatchSizes("step", 8, sizes)


@pytest.mark.parametrize(("rates", "rounds"), [([6380, 36], 1), ([100], 9)])
def test_one_call_or_one_size_gives_no_winner(rates: list[float], rounds: int) -> None:
    found = found_with(rates)
    for size in found.sizes:
        size.times_s = size.times_s[:rounds]
    assert found.to_dict()["fastest"] is None
    assert all(row["low"] is None for row in found.rows()) == (rounds == 1)


def test_a_size_wins_only_where_those_that_look_slower_are_proven_so() -> None:
    found = found_with([100, 180, 290, 298, 300, 280])
    assert (found.knee.number, found.fastest.number) == (32, 128)
    found = found_with([100, 110])
    assert found.is_proven
    found.sizes[0].times_s[:4] = [found.sizes[0].number / 120] * 4
    assert found.fastest.number == 16
    assert not found.is_proven


def test_samples_are_repeated_or_left_out_and_the_layout_stays() -> None:
    pictures = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert resized(pictures, 5).is_contiguous(memory_format=torch.channels_last)
    x = torch.arange(6.0).view(3, 2)
    assert resized(x, 5).tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert resized([x, {"y": x[:, 0]}, ["a", "b", "c"], 7], 2)[1]["y"].tolist() == [0, 2]
    assert resized([x, ["a", "b", "c"]], 4)[1] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) == is_so
