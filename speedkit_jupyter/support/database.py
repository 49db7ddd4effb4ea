"""What is kept between sessions: an embedded SQLite database in the user's data folder.

Each write is one transaction with SQLite's rollback journal, which, unlike a write-ahead log, also
works on network folders: kernels may write at once, and be killed while they write.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from speedkit_jupyter.support import START, messages, reading
from speedkit_jupyter.support.exceptions import SpeedKitError

# A folder of the user's choice in place of the platform's own.
FOLDER = "SPEEDKIT_DATA"
FILE = "speedkit.sqlite"
# A lock that one process holds is waited for this long, and not again in the seconds after;
# while others write in turn, so many times as long.
PATIENCE_S, AGAIN_S, TURNS = 1.5, 30.0, 10
MOST_BYTES = 2**24  # of an entry
# How results and plans are found, not the package's version: it is raised where what an earlier
# engine found can't be trusted or compared.
ENGINE = 4
Number = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Form(BaseModel):
    """The parts of an entry that are used; others are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Variant(_Form):
    name: str
    times_s: list[Seconds]
    speedup: Number | None = None
    low: Number | None = None
    high: Number | None = None


class _Result(_Form):
    variants: list[_Variant]
    environment: dict[str, Any] = {}


class _Bundle(_Form):
    cold_s: Seconds
    warm_s: Seconds


class Learned(_Form):
    """A plan that was proven, in the store or in an archive."""

    name: str
    values: dict[str, Any]
    parameters: int
    device: str
    model: str
    inputs: list[str]
    trains: bool
    speedup: Number | None
    low: Number | None
    high: Number | None
    bundle: _Bundle | None = None


class _Compiling(_Form):
    seconds: Seconds


# The others are checked by whoever reads them.
FORMS: dict[str, type[BaseModel]] = {"result": _Result, "plan": Learned, "compiling": _Compiling}
# What to do about an entry that can't be read.
REMEDIES = {
    "result": "`%speedkit history NAME --forget` deletes it",
    "plan": "`%speedkit tuned forget {}` deletes it",
}
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
    """Return the data folder, which may not be there yet. Raises SpeedKitError without a home."""
    import platformdirs

    chosen = os.environ.get(FOLDER)
    try:
        found = (
            Path(chosen).expanduser() if chosen else platformdirs.user_data_path("speedkit", False)
        )
        if found.parts[:1] == ("~",):  # so say earlier versions of platformdirs
            raise RuntimeError("there is no home folder")
    except RuntimeError as error:
        why = f"{error} ({FOLDER} can name another folder)"
        raise SpeedKitError(f"the data folder can't be used: {why}") from None
    return Path(START, found)


def make(folder: Path) -> None:
    """Make a folder and those above it that are missing, for its owner alone. Raises OSError."""
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(0o700, exist_ok=True)


def save(name: str, result: Mapping[str, Any]) -> None:
    """Keep a result under a name; earlier ones of that name stay. Raises SpeedKitError."""
    _keep("result", [(name, "", {**result, "engine": ENGINE})])


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
    learn_all([(setting, task, plan)])


def learn_all(plans: Iterable[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Keep plans as `learn` does, each with its setting and task: all of them or none."""
    rows = [(setting, task, {**plan, "engine": ENGINE}) for setting, task, plan in plans]
    _keep("plan", rows, replaces=True)


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
    _keep(kind, [(name, task, value)], replaces=True)


def newest(kind: str, name: str) -> Mapping[str, Any] | None:
    """Return what `keep` has kept for a name; None without. Raises SpeedKitError."""
    return next((row.value for row in _rows(kind, name)), None)


def kept(kind: str, name: str | None = None) -> list[Kept]:
    """Return what `keep` has kept: all, or of one device's model. Raises SpeedKitError."""
    return [*_rows(kind, name)]


def _keep(
    kind: str, rows: Iterable[tuple[str, str, Mapping[str, Any]]], replaces: bool = False
) -> None:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _database() as database:
        for name, task, value in rows:
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
    """Yield each row; makes no file, and waits for no one who writes."""
    try:
        file = folder() / FILE
        with suppress(OSError):  # opening it says why
            if not file.exists():
                return
    except SpeedKitError as error:
        _note_once(f"nothing is kept between sessions: {error}")
        return
    query = f"""
        SELECT id, CAST(name AS TEXT), CAST(task AS TEXT), saved_at,
            CASE WHEN length(value) <= {MOST_BYTES} THEN value END
        FROM entries WHERE kind = ? AND (? IS NULL OR name = ?) ORDER BY id
    """
    with _database(writes=False) as database:
        is_begun = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone()
        rows = database.execute(query, (kind, name, name)).fetchall() if is_begun else ()
    for number, title, task, when, text in rows:
        try:
            value = reading.record(text, FORMS.get(kind))
            moment = datetime.fromisoformat(when).astimezone(timezone.utc)
            if not 1 < moment.year < 9999:  # some zone has no such date
                raise ValueError(f"no date: {moment}")
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            why = f"it is no JSON, or lacks a part ({reading.why(error):.50})"
            remedy = REMEDIES.get(kind, "a new one replaces it").format(number)
            line = f"{kind} {number} can't be read and is left out: {why}; {remedy} in {FILE}"
            _note_once(f"{file}: {line}") if skipped is None else skipped.append(line)
            continue
        yield Kept(number, title, task, moment, value)


# Once in a process: the store is read often.
_note_once = cache(messages.note)
# When a lock outlasted our patience, by file.
_GIVEN_UP: dict[Path, float] = {}


@contextmanager
def _database(writes: bool = True) -> Iterator[sqlite3.Connection]:
    """Open a connection and a transaction: all of the block is written, or nothing."""
    file = folder() / FILE
    is_patient = time.monotonic() - _GIVEN_UP.get(file, -AGAIN_S) >= AGAIN_S
    try:
        if writes:
            make(file.parent)
        timeout = PATIENCE_S if is_patient else PATIENCE_S / 15
        with closing(sqlite3.connect(file, timeout=timeout, isolation_level=None)) as connection:
            # One row that is no text must not hide the others.
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            with connection:
                lock = "BEGIN IMMEDIATE" if writes else "SELECT 1 FROM sqlite_master"
                _begin(connection, file, lock)
                if writes:
                    connection.execute(SCHEMA)
                yield connection
    except (sqlite3.Error, OSError, UnicodeError, OverflowError, MemoryError) as error:
        why = f"{error} ({FOLDER} can name another folder)"
        if "locked" in str(error):
            why = f"another process is writing, for longer than {PATIENCE_S:g} s: try again later"
            _GIVEN_UP[file] = time.monotonic()
        if type(error) is sqlite3.DatabaseError:  # its subclasses are about one statement
            why = f"it is damaged ({error}): delete it or move it away, and a new one begins"
        raise SpeedKitError(f"the history in {file} can't be used: {why}") from None
    _GIVEN_UP.pop(file, None)


def _begin(connection: sqlite3.Connection, file: Path, statement: str) -> None:
    """Take the lock: wait once for who holds it, but several times for those that take turns."""
    for turn in range(TURNS):
        before = _written(file)
        try:
            connection.execute(statement).fetchone()
            return
        except sqlite3.OperationalError:
            if turn == TURNS - 1 or _written(file) == before:
                raise


def _written(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_mtime_ns
    return 0
