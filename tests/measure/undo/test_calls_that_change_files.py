"""Calls that change files without opening them are named before a step runs, and no others."""

# ruff: noqa: SIM115
# (nothing here is run)

from __future__ import annotations

import os
import pathlib
import shutil
from os import chmod as ch
from pathlib import Path
from typing import Any

import pytest

from speedkit_jupyter.measure.undo.kinds.code.spelled import Words

root = Path("nowhere")
frame: Any = None


def from_inside() -> None:
    from os import rename

    rename("a", "b")


def by_another_name() -> None:
    import shutil as s

    s.move("a", "b")


CHANGING = [
    (lambda: os.utime("x"), "os.utime"),
    (lambda: os.chmod("x", 0o600), "os.chmod"),
    (lambda: ch("x", 0o600), "os.chmod"),
    (lambda: os.unlink("x"), "os.unlink"),
    (lambda: os.remove("x"), "os.remove"),
    (lambda: os.mkdir("x"), "os.mkdir"),
    (lambda: os.makedirs("x"), "os.makedirs"),
    (lambda: os.symlink("x", "y"), "os.symlink"),
    (lambda: [os.truncate(one, 3) for one in "ab"], "os.truncate"),
    (lambda: shutil.copytree("a", "b"), "shutil.copytree"),
    (lambda: shutil.rmtree("a"), "shutil.rmtree"),
    (from_inside, "os.rename"),
    (by_another_name, "shutil.move"),
    (lambda: (root / "x").rename(root / "y"), "Path.rename"),
    (lambda: pathlib.Path("x").replace("b"), "Path.replace"),
    (lambda: Path("x").touch(exist_ok=True), "Path.touch"),
    (lambda path: path.unlink(), "Path.unlink"),
    (lambda: root.chmod(0o600), "Path.chmod"),
    (lambda: Path("x").symlink_to("y"), "Path.symlink_to"),
    (lambda: open("x", "a"), "open(…, 'a')"),
    (lambda: open(os.path.join(str(root), "x"), mode="w"), "open(…, 'w')"),
    (lambda name: open(os.path.join(name, "x"), "w", encoding="utf8"), "open(…, 'w')"),
    (lambda: open(str(root / "x"), "ab").write(b"y"), "open(…, 'ab')"),
    (lambda: root.open("wb"), "open(…, 'wb')"),
    (lambda number: os.close(number), "os.close"),
    (lambda: os.dup2(5, 6), "os.dup2"),
]
HARMLESS = [
    lambda s: (s.replace("a", "b"), os.environ["X"], Path(s.replace(" ", "_"))),
    lambda: (frame.rename(columns={"a": "b"}), os.path.join("a"), root),
    lambda: (frame.replace(1, 2).rename({"a": "b"}, axis=1), root.name),
    lambda series: series.rename("x"),
    lambda many: (many.remove(3), os.path.exists("a"), shutil.which("x")),
    lambda t: (t.copy(), t.truncate(2), "x".replace("a", "b"), os.getcwd()),
    lambda name: (open(os.path.join(name, "x")), open(f"{name}{name}", encoding="a".upper())),
    lambda batch: (open("x"), batch["a"], batch["x"], batch["w"]),
    lambda batch: (open("x", "rb").read(), batch.get("a", "x")),
    lambda: os.close(os.open("file", os.O_RDONLY)),
    lambda: [os.close(number) for number in os.pipe()],
    lambda frame: (frame.close(), os.getpid()),
]


def named(function: Any) -> list[str]:
    return Words([function]).leaves([function], [function])


@pytest.mark.parametrize(("function", "name"), CHANGING, ids=[name for _, name in CHANGING])
def test_a_call_that_changes_files_is_named(function, name):
    assert named(function) == [name]


@pytest.mark.parametrize("function", HARMLESS)
def test_others_of_the_same_name_are_not(function):
    assert named(function) == []
