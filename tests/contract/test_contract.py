"""docs/contract.md names tests that exist, and every case that it lists is tried."""

from __future__ import annotations

import re
from pathlib import Path

from contract.test_put_back import CASES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/contract.md").read_text(encoding="utf-8")


def test_each_named_test_file_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) >= 6
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_page_lists_what_is_put_back_and_nothing_else() -> None:
    part = PAGE.partition("## Put back")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z ]+) \|", part, re.MULTILINE)[1:] == list(CASES)
