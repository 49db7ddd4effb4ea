"""tune_loader() times a loader with the user's step and chooses its settings in a race."""

import itertools
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from made_time import MadeTime
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training import everything

from speedkit_jupyter import StepError, batch_sizes, tune_loader
from speedkit_jupyter.catalog.model_changes.tensors import has_views
from speedkit_jupyter.extras.data import loader_settings
from speedkit_jupyter.extras.data.loader_race import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    LoaderRace,
    LoaderWay,
)
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings


class Slow(Dataset[Any]):
    """A data set that waits `wait_s` seconds for each sample, like one on a slow disk."""

    def __init__(self, length: int = 32, wait_s: float = 0.0) -> None:
        self.length, self.wait_s = length, wait_s
        self.drawn = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.drawn += 1
        time.sleep(self.wait_s)
        return torch.full((4,), float(index)), index % 2


def trained() -> tuple[nn.Module, Callable[..., object]]:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return net, step


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = threading.active_count()
    yield
    assert multiprocessing.active_children() == []
    until_s = time.monotonic() + 60  # a queue's own thread ends a moment after the queue
    while threading.active_count() > before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_everything_is_put_back_and_no_worker_is_left() -> None:
    data = Slow()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    net, step = trained()
    before = everything(net)
    fast = tune_loader(loader, step, budget_s=1.0)
    assert type(fast) is DataLoader
    assert ForkingPickler.dumps(fast.tuning)
    assert not any(map(has_views, net.parameters()))  # the result keeps no copy of the state
    assert everything(net) == before
    assert data.drawn == 0
    assert loader.num_workers == 0
    assert loader._iterator is None


class Broken(Slow):
    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"no file for {index}")


def test_the_line_for_no_workers_resets_what_only_workers_take() -> None:
    loader = DataLoader(Slow(), num_workers=2, timeout=9, persistent_workers=True)
    line = loader_settings.source(loader, LoaderSettings(), "loader")
    assert not loader_settings.rebuilt(loader, LoaderSettings()).timeout
    made = eval(line.removeprefix("loader = ").replace("…", "*[Slow()]"))
    assert (made.num_workers, made.timeout, made.persistent_workers) == (0, 0, False)


