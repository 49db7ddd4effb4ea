"""Whose lines are the user's."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter.support.source_lines import is_users


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
