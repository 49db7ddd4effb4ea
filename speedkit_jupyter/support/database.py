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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from speedkit_jupyter.support import database_rows
from speedkit_jupyter.support.database_rows import ENGINE as ENGINE
from speedkit_jupyter.support.database_rows import Learned as Learned
from speedkit_jupyter.support.database_rows import Saved as Saved
from speedkit_jupyter.support.exceptions import SpeedKitError, is_text

Kept = TypeVar("Kept")

# A folder of the user's choice in place of the platform's own.
FOLDER = "SPEEDKIT_DATA"
# Another kernel's write takes milliseconds, and several may wait in a row.
PATIENCE_S = 10.0
LONGEST_NAME = 200
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
CREATE TABLE IF NOT EXISTS rates (
    machine TEXT PRIMARY KEY,
    measured_at TEXT NOT NULL,
    rates TEXT NOT NULL
);
"""


def folder() -> Path:
    """Return where the database lies."""
    import platformdirs

    chosen = os.environ.get(FOLDER)
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("speedkit", False)


def save(name: str, result: Mapping[str, Any]) -> None:
    """Keep a result under a name; earlier ones of that name stay. Raises SpeedKitError."""
    if len(name) > LONGEST_NAME or not is_text(name):
        raise SpeedKitError(
            f"no result can be saved as {name[:20]!r}: give it a shorter, plain name"
        )
    row = (name, _now(), json.dumps({**result, "engine": ENGINE}))
    _write("INSERT INTO results (name, saved_at, result) VALUES (?, ?, ?)", row)


def saved(name: str | None = None, skipped: list[str] | None = None) -> list[Saved]:
    """Return what was kept, oldest first: all, or that of one name. Raises SpeedKitError.

    A row that can't be read is left out; a line about it is added to `skipped`.
    """
    if not is_text(name or ""):
        return []
    rows = _read("SELECT id, name, saved_at, result FROM results", "name", name)
    return _readable(rows, database_rows.saved, "result", skipped)


def forget(name: str) -> int:
    """Delete everything of that name; return how many results there were."""
    return _write("DELETE FROM results WHERE name = ?", (name,)) if is_text(name) else 0


def learn(setting: str, task: str, plan: Mapping[str, Any]) -> None:
    """Keep a plan in place of an earlier one for the same. Raises SpeedKitError."""
    row = (setting, task, _now(), json.dumps({**plan, "engine": ENGINE}))
    columns = "plans (setting, task, learned_at, plan)"
    _write(f"INSERT OR REPLACE INTO {columns} VALUES (?, ?, ?, ?)", row)


def learned(setting: str | None = None, skipped: list[str] | None = None) -> list[Learned]:
    """Return the plans that were kept, oldest first: all, or those of one setting.

    A row that can't be read is left out; a line about it is added to `skipped`.
    """
    rows = _read("SELECT id, setting, task, learned_at, plan FROM plans", "setting", setting)
    return _readable(rows, database_rows.learned, "learned plan", skipped)


def unlearn(numbers: Iterable[int] | None) -> int:
    """Delete these plans, or all; return how many there were."""
    if numbers is None:
        return _write("DELETE FROM plans")
    return sum(_write("DELETE FROM plans WHERE id = ?", (number,)) for number in numbers)


def keep_rates(machine: str, rates: str) -> None:
    """Keep what was measured of a machine, as JSON, in place of what was before. Raises
    SpeedKitError.
    """
    _write("INSERT OR REPLACE INTO rates VALUES (?, ?, ?)", (machine, _now(), rates))


def rates(machine: str) -> str | None:
    """Return what was measured of this machine, as JSON; None without. Raises SpeedKitError."""
    rows = _read("SELECT rowid AS id, rates FROM rates", "machine", machine)
    text = rows[0][1] if rows else None
    return text.decode(errors="replace") if isinstance(text, bytes) else None


def _readable(
    rows: Iterable[tuple[Any, ...]],
    read: Callable[..., Kept],
    kind: str,
    skipped: list[str] | None,
) -> list[Kept]:
    entries = []
    for row in rows:
        try:
            entries.append(read(*row))
        except ValueError as error:
            if skipped is not None:
                skipped.append(f"{kind} {row[0]} can't be read and is left out: {error}")
    return entries


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _read(query: str, column: str, value: str | None) -> list[tuple[Any, ...]]:
    """Return the rows, or those that have this value in the column; makes no file."""
    try:
        (folder() / "speedkit.sqlite").stat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, RuntimeError):
        pass  # opening it says why
    where, values = ("", ()) if value is None else (f"WHERE {column} = ?", (value,))
    with _database("BEGIN") as database:
        return database.execute(f"{query} {where} ORDER BY id", values).fetchall()


def _write(statement: str, values: tuple[Any, ...] = ()) -> int:
    """Return how many rows it changed."""
    with _database("BEGIN IMMEDIATE") as database:
        return database.execute(statement, values).rowcount


@contextmanager
def _database(begin: str) -> Iterator[sqlite3.Connection]:
    """Open a connection and a transaction: all of the block is written, or nothing."""
    file: Path | str = "speedkit.sqlite"
    try:
        file = folder() / "speedkit.sqlite"
        file.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(file, timeout=PATIENCE_S, isolation_level=None)
        connection.text_factory = bytes  # one row that is no text must not hide the others
        try:
            with connection:
                connection.execute(begin)
                for table in SCHEMA.split(";"):  # `executescript` would end the transaction
                    connection.execute(table)
                yield connection
        finally:
            connection.close()
    except (sqlite3.Error, OSError, RuntimeError) as error:  # the last: `~nobody` has no home
        raise SpeedKitError(f"the history in {file} can't be used: {_why(error)}") from None


def _why(error: Exception) -> str:
    """Return the reason with the next step."""
    advice = f"{FOLDER} can name another folder"
    if type(error) is sqlite3.DatabaseError:  # its subclasses are about one statement
        return f"it is damaged ({error}): delete it or move it away, and a new one begins"
    if "locked" in str(error):
        return f"another program has held it for {PATIENCE_S:g} s: try again, or {advice}"
    if "column" in str(error):
        return f"another version of SpeedKit made it ({error}): {advice}"
    return f"{error} ({advice})"
