"""The SQLite database in the user's data folder: learned plans, measured rates, kernel searches.

Each write is one transaction with SQLite's rollback journal, which, unlike a write-ahead log, also
works on network folders. Several notebooks may write at once, and may be killed while writing.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from speedkit_jupyter.support import START, arguments, messages
from speedkit_jupyter.support.exceptions import SpeedKitError

# Environment variable with the data folder; by default the platform's folder for user data.
FOLDER = "SPEEDKIT_DATA"
FILE = "speedkit.sqlite"
# Seconds to wait for another process's lock; a write takes milliseconds.
PATIENCE_S = 5.0
# Version of the measuring engine, not of the package: increased when entries of earlier engines
# can't be trusted or compared.
ENGINE = 4
# Required keys by kind of entry. An entry that lacks a key is left out, with a note.
PARTS = {
    "plan": {
        "name", "values", "parameters", "device", "model", "inputs", "trains", "speedup", "low",
        "high",
    },
}  # fmt: skip
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, task TEXT NOT NULL,
    saved_at TEXT NOT NULL, value TEXT NOT NULL
)
"""


@dataclass(frozen=True)
class Kept:
    """An entry of the store; `saved_at` is in UTC.

    A plan's name is a digest of models, machine, threads, torch version and custom code. `task`
    is JSON: the first model's class, inputs, optimizers, whether to train, options left unchanged.
    """

    number: int
    name: str
    task: str
    saved_at: datetime
    value: Mapping[str, Any]

    @property
    def is_earlier(self) -> bool:
        """Return whether another engine version found the plan; it is then listed, not used."""
        return self.value.get("engine") != ENGINE


def folder() -> Path:
    """Return the data folder; it may not exist. Raises SpeedKitError without a home folder."""
    import platformdirs

    chosen = os.environ.get(FOLDER)
    try:
        usual = platformdirs.user_data_path
        return Path(START, Path(chosen).expanduser() if chosen else usual("speedkit", False))
    except RuntimeError as error:
        why = f"{error} ({FOLDER} can name another folder)"
        raise SpeedKitError(f"the data folder can't be used: {why}") from None


def make(folder: Path) -> None:
    """Create a folder and its missing parents, accessible to the owner only. Raises OSError."""
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(0o700, exist_ok=True)


def learn(setting: str, task: str, plan: Mapping[str, Any]) -> None:
    """Store a plan; replace one with the same name `setting` and task. Raises SpeedKitError."""
    keep("plan", setting, task, {**plan, "engine": ENGINE})


def learned(setting: str | None = None) -> list[Kept]:
    """Return the learned plans with the name `setting`, or all learned plans; see `kept`."""
    return kept("plan", setting)


def unlearn(numbers: Iterable[int] | None) -> int:
    """Delete the plans with these ids (None: all plans); return the count. Raises SpeedKitError."""
    with _database(writes=True) as database:
        if numbers is None:
            return database.execute("DELETE FROM entries WHERE kind = 'plan'").rowcount
        delete = "DELETE FROM entries WHERE kind = 'plan' AND id = ?"
        return sum(database.execute(delete, (number,)).rowcount for number in numbers)


def keep(kind: str, name: str, task: str, value: Mapping[str, Any]) -> None:
    """Store an entry, in place of an earlier entry of this kind, name and task.

    The kinds are `plan`, `rates`, and the autotuner's `search` and `ranking`. Raises SpeedKitError.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    row = (kind, name, task, now, json.dumps(value))
    with _database(writes=True) as database:
        database.execute("DELETE FROM entries WHERE (kind, name, task) = (?, ?, ?)", row[:3])
        columns = "entries (kind, name, task, saved_at, value)"
        database.execute(f"INSERT INTO {columns} VALUES (?, ?, ?, ?, ?)", row)


def newest(kind: str, name: str) -> Mapping[str, Any] | None:
    """Return the newest value of a kind and name; None without an entry. Raises SpeedKitError."""
    return next((row.value for row in reversed(kept(kind, name))), None)


def kept(kind: str, name: str | None = None) -> list[Kept]:
    """Return entries of a kind and `name` (None: any), oldest first. Raises SpeedKitError."""
    try:
        file = folder() / FILE
    except SpeedKitError as error:
        _note_once(f"plans can't be stored: {error}")
        return []
    with suppress(OSError):  # `_database` reports the error
        if not file.exists():
            return []
    query = "SELECT id, name, task, saved_at, value FROM entries"
    where = "WHERE kind = ? AND name = ifnull(?, name) ORDER BY id"
    with _database() as database:
        rows = database.execute(f"{query} {where}", (kind, name)).fetchall()
    return [entry for row in rows if (entry := _read(kind, *row)) is not None]


def _read(kind: str, number: int, name: str, task: str, when: str, text: str) -> Kept | None:
    try:
        value = json.loads(text)
        if missing := PARTS.get(kind, set()) - value.keys():
            raise ValueError(f"it lacks {min(missing)}")
        return Kept(number, name, task, datetime.fromisoformat(when), value)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        _note_once(f"{kind} {number} can't be read and is left out: {arguments.why(error)}")
        return None


# Each note is shown once per process, because the database is read often.
_note_once = cache(messages.note)


@contextmanager
def _database(writes: bool = False) -> Iterator[sqlite3.Connection]:
    """Yield a connection, in a transaction if `writes`. Raises SpeedKitError if access fails."""
    file = folder() / FILE
    try:
        if writes:
            make(file.parent)
        with (
            closing(sqlite3.connect(file, timeout=PATIENCE_S, isolation_level=None)) as connection,
            connection,
        ):
            if writes:
                connection.execute("BEGIN IMMEDIATE")
            connection.execute(SCHEMA)
            yield connection
    except (sqlite3.Error, OSError, UnicodeError) as error:
        why = f"{error} ({FOLDER} can name another folder)"
        if "locked" in str(error):
            why = f"another process has been writing for over {PATIENCE_S:g} s: try again later"
        if type(error) is sqlite3.DatabaseError:  # a damaged file; other errors are of subclasses
            why = f"the file is damaged ({error}): delete or move it, and a new one is created"
        raise SpeedKitError(f"the stored data in {file} can't be used: {why}") from None
