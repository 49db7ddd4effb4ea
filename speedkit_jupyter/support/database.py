"""What is kept between sessions: an embedded SQLite database in the user's data folder.

Each write is one transaction with SQLite's rollback journal, which, unlike a write-ahead log, also
works on network folders: kernels may write at once, and be killed while they write.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from speedkit_jupyter.support.exceptions import SpeedKitError

# A folder of the user's choice in place of the platform's own.
FOLDER = "SPEEDKIT_DATA"
FILE = "speedkit.sqlite"
# Another kernel's write takes milliseconds, and several may wait in a row.
PATIENCE_S = 10.0
# How results and plans are found, not the package's version: it is raised where what an earlier
# engine found can't be trusted or compared.
ENGINE = 4
# A key that each kind of entry has.
KEYS = {"result": "variants", "plan": "values", "rates": "blas", "compiling": "seconds",
        "search": "timings", "ranking": "agreement"}  # fmt: skip
# `kind` is one of these; `name` that of a result, a plan's setting, a machine, what is compiled.
SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    task TEXT NOT NULL,
    saved_at TEXT NOT NULL,
    value TEXT NOT NULL
)
"""


@dataclass(frozen=True)
class Kept:
    """A result, or a plan that was proven; `saved_at` is in UTC.

    A result has its user's name, and what its `to_dict` gave as `value`. The name of a plan stands
    for model, optimizers, machine and torch version; its `task` for inputs and aim.
    """

    number: int
    name: str
    task: str
    saved_at: datetime
    value: Mapping[str, Any]

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier engine found it: it is listed, and not used."""
        return self.value.get("engine") != ENGINE


def folder() -> Path:
    import platformdirs

    chosen = os.environ.get(FOLDER)
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("speedkit", False)


def save(name: str, result: Mapping[str, Any]) -> None:
    """Keep a result under a name; earlier ones of that name stay. Raises SpeedKitError."""
    _keep("result", name, {**result, "engine": ENGINE})


def saved(name: str | None = None, skipped: list[str] | None = None) -> list[Kept]:
    """Return what was kept, oldest first: all, or that of one name. Raises SpeedKitError.

    A row that can't be read is left out; a line about it is added to `skipped`.
    """
    return [*_rows("result", name, skipped)]


def forget(name: str) -> int:
    """Delete everything of that name; return how many results there were."""
    return _delete("kind = 'result' AND name = ?", name)


def learn(setting: str, task: str, plan: Mapping[str, Any]) -> None:
    """Keep a plan in place of an earlier one for the same. Raises SpeedKitError."""
    _keep("plan", setting, {**plan, "engine": ENGINE}, task, replaces=True)


def learned(setting: str | None = None, skipped: list[str] | None = None) -> list[Kept]:
    """Return the plans that were kept, as `saved` does: all, or those of one setting."""
    return [*_rows("plan", setting, skipped)]


def unlearn(numbers: Iterable[int] | None) -> int:
    """Delete these plans, or all; return how many there were."""
    if numbers is None:
        return _delete("kind = 'plan'")
    return sum(_delete("kind = 'plan' AND id = ?", number) for number in numbers)


def keep(kind: str, name: str, task: str, value: Mapping[str, Any]) -> None:
    """Keep a `search` of max-autotune for a product (`task`), a device's `ranking`, a machine's
    `rates`, or the seconds of `compiling`, in place of what was before. Raises SpeedKitError.
    """
    _keep(kind, name, value, task, replaces=True)


def newest(kind: str, name: str) -> Mapping[str, Any] | None:
    """Return what `keep` has kept for a name; None without. Raises SpeedKitError."""
    return next((row.value for row in _rows(kind, name)), None)


def kept(kind: str, name: str | None = None) -> list[Kept]:
    """Return what `keep` has kept: all, or of one device's model. Raises SpeedKitError."""
    return [*_rows(kind, name)]


def _keep(
    kind: str, name: str, value: Mapping[str, Any], task: str = "", replaces: bool = False
) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _database() as database:
        if replaces:
            where = "kind = ? AND name = ? AND task = ?"
            database.execute(f"DELETE FROM entries WHERE {where}", (kind, name, task))
        columns = "entries (kind, name, task, saved_at, value)"
        row = (kind, name, task, now, json.dumps(value))
        database.execute(f"INSERT INTO {columns} VALUES (?, ?, ?, ?, ?)", row)


def _delete(where: str, *values: object) -> int:
    with _database() as database:
        return database.execute(f"DELETE FROM entries WHERE {where}", values).rowcount


def _rows(kind: str, name: str | None, skipped: list[str] | None = None) -> Iterator[Kept]:
    """Yield each row; makes no file."""
    with suppress(OSError, RuntimeError):  # opening it says why
        if not (folder() / FILE).exists():
            return
    with _database() as database:
        query = "SELECT id, name, task, saved_at, value FROM entries WHERE kind = ? AND "
        query += "(? IS NULL OR name = ?) ORDER BY id"
        rows = database.execute(query, (kind, name, name)).fetchall()
    for number, name, task, when, text in rows:
        try:
            value = json.loads(text)
            value[KEYS[kind]]  # raises where it is missing
            moment = datetime.fromisoformat(when).astimezone(timezone.utc)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            if skipped is not None:
                why = f"it is no JSON, or lacks a part: {error!s:.100}"
                skipped.append(f"{kind} {number} can't be read and is left out: {why}")
            continue
        yield Kept(number, name, task, moment, value)


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """Open a connection and a transaction: all of the block is written, or nothing."""
    file: Path | str = FILE
    try:
        file = folder() / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(file, timeout=PATIENCE_S, isolation_level=None)) as connection:
            # One row that is no text must not hide the others.
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(SCHEMA)
                yield connection
    except (sqlite3.Error, OSError, RuntimeError, UnicodeError) as error:  # `~nobody` has no home
        why = f"{error} ({FOLDER} can name another folder)"
        if type(error) is sqlite3.DatabaseError:  # its subclasses are about one statement
            why = f"it is damaged ({error}): delete it or move it away, and a new one begins"
        raise SpeedKitError(f"the history in {file} can't be used: {why}") from None
