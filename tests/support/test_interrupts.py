"""Ctrl-C held back while state is half changed."""

from __future__ import annotations

import signal
import threading

import pytest

from speedkit_jupyter.support.interrupts import held_back


def test_an_interrupt_arrives_after_the_block():
    reached = False
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached


def test_nested_blocks_deliver_after_the_outermost():
    steps = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        with held_back():
            signal.raise_signal(signal.SIGINT)
        steps.append("between")
    assert steps == ["between"]


def test_the_handler_that_was_there_is_there_again():
    before = signal.getsignal(signal.SIGINT)
    with held_back():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_is_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