def test_what_cant_be_measured_is_said_in_one_line() -> None:
    with pytest.raises(StepError, match="never goes through this loader"):
        tune_loader(DataLoader(Slow()), lambda: None, budget_s=1.0)
    with pytest.raises(StepError, match=r"loader must be a torch.utils.data.DataLoader, not list"):
        tune_loader([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no file for 0"):  # the data set's own error
        tune_loader(DataLoader(Broken()), budget_s=1.0)


RUNS: dict[str, Callable[[Any], object]] = {
    "loader": lambda step: tune_loader(DataLoader(Slow(), batch_size=4), step, budget_s=600.0),
    "batches": lambda step: batch_sizes(
        step, (torch.ones(8, 4), torch.zeros(8).long()), sizes=(4, 256), budget_s=600.0
    ),
}


@pytest.mark.real_time
@pytest.mark.parametrize("name", RUNS)
def test_ctrl_c_ends_it_with_everything_put_back(name: str) -> None:
    net, train = trained()
    before = everything(net)
    calls: SimpleQueue[int] = SimpleQueue()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(x, y)
        calls.put(1)
        if calls.qsize() == 12:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        RUNS[name](step)
    assert calls.qsize() == 12
    assert everything(net) == before


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(64.0).view(16, 4))


def test_an_iterable_data_set_keeps_its_workers() -> None:
    tuning = tune_loader(DataLoader(Rows(), batch_size=2), budget_s=1.0).tuning
    assert [row["settings"] for row in tuning.rows()] == ["0 workers"]
    assert "iterable" in tuning.declined
    assert tuning.epoch == 8


@pytest.mark.parametrize("left_after", [None, 5])
def test_a_short_call_is_timed_whole_and_every_way_gets_the_same_batches(tmp_path, left_after):
    loader = DataLoader(Slow(), batch_size=4, shuffle=True)
    file = tmp_path / "drawn"

    def epoch() -> None:
        found = [batch[0][:, 0].tolist() for batch in itertools.islice(loader, left_after)]
        with file.open("a") as notes:
            notes.write(f"{len(found)} {found}\n")

    tuning = tune_loader(loader, epoch, budget_s=1.0).tuning
    assert tuning.epoch == (left_after or 8)
    lines = [line.split(" ", 1) for line in file.read_text().splitlines()]
    whole = [batches for number, batches in lines if int(number) == (left_after or 8)]
    # Each block restores the random state before its first call, so it repeats the shuffled order.
    most_often = max(map(whole.count, set(whole)))
    assert most_often >= sum(len(one.times_s) for one in tuning.race.ways)


class Lengths(Dataset[Any]):
    """Sequences of 1 to 100 elements, so that steps take different times, up to 30 ms."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1 + index * 37 % 100)


LOOPS: dict[str, Callable[[DataLoader[Any]], list[Any]]] = {
    "an epoch, then one batch": lambda loader: [*loader, next(iter(loader))],
    "six": lambda loader: [next(it) for it in [iter(loader)] for _ in range(6)],
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_timed_however_it_goes_through_its_loader(name: str, made_time: MadeTime) -> None:
    loader = DataLoader(Slow(), batch_size=4)

    def step() -> None:
        made_time.sleep(0.015 * len(LOOPS[name](loader)))

    tuning = tune_loader(loader, step, budget_s=2.0).tuning
    assert tuning.epoch == (6 if name == "six" else 8)
    assert 0.0 < tuning.race.own.waiting < 0.5
    assert tuning.race.own.batch_s > 0.01  # a batch takes 15 ms: the timed loop was not empty


def test_of_a_long_epoch_every_candidate_is_timed_on_the_same_batches(made_time: MadeTime) -> None:
    """The times of batches differ, so candidates are comparable only on the same batches."""
    pad = nn.utils.rnn.pad_sequence
    loader = DataLoader(Lengths(), batch_size=2, shuffle=True, collate_fn=pad)
    tuning = tune_loader(loader, lambda x: made_time.sleep(len(x) * 3e-4), budget_s=4.0).tuning
    assert tuning.epoch == 10_000
    ratios = [row["ratio"] for row in tuning.rows()[1:] if row["ratio"] is not None]
    assert ratios
    assert max(ratios) <= 1.02 / (1 - max(tuning.race.own.waiting, 0.02))


def raced(times: Mapping[LoaderWay, float], waits: Mapping[LoaderWay, float] = {}) -> LoaderRace:
    """Race loaders whose times vary by 2 % until the race is settled; return the race."""
    wavering = cycle((0.98, 1.0, 1.02, 0.99, 1.01))

    def block(one: LoaderWay, number: int) -> tuple[float, float]:
        if times[one] < 0:
            raise RuntimeError("DataLoader worker exited\nwith: a bus error")
        waver, wait_s = next(wavering), waits.get(one, times[one])
        return (times[one] - wait_s) * waver, wait_s * waver

    race = LoaderRace(list(times))
    while len(race.racing) > 1 and not race.is_settled():
        list(race.round(race.racing, block))
    return race


def workers(number: int, **more: Any) -> LoaderWay:
    return LoaderWay(LoaderSettings(number, **more))


@pytest.mark.parametrize(("time", "is_taken"), [(0.75, True), (0.99, False), (1.2, False)])
def test_another_one_is_taken_where_it_is_proven_faster_by_enough(time, is_taken) -> None:
    own, one, two = workers(0), workers(1), workers(2)
    race = raced({own: 1.0, one: 1.1, two: time}, waits={own: 0.5, two: time - 0.5})
    assert race.proven() is (two if is_taken else own)


def test_what_is_clearly_slower_leaves_after_few_rounds() -> None:
    own, slow, two = workers(0), workers(1), workers(2)
    race = raced({own: 1.0, slow: 3.0, two: 0.9})
    assert slow.why_out == "slower than the best, dropped"
    assert len(slow.times_s) < LEAST_ROUNDS <= len(two.times_s) <= race.rounds <= MOST_ROUNDS


def test_what_fails_leaves_with_its_last_line_and_the_users_own_error_is_the_users() -> None:
    own, broken = workers(0), workers(1)
    race = raced({own: 1.0, broken: -1.0})
    assert broken.why_out == "RuntimeError: with: a bus error"
    assert race.fastest is own
    with pytest.raises(RuntimeError, match="bus error"):
        raced({workers(0): -1.0, workers(1): 1.0})


@pytest.mark.parametrize(("before", "now", "least", "most"), [(0, 2, 1.05, 1.2), (2, 0, 1.5, 3)])
def test_a_gain_is_no_more_than_the_waiting_that_is_removed(before, now, least, most) -> None:
    """Fewer workers may gain more, because they leave more cores to the step."""
    own, one = workers(before), workers(now)
    ratio = raced({own: 1.0, one: 0.5}, waits={own: 0.1, one: 0.0}).ratio(one)
    assert ratio is not None
    assert least < ratio.low <= ratio.high < most


def test_workers_that_are_stuck_later_are_waited_for_once() -> None:
    own, one, two = workers(0), workers(1), workers(2)

    def block(way: LoaderWay, number: int) -> tuple[float, float]:
        if way.settings.num_workers:
            raise RuntimeError("DataLoader timed out after 3.0 seconds")
        return 1.0, 0.0

    race = LoaderRace([own, one, two])
    list(race.round(race.racing, block))
    words = sorted([one.why_out, two.why_out])
    assert words == [
        "RuntimeError: DataLoader timed out after 3.0 seconds",
        "not tried: other workers gave no batch",
    ]
    assert race.racing == [own]
