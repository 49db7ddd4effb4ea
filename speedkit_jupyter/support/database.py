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
import time
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
# Another kernel's write takes milliseconds: whoever holds the lock for longer, and writes nothing
# meanwhile, hangs. Where many write it may take this long until it is our turn.
PATIENCE_S, LONGEST_S = 2.0, 30.0
READ = "BEGIN"
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
    """Where the database lies."""
    import platformdirs

    chosen = os.environ.get(FOLDER)
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("speedkit", False)


def save(name: str, result: Mapping[str, Any]) -> None:
    """Keep a result under a name; earlier ones of that name stay. Raises SpeedKitError."""
    if len(name) > LONGEST_NAME or not is_text(name):
        raise SpeedKitError(
            f"no result can be saved as {name[:20]!r}: give it a shorter, plain name"
        )
    with _database() as database:
        database.execute(
            "INSERT INTO results (name, saved_at, result) VALUES (?, ?, ?)",
            (name, _now(), json.dumps({**result, "engine": ENGINE})),
        )


def saved(name: str | None = None, skipped: list[str] | None = None) -> list[Saved]:
    """What was kept, oldest first: all, or that of one name. Raises SpeedKitError.

    A row that can't be read is left out; a line about it is added to `skipped`.
    """
    if not _exists() or not is_text(name or ""):
        return []
    where, values = ("", ()) if name is None else ("WHERE name = ?", (name,))
    with _database(READ) as database:
        query = f"SELECT id, name, saved_at, result FROM results {where} ORDER BY id"
        rows = database.execute(query, values).fetchall()
    return _readable(rows, database_rows.saved, "result", skipped)


def forget(name: str) -> int:
    """Delete everything of that name; returns how many results there were."""
    if not is_text(name):
        return 0
    with _database() as database:
        return database.execute("DELETE FROM results WHERE name = ?", (name,)).rowcount


def learn(setting: str, task: str, plan: Mapping[str, Any]) -> None:
    """Keep a plan in place of an earlier one for the same. Raises SpeedKitError."""
    with _database() as database:
        database.execute(
            "INSERT OR REPLACE INTO plans (setting, task, learned_at, plan) VALUES (?, ?, ?, ?)",
            (setting, task, _now(), json.dumps({**plan, "engine": ENGINE})),
        )


def learned(setting: str | None = None, skipped: list[str] | None = None) -> list[Learned]:
    """The plans that were kept, oldest first: all, or those of one setting.

    A row that can't be read is left out; a line about it is added to `skipped`.
    """
    if not _exists():
        return []
    where, values = ("", ()) if setting is None else ("WHERE setting = ?", (setting,))
    with _database(READ) as database:
        query = f"SELECT id, setting, task, learned_at, plan FROM plans {where} ORDER BY id"
        rows = database.execute(query, values).fetchall()
    return _readable(rows, database_rows.learned, "learned plan", skipped)


def keep_rates(machine: str, rates: str) -> None:
    """Keep what was measured of a machine, as JSON, in place of what was before. Raises
    SpeedKitError.
    """
    with _database() as database:
        database.execute("INSERT OR REPLACE INTO rates VALUES (?, ?, ?)", (machine, _now(), rates))


def rates(machine: str) -> str | None:
    """What was measured of this machine, as JSON; None where nothing was. Raises SpeedKitError."""
    if not _exists():
        return None
    with _database(READ) as database:
        query = "SELECT rates FROM rates WHERE machine = ?"
        row = database.execute(query, (machine,)).fetchone()
    text = None if row is None else row[0]
    return text.decode(errors="replace") if isinstance(text, bytes) else None


def unlearn(numbers: Iterable[int] | None) -> int:
    """Delete these plans, or all; returns how many there were."""
    with _database() as database:
        if numbers is None:
            return database.execute("DELETE FROM plans").rowcount
        return sum(
            database.execute("DELETE FROM plans WHERE id = ?", (number,)).rowcount
            for number in numbers
        )


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


def _exists() -> bool:
    """Whether anything was ever kept; where that can't be told, opening it says why."""
    try:
        (folder() / "speedkit.sqlite").stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, RuntimeError):
        return True
    return True


@contextmanager
def _database(begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """A connection and its transaction: all of the block is written, or nothing."""
    file: Path | str = "speedkit.sqlite"
    try:
        file = folder() / "speedkit.sqlite"
        file.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(file, timeout=PATIENCE_S, isolation_level=None)
        connection.text_factory = bytes  # one row that is no text must not hide the others
        try:
            with connection:
                _begin(connection, file, begin)
                _create_tables(connection)
                yield connection
        finally:
            connection.close()
    except (sqlite3.Error, OSError, RuntimeError) as error:  # the last: `~nobody` has no home
        raise SpeedKitError(f"the history in {file} can't be used: {_why(error)}") from None


def _begin(connection: sqlite3.Connection, file: Path, begin: str) -> None:
    """Take the lock. Others may write all the time; who writes nothing for so long hangs."""
    end, stamp = time.monotonic() + LONGEST_S, _written(file)
    while True:
        try:
            connection.execute(begin)
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            return
        except sqlite3.OperationalError:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            before, stamp = stamp, _written(file)
            if stamp == before or time.monotonic() > end:
                raise


def _written(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


def _why(error: Exception) -> str:
    """The reason with the next step."""
    advice = f"{FOLDER} can name another folder"
    if type(error) is sqlite3.DatabaseError:  # its subclasses are about one statement
        return f"it is damaged ({error}): delete it or move it away, and a new one begins"
    if "locked" in str(error):
        return f"another program has held it for {PATIENCE_S:g} s: try again, or {advice}"
    if "column" in str(error):
        return f"another version of SpeedKit made it ({error}): {advice}"
    return f"{error} ({advice})"


def _create_tables(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";"):  # `executescript` would end the transaction
        connection.execute(statement)
