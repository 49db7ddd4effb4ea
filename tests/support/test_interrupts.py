"""Ctrl-C held back while state is half changed; pressed twice or three times it is one wish."""

from __future__ import annotations

import signal
from queue import SimpleQueue

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.measure.undo import guard
from speedkit_jupyter.support.interrupts import held_back, in_windows, window


def send(times: int) -> None:
    if times:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            send(times - 1)


def test_an_interrupt_arrives_after_the_block_and_the_handler_is_there_again():
    reached = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        send(2)
        with held_back():
            send(1)
        reached.append("between")
    assert reached == ["between"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("burst", [1, 2, 3])
def test_outside_of_the_users_code_it_waits_for_it_and_arrives_once(burst):
    reached = []

    @in_windows
    def work() -> None:
        send(burst)
        reached.append("ours")
        gate = window()
        assert gate is not None
        try:
            gate.open()
            reached.append("theirs")
        finally:
            send(burst)
            reached.append("undone")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["ours", "undone"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_users_code_swallows_is_heard_again_in_the_next_window():
    heard = []

    @in_windows
    def work() -> None:
        for number in range(3):
            gate = window()
            gate.open()
            try:
                send(1)
            except KeyboardInterrupt:
                heard.append(number)
            gate.close()

    work()
    assert heard == [0, 1, 2]


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
