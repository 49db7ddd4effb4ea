"""The results of a benchmark, and the base class of results that have a report."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from speedkit_jupyter.catalog import named
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.right.judge import Accuracy
from speedkit_jupyter.rounds import statistics
from speedkit_jupyter.rounds.budget import Compilations
from speedkit_jupyter.rounds.busy_machine import are_interrupted, held_up
from speedkit_jupyter.step.memory import MemoryUse
from speedkit_jupyter.support import __version__
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.units import seconds

R = TypeVar("R", covariant=True)
DROPPED = "slower than the best, dropped"
LOAD_DECIDES = "threads can't be judged while other processes hold the cores"


class Shown:
    """A result with a report. `REPORT` is the function that makes it, as "module:name"."""

    REPORT: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @hide_internal_frames
    def report(self) -> Any:
        """Return the report with all details. Notebooks and `repr` show a brief report."""
        module, _, function = self.REPORT.partition(":")
        return getattr(import_module(module), function)(self)

    @hide_internal_frames
    def save(self, path: str | Path) -> Path:
        """Write the result to `path`, in the format of the suffix (.html, .json); return the path.

        Raises SpeedKitError for another suffix, or if the file can't be written.
        """
        file = Path(path).expanduser()
        if file.suffix not in (".html", ".json"):
            raise SpeedKitError(f"{path}: give a name that ends in .html or .json")
        # HTML has the report; JSON has raw samples, environment and the command, if known.
        page = self.report().to_html() if file.suffix == ".html" else ""
        text = f'<meta charset="utf-8">{page}\n' if page else self.to_json()
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpeedKitError(f"{path}: {error.strerror}") from None
        return file

    @hide_internal_frames
    def __repr__(self) -> str:
        return str(self.report().brief().to_text())

    @hide_internal_frames
    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = self.report().brief()._repr_mimebundle_(include, exclude)
        return bundle


@dataclass(frozen=True)
class TokenTimes:
    """The times of a step that generates text: seconds for the prompt, and seconds per token."""

    tokens: int
    prompt_s: float
    token_s: float  # median
    p99_s: float  # 99th percentile of all tokens


@dataclass
class Record:
    """The results of one variant. `times_s` has the seconds per step of each round."""

    name: str
    times_s: list[float] = field(default_factory=list)
    first_call_s: float | None = None  # including compilation
    settling_s: float = 0.0  # warm-up seconds beyond the time of the same number of warm steps
    failure: str | None = None  # the error in one line
    declined: bool = False  # True if its whole plan was declined
    declines: dict[str, str] = field(default_factory=dict)  # reasons, by declined optimization
    accuracy: Accuracy | None = None
    same_as_baseline: bool = False
    applied: dict[str, Any] = field(default_factory=dict)  # the active values of its plan
    notes: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)  # `applied`, with details
    changes_model: dict[str, Any] = field(default_factory=dict)  # values that change the model
    memory: MemoryUse | None = None
    compilations: Compilations = field(default_factory=Compilations)
    score: float | None = None  # the user's accuracy under this plan
    waited_s: list[float] = field(default_factory=list)  # possible delays, by round
    steps_s: list[float] = field(default_factory=list)  # seconds of steps, even of rounds left out
    tokens: TokenTimes | None = None  # if the step generates text

    def anew(self) -> Record:
        """Return a copy without times, and without the notes `left out` and `dropped`."""
        about = ("left out", "dropped")
        notes = {name: note for name, note in self.notes.items() if name not in about}
        return replace(self, times_s=[], waited_s=[], steps_s=[], tokens=None, notes=notes)

    def add(self, seconds: float, waited_s: float) -> None:
        self.times_s.append(seconds)
        self.waited_s.append(waited_s)

    def note_warm_up(self, first_call_s: float, settling_s: float = 0.0) -> None:
        """Record a warm-up; the longest one counts, because only the first one compiles."""
        self.first_call_s = max(self.first_call_s or 0.0, first_call_s)
        self.settling_s = max(self.settling_s, settling_s)

    def fail(self, why: str) -> None:
        """Record the variant's failure, and drop its times by round."""
        self.failure, self.times_s, self.waited_s = why, [], []

    @property
    def p99_s(self) -> float | None:
        """Return the 99th percentile of the seconds per token if text is generated, else per step.

        For fewer than 100 steps, this is the slowest step; without steps, None.
        """
        if self.tokens is not None:
            return self.tokens.p99_s
        return statistics.percentile_99(self.steps_s) if self.steps_s else None

    @property
    def is_compiled(self) -> bool:
        return any(named(name).costly for name in self.applied)

    @property
    def why_not_measured(self) -> str:
        """Return why the variant was left out or dropped; empty if it was not."""
        short = self.notes.get("left out")
        return self.notes.get("dropped") or (f"left out: {short}" if short else "")

    @property
    def is_checked(self) -> bool:
        """Return False if the accuracy is "not checked"; True for other verdicts, or if unknown."""
        return self.accuracy is None or self.accuracy.verdict != "not checked"

    @property
    def interrupted(self) -> list[bool]:
        return are_interrupted(self.times_s, self.waited_s)

    def is_other_model(self, baseline: Record) -> bool:
        """Return whether the plan changes the model unlike the baseline: speed can't decide."""
        return self.changes_model != baseline.changes_model


