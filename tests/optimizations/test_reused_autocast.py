"""A block of autocast that is entered again does what a new one of torch's would do."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter.optimizations.autocast.reused import Autocasts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OFF = {"off": partial(torch.autocast, "cpu", enabled=False)}


def state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype,
    )


def states(make: dict[str, Any], words: list[str]) -> list[Any]:
    """After each step of a program: a word enters such a block, `out` leaves the innermost one."""
    seen, blocks = [state()], list[Any]()
    with ExitStack() as stack:
        stack.callback(torch.set_autocast_cache_enabled, True)
        for word in words:
            if word == "cache":
                torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())
            elif word != "out":
                blocks.append(make[word]())
                blocks[-1].__enter__()
            elif blocks:
                blocks.pop().__exit__(None, None, None)
            seen.append(state())
        while blocks:
            blocks.pop().__exit__(None, None, None)
            seen.append(state())
    return seen


@given(st.lists(st.sampled_from([*DTYPES, "off", "out", "out", "cache"]), max_size=12))
def test_any_program_of_blocks_leaves_the_same_states(words):
    torchs = {word: partial(torch.autocast, "cpu", dtype=one) for word, one in DTYPES.items()} | OFF
    ours = {word: Autocasts("cpu", one) for word, one in DTYPES.items()} | OFF
    assert states(ours, words) == states(torchs, words) == states(ours, words)


def test_a_block_that_was_left_is_used_again_and_an_open_one_is_not():
    make = Autocasts("cpu", torch.bfloat16)
    with make() as first:
        with make() as second:
            assert second is not first
        with make() as third:
            assert third is second
    with pytest.raises(ZeroDivisionError), make():
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")
    assert {id(make()), id(make())} == {id(first), id(second)}


def test_threads_have_blocks_of_their_own():
    make, wrong = Autocasts("cpu", torch.bfloat16), []
    meet = threading.Barrier(4, timeout=30)

    def work() -> None:
        for _ in range(50):
            with make():
                if not torch.is_autocast_enabled("cpu"):
                    wrong.append("off inside")
            if torch.is_autocast_enabled("cpu"):
                wrong.append("on outside")
        meet.wait()
        with make() as block:
            inside.append(id(block))
            meet.wait()

    inside: list[int] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(set(inside)) == 4
