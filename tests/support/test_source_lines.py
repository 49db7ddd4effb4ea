"""Whose lines are the user's."""

from __future__ import annotations

import linecache
from types import SimpleNamespace

import IPython
import pytest
import torch

from speedkit_jupyter.support.source_lines import Spot, is_users, place


@pytest.mark.parametrize(
    "where", ["there/site-packages/torch", "there/dist-packages/more", "src/torch"]
)
def test_libraries_are_no_lines_of_the_users_wherever_they_are(where, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__path__", [str(tmp_path / "src" / "torch")])
    is_users.cache_clear()
    try:
        assert not is_users(str(tmp_path / where / "nn" / "functional.py"))
        assert is_users(str(tmp_path / "src" / "train.py"))
    finally:
        is_users.cache_clear()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("<ipython-input-3-47971f8a1956>", "cell 3, line 2"),  # IPython 7 in a terminal
        ("/tmp/ipykernel_1/123.py", "cell 2, line 2"),  # IPython 7 under ipykernel
        ("/home/user/train.py", "train.py, line 2"),
    ],
)
def test_a_line_of_a_cell_is_named_by_the_cells_number_in_ipython_7(file, expected, monkeypatch):
    code = "x = 1\ny = x.item()"
    history = SimpleNamespace(input_hist_parsed=["", "x = 1", code, "print(x)"])
    shell = SimpleNamespace(compile=object(), history_manager=history)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    lines = [f"{line}\n" for line in code.splitlines()]
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/123.py", (20, None, lines, "123.py"))
    assert place(Spot(file, 2)) == expected