def ratio_of(before: Record, after: Record, error: float) -> statistics.Ratio | None:
    """Return the speed-up from `before` to `after` in common rounds; None if there are none."""
    pairs = min(len(before.times_s), len(after.times_s))
    if not pairs:
        return None
    waited_s = [(record.waited_s + [0.0] * pairs)[:pairs] for record in (before, after)]
    return statistics.paired_ratio(before.times_s[:pairs], after.times_s[:pairs], error, waited_s)


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of a benchmark. The first record is the baseline of all ratios."""

    REPORT = "speedkit_jupyter.report.comparison_report:comparison_report"

    records: tuple[Record, ...]
    environment: dict[str, Any]
    budget_s: float
    error: float = statistics.ERROR  # probability of any false verdict at this test
    round_s: float | None = None
    command: str = ""  # the command that repeats the measurement
    skipped_rounds: int = 0
    compiled_rounds: int = 0
    accuracy_name: str = ""  # the user's name for the records' scores
    dropout_off: bool = False  # True if checks disabled dropout: masks differ by kernel
    unrestorable: tuple[str, ...] = ()
    repeats: str = ""  # a line about later calls that do less work or fail
    at_most_s: float | None = None  # limit on the 99th percentile

    @property
    def baseline(self) -> Record:
        return self.records[0]

    @property
    def best(self) -> Record | None:
        """Return the "faster" variant with the largest median ratio; None if none is faster."""
        ratios = [(self.ratio(one), one) for one in self.records if self.verdict(one) == "faster"]
        gains = [(ratio.median, record) for ratio, record in ratios if ratio]
        return max(gains, key=lambda gain: gain[0], default=(0.0, None))[1]

    def ratio(self, record: Record) -> statistics.Ratio | None:
        """Return baseline time ÷ variant time; 1 if the plans are equal, None if unknown."""
        if record.same_as_baseline:
            return statistics.Ratio(1.0, 1.0, 1.0, len(self.baseline.times_s))
        if record is self.baseline or record.failure:
            return None
        variants = sum(bool(variant.times_s) for variant in self.records[1:])
        return self.compared(
            self.baseline, record, statistics.bonferroni_share(self.error, variants)
        )

    def compared(self, before: Record, after: Record, error: float) -> statistics.Ratio | None:
        """Return `ratio_of` two records, with an unbounded interval if `load_decides`."""
        found = ratio_of(before, after, error)
        return found.unbounded() if found and self.load_decides(before, after) else found

    def load_decides(self, before: Record, after: Record) -> bool:
        """Return whether thread counts differ on a busy machine, where fewer threads wait less."""
        return before.applied.get("threads") != after.applied.get("threads") and bool(self.busy)

    def in_any_process(self, record: Record) -> statistics.Ratio | None:
        """Return the ratio with an interval that holds in any process; None if it is unknown."""
        found = self.ratio(record)
        if found is None:
            return None
        shortest_s = min(median(self.times_s(one)) for one in (self.baseline, record))
        return found.in_any_process(self.environment.get("threads", 1), shortest_s)

    @property
    def busy(self) -> str:
        """Return a sentence about rounds delayed by other programs; empty if few were."""
        return held_up([(one.times_s, one.waited_s) for one in self.records], "rounds")

    def verdict(self, record: Record) -> statistics.Word:
        """Return the verdict on a record, such as "failed", "baseline" or "faster".

        Other models, variants above `at_most_s`, and unchecked variants are not called faster.
        """
        if record.failure:
            return "declined" if record.declined else "failed"
        if record.accuracy is not None and record.accuracy.verdict == "wrong":
            return "wrong"
        if record is self.baseline:
            return "baseline"
        ratio = self.ratio(record)
        word = "too noisy" if ratio is None else ratio.verdict
        if record.is_other_model(self.baseline):
            return "other model" if word == "faster" else word
        if word == "faster" and self.exceeds(record):
            return "above the limit"
        may_win = word in ("faster", "too noisy")
        return "not checked" if may_win and not record.is_checked else word

    def exceeds(self, record: Record) -> str:
        """Return a text if the 99th percentile is above the limit; empty if not, or unknown."""
        limit_s, p99_s = self.at_most_s, record.p99_s
        if limit_s is None or p99_s is None or p99_s <= limit_s:
            return ""
        unit = "tokens" if record.tokens else "steps"
        return f"99 % of {unit} take up to {seconds(p99_s)}, above the limit of {seconds(limit_s)}"

    def times_s(self, record: Record) -> list[float]:
        """Return the record's times; for a plan equal to the baseline's, the baseline's times."""
        return self.baseline.times_s if record.same_as_baseline else record.times_s

    def break_even_steps(self, record: Record) -> int | None:
        """Return after how many steps compiling saves time; None without gain or compiling."""
        ratio = self.ratio(record)
        if not record.is_compiled or ratio is None or ratio.median <= 1:
            return None
        saved_s = median(self.baseline.times_s) * (1 - 1 / ratio.median)
        return math.ceil(record.settling_s / saved_s)

    def to_dict(self) -> dict[str, Any]:
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        rows = [self._row(record) for record in values.pop("records")]
        unrestorable = list(self.unrestorable)
        return {**values, "variants": rows, "unrestorable": unrestorable, "busy": self.busy}

    def rows(self) -> list[dict[str, Any]]:
        """Return a flat row of plain values for each variant, without raw samples."""
        rows, nested = self.to_dict()["variants"], {"quartiles_s", "memory", "tokens"}  # nullable
        nested |= {key for row in rows for key, one in row.items() if isinstance(one, dict | list)}
        return [
            {key: value for key, value in row.items() if key not in nested}
            | {
                "accuracy": (row["accuracy"] or {}).get("verdict"),
                "peak_bytes": (row["memory"] or {}).get("peak_bytes"),
            }
            for row in rows
        ]

    def _row(self, record: Record) -> dict[str, Any]:
        ratio, seconds = self.ratio(record), self.times_s(record)
        quartiles = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist() if seconds else None
        return {
            "name": record.name,
            "verdict": self.verdict(record),
            "speedup": ratio and ratio.median,
            "low": ratio and ratio.low,
            "high": ratio.high if ratio and math.isfinite(ratio.high) else None,
            "median_s": quartiles and quartiles[1],
            "quartiles_s": quartiles and quartiles[::2],
            "break_even_steps": self.break_even_steps(record),
            **{name: one for name, one in asdict(record).items() if name != "steps_s"},
            "p99_s": record.p99_s,
            "times_s": list(seconds),
        }


class Progress(NamedTuple):
    """The progress of a measurement: the share `done` (0 to 1), a text, and the results so far."""

    done: float
    text: str
    known: Comparison | None = None


class Engine(Protocol[R]):
    """A measurement: `run` measures and yields progress; `result` returns the result so far."""

    def run(self) -> Iterator[Progress]: ...

    def result(self) -> R: ...


def drained(engine: Engine[R]) -> R:
    """Run a measurement to its end without showing its progress, and return the result."""
    for _ in engine.run():
        pass
    return engine.result()


def environment(device: torch.device) -> dict[str, Any]:
    """Return device, versions, UTC time and, on a CPU, the number of threads.

    If the plans are for another machine, `planned_for` is that machine.
    """
    hardware, planned_for = Hardware.detect(), Hardware.current().pinned
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "device": hardware.describe(str(device)),
        "torch": hardware.torch,
        "python": hardware.python,
        "system": hardware.system,
        "speedkit": __version__,
        "measured_at": now.isoformat(timespec="seconds"),
        **({"threads": torch.get_num_threads()} if device.type == "cpu" else {}),
        **({"planned_for": planned_for} if planned_for else {}),
    }
