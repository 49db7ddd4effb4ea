"""Ctrl-C waits while state is half changed; several presses in a row interrupt once."""

import signal

import pytest

from speedkit_jupyter.torchglue import interrupts


def send(times: int) -> None:
    if times:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            send(times - 1)


def test_an_interrupt_arrives_after_the_block_and_the_handler_is_there_again():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts.interrupts_delayed():  # noqa: PT012
        send(2)
        with interrupts.interrupts_delayed():
            send(1)
        reached.append("between")
    assert reached == ["between"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("burst", [1, 2, 3])
def test_outside_of_the_users_code_it_waits_for_it_and_arrives_once(burst):
    reached = []

    @interrupts.interruptible_in_users_code
    def work() -> None:
        send(burst)
        reached.append("ours")
        try:
            interrupts.in_a_window(lambda: reached.append("theirs"))
        finally:
            send(burst)
            reached.append("undone")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["ours", "undone"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_users_code_swallows_is_heard_again_in_the_next_window():
    heard = []

    def swallowing(number: int) -> None:
        try:
            send(1)
        except KeyboardInterrupt:
            heard.append(number)

    @interrupts.interruptible_in_users_code
    def work() -> None:
        for number in range(3):
            interrupts.in_a_window(lambda number=number: swallowing(number))

    work()
    assert heard == [0, 1, 2]
