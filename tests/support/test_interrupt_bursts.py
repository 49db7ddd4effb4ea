"""Ctrl-C pressed twice or three times is one wish: one KeyboardInterrupt, with all undone."""

from __future__ import annotations

import signal
import time
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.undo import guard
from speedkit_jupyter.support.interrupts import in_windows, one_in_a_row, window


def send(times: int) -> None:
    if times:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            send(times - 1)


@pytest.mark.parametrize("burst", [1, 2, 3])
def test_a_burst_arrives_once_and_what_is_undone_meanwhile_is_undone_whole(burst):
    undone = []

    @one_in_a_row
    def work() -> None:
        try:
            send(1)
        finally:
            send(burst - 1)
            undone.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert undone
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("burst", [1, 2, 3])
def test_outside_of_the_users_code_it_waits_for_it(burst):
    reached = []

    @in_windows
    def work() -> None:
        send(burst)
        reached.append("ours")
        opened = window()
        assert opened is not None
        opened.open()
        reached.append("theirs")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["ours"]


def test_where_none_of_the_users_code_follows_it_arrives_at_the_end():
    reached = []

    @in_windows
    def work() -> None:
        send(2)
        reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert window() is None


def test_who_presses_again_later_is_heard_again_although_the_first_was_swallowed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    heard = []

    @one_in_a_row
    def work() -> None:
        for second in (0.0, 0.2, 5.0):
            now[0] = second
            try:
                send(1)
            except KeyboardInterrupt:
                heard.append(second)

    work()
    assert heard == [0.0, 5.0]


class Callback(torch.autograd.Function):
    """Interrupts inside of backward."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        send(3)
        return gradient


@pytest.mark.filterwarnings("ignore::UserWarning")  # the queue can't be put back
@pytest.mark.parametrize("where", ["forward", "backward", "loader", "zero_grad"])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_wherever_it_comes_in_a_step_all_is_as_before(where, at):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = [one.detach().clone() for one in model.parameters()]
    random_state = torch.get_rng_state()
    counted: SimpleQueue[None] = SimpleQueue()  # which no benchmark puts back

    def due(here: str) -> bool:
        return here == where and counted.qsize() == at

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            send(2 if due("loader") else 0)
            return torch.ones(2)

    loader = torch.utils.data.DataLoader(Data(), batch_size=2)

    def step() -> None:
        counted.put(None)
        x = next(iter(loader))
        send(3 if due("forward") else 0)
        y = model(x)
        (Callback.apply(y) if due("backward") else y).sum().backward()
        optimizer.step()
        send(2 if due("zero_grad") else 0)
        optimizer.zero_grad()

    with pytest.raises(KeyboardInterrupt):
        benchmark(
            step,
            "baseline,fused_optimizer,bf16",
            model=model,
            optimizer=optimizer,
            budget_s=0.05,
        )
    assert guard.in_progress() is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(one.grad is None for one in model.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)
