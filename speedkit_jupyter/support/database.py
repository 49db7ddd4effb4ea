"""What is kept between sessions: an embedded SQLite database in the user's data folder.

Each write is one transaction with SQLite's rollback journal (which, unlike a write-ahead log, also
works on network folders): two kernels may write at once, and a process that is killed while it
writes loses nothing that was saved before. A row that an editor, a disk or another version has
spoilt is left out, and named.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat, ValidationError

from speedkit_jupyter.support.exceptions import SpeedKitError

# A folder of the user's choice in place of the platform's own.
FOLDER = "SPEEDKIT_DATA"
# Another kernel's write takes milliseconds, and several may wait in a row.
PATIENCE_S = 10.0
# How results and plans are found, not the package's version: it is raised where what an earlier
# engine found can't be trusted or compared.
ENGINE = 3
# `kind` is result, plan or rates; `name` that of a result, a plan's setting or a machine.
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
class Saved:
    """A result as it was kept; `saved_at` in UTC, `result` as its `to_dict` gave it."""

    number: int
    name: str
    saved_at: datetime
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
    learned_at: datetime
    plan: Mapping[str, Any]

    @property
    def is_earlier(self) -> bool:
        """Whether an earlier engine found it: it is listed, and not used."""
        return self.plan.get("engine") != ENGINE


class _Variant(BaseModel):
    times_s: list[FiniteFloat]
    speedup: FiniteFloat | None = None


class _Result(BaseModel):
    """What is shown or divided by of a Comparison's or a Timing's `to_dict`."""

    variants: list[_Variant]


class _Plan(BaseModel):
    """The same of what tuning keeps of a plan; None is not measured yet."""

    name: str
    values: dict[str, Any]
    speedup: FiniteFloat | None
    inputs: list[str]


def folder() -> Path:
    """Return where the database lies."""
    import platformdirs

    chosen = os.environ.get(FOLDER)
    return Path(chosen).expanduser() if chosen else platformdirs.user_data_path("speedkit", False)


def save(name: str, result: Mapping[str, Any]) -> None:
    """Keep a result under a name; earlier ones of that name stay. Raises SpeedKitError."""
    with _database() as database:
        _insert(database, "result", name, "", json.dumps({**result, "engine": ENGINE}))


def saved(name: str | None = None, skipped: list[str] | None = None) -> list[Saved]:
    """Return what was kept, oldest first: all, or that of one name. Raises SpeedKitError.

    A row that can't be read is left out; a line about it is added to `skipped`.
    """
    rows = _readable("result", name, _Result, skipped)
    return [Saved(number, name, when, value) for number, name, _, when, value in rows]


def forget(name: str) -> int:
    """Delete everything of that name; return how many results there were."""
    return _delete("kind = 'result' AND name = ?", name)


def learn(setting: str, task: str, plan: Mapping[str, Any]) -> None:
    """Keep a plan in place of an earlier one for the same. Raises SpeedKitError."""
    with _database() as database:
        of_same = "DELETE FROM entries WHERE kind = 'plan' AND name = ? AND task = ?"
        database.execute(of_same, (setting, task))
        _insert(database, "plan", setting, task, json.dumps({**plan, "engine": ENGINE}))


def learned(setting: str | None = None, skipped: list[str] | None = None) -> list[Learned]:
    """Return the plans that were kept, oldest first: all, or those of one setting.

    A row that can't be read is left out; a line about it is added to `skipped`.
    """
    return [Learned(*row) for row in _readable("plan", setting, _Plan, skipped)]


def unlearn(numbers: Iterable[int] | None) -> int:
    """Delete these plans, or all; return how many there were."""
    if numbers is None:
        return _delete("kind = 'plan'")
    return sum(_delete("kind = 'plan' AND id = ?", number) for number in numbers)


def keep_rates(machine: str, rates: str) -> None:
    """Keep what was measured of a machine, as JSON, in place of what was before. Raises
    SpeedKitError.
    """
    with _database() as database:
        database.execute("DELETE FROM entries WHERE kind = 'rates' AND name = ?", (machine,))
        _insert(database, "rates", machine, "", rates)


def rates(machine: str) -> str | None:
    """Return what was measured of this machine, as JSON; None without. Raises SpeedKitError."""
    rows = _rows("rates", machine)
    return str(rows[0][4]) if rows else None


def _insert(database: sqlite3.Connection, *values: str) -> None:
    kind, name, task, value = values
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    columns = "entries (kind, name, task, saved_at, value)"
    database.execute(
        f"INSERT INTO {columns} VALUES (?, ?, ?, ?, ?)", (kind, name, task, now, value)
    )


def _delete(where: str, *values: object) -> int:
    with _database() as database:
        return database.execute(f"DELETE FROM entries WHERE {where}", values).rowcount


def _rows(kind: str, name: str | None) -> list[tuple[Any, ...]]:
    """Return number, name, task, time and value of each row; makes no file."""
    try:
        (folder() / "speedkit.sqlite").stat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, RuntimeError):
        pass  # opening it says why
    query = "SELECT id, name, task, saved_at, value FROM entries WHERE kind = ?"
    where, values = ("", (kind,)) if name is None else (" AND name = ?", (kind, name))
    with _database() as database:
        return database.execute(f"{query}{where} ORDER BY id", values).fetchall()


def _readable(
    kind: str, name: str | None, shape: type[BaseModel], skipped: list[str] | None
) -> Iterator[tuple[int, str, str, datetime, Mapping[str, Any]]]:
    """Yield the rows whose time and value are as they were written."""
    for number, *texts, when, value in _rows(kind, name):
        try:
            moment = datetime.fromisoformat(when).astimezone(timezone.utc)
            read = json.loads(value)
            shape.model_validate(read, strict=True)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                why = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
            else:
                why = f"it is no JSON, or has no date: {error!s:.100}"
            if skipped is not None:
                skipped.append(f"{kind} {number} can't be read and is left out: {why}")
            continue
        yield number, *texts, moment, read  # type: ignore[misc]


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    """Open a connection and a transaction: all of the block is written, or nothing."""
    file: Path | str = "speedkit.sqlite"
    try:
        file = folder() / "speedkit.sqlite"
        file.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(file, timeout=PATIENCE_S, isolation_level=None)
        # One row that is no text must not hide the others.
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(SCHEMA)
                yield connection
        finally:
            connection.close()
    except (sqlite3.Error, OSError, RuntimeError, UnicodeError) as error:  # `~nobody` has no home
        raise SpeedKitError(f"the history in {file} can't be used: {_why(error)}") from None


def _why(error: Exception) -> str:
    """Return the reason with the next step."""
    advice = f"{FOLDER} can name another folder"
    if type(error) is sqlite3.DatabaseError:  # its subclasses are about one statement
        return f"it is damaged ({error}): delete it or move it away, and a new one begins"
    if "locked" in str(error):
        return f"another program has held it for {PATIENCE_S:g} s: try again, or {advice}"
    return f"{error} ({advice})"
