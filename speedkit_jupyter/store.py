"""What is kept between sessions: an embedded SQLite database in the user's data folder.

Each write is one transaction with SQLite's rollback journal (which, unlike a write-ahead log, also
works on network folders): two kernels may write at once, and a process that is killed while it
writes loses nothing that was saved before.
"""

from __future__ import annotations

import datetime
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedkit_jupyter.exceptions import SpeedKitError

# How results and plans are found, not the package's version: it is raised where what an earlier
# engine found can't be trusted or compared. Before 2 it was not written down.
ENGINE = 2
# A folder of the user's choice in place of the platform's own.
FOLDER = "SPEEDKIT_DATA"
# Another kernel's write takes milliseconds; longer than this means that something hangs.
PATIENCE_S = 30.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    saved_at TEXT NOT NULL,
    result TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS plans (
    id INTEGER PRIMARY KEY,
    setting TEXT NOT NULL,
    task TEXT NOT NULL,
    learned_at TEXT NOT NULL,
    plan TEXT NOT NULL,
    UNIQUE (setting, task)
);
"""


@dataclass(frozen=True)
class Saved:
    """A result as it was kept; `saved_at` in UTC, `result` as its `to_dict` gave it."""

    number: int
    name: str
    saved_at: datetime.datetime
    result: Mapping[str, Any]

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier engine found it."""
        return self.result.get("engine") != ENGINE


@dataclass(frozen=True)
class Learned:
    """A plan that was proven, as it was kept.

    `setting` stands for model, optimizers, machine and torch version; `task` for the shapes that
    went in and what was aimed at.
    """

    number: int
    setting: str
    task: str
    learned_at: datetime.datetime
    plan: Mapping[str, Any]

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier engine found it: it is listed, and not used."""
        return self.plan.get("engine") != ENGINE


def folder() -> Path:
    """Where the database lies."""
    import platformdirs

    chosen = os.environ.get(FOLDER)
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("speedkit", False)


def save(name: str, result: Mapping[str, Any]) -> None:
    """Keep a result under a name; earlier ones of that name stay. Raises SpeedKitError."""
    with _database() as database:
        database.execute(
            "INSERT INTO results (name, saved_at, result) VALUES (?, ?, ?)",
            (name, _now(), json.dumps({**result, "engine": ENGINE})),
        )


def saved(name: str | None = None) -> list[Saved]:
    """What was kept, oldest first: all, or that of one name. Raises SpeedKitError."""
    if not (folder() / "speedkit.sqlite").exists():
        return []
    where, values = ("", ()) if name is None else ("WHERE name = ?", (name,))
    with _database() as database:
        query = f"SELECT id, name, saved_at, result FROM results {where} ORDER BY id"
        rows = database.execute(query, values).fetchall()
    return [
        Saved(number, kept, datetime.datetime.fromisoformat(when), json.loads(text))
        for number, kept, when, text in rows
    ]


def forget(name: str) -> int:
    """Delete everything of that name; returns how many results there were."""
    with _database() as database:
        return database.execute("DELETE FROM results WHERE name = ?", (name,)).rowcount


def learn(setting: str, task: str, plan: Mapping[str, Any]) -> None:
    """Keep a plan in place of an earlier one for the same. Raises SpeedKitError."""
    with _database() as database:
        database.execute(
            "INSERT OR REPLACE INTO plans (setting, task, learned_at, plan) VALUES (?, ?, ?, ?)",
            (setting, task, _now(), json.dumps({**plan, "engine": ENGINE})),
        )


def learned(setting: str | None = None) -> list[Learned]:
    """The plans that were kept, oldest first: all, or those of one setting."""
    if not (folder() / "speedkit.sqlite").exists():
        return []
    where, values = ("", ()) if setting is None else ("WHERE setting = ?", (setting,))
    with _database() as database:
        query = f"SELECT id, setting, task, learned_at, plan FROM plans {where} ORDER BY id"
        rows = database.execute(query, values).fetchall()
    return [
        Learned(number, its, task, datetime.datetime.fromisoformat(when), json.loads(text))
        for number, its, task, when, text in rows
    ]


def unlearn(numbers: Iterable[int]) -> int:
    """Delete these plans; returns how many there were."""
    with _database() as database:
        return sum(
            database.execute("DELETE FROM plans WHERE id = ?", (number,)).rowcount
            for number in numbers
        )


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """A connection and its transaction: all of the block is written, or nothing."""
    file = folder() / "speedkit.sqlite"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(file, timeout=PATIENCE_S)
        try:
            with connection:
                _create_tables(connection)
                yield connection
        finally:
            connection.close()
    except (sqlite3.Error, OSError) as error:
        hint = f"{FOLDER} can name another folder"
        raise SpeedKitError(f"the history in {file} can't be used: {error} ({hint})") from None


def _create_tables(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";"):  # `executescript` would end the transaction
        connection.execute(statement)
