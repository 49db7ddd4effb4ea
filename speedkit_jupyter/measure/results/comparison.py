"""What a benchmark found: the variants' records, their ratios and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.measure.results.record import Record, ratio_of
from speedkit_jupyter.measure.results.statistics import (
    ERROR,
    TICK_S,
    Ratio,
    Word,
    bonferroni_share,
    held_up,
    least_rounds,
    spread,
)

if TYPE_CHECKING:
    import pandas as pd

# Columns of `to_dict` whose values have parts, where there are any.
NESTED = {"quartiles_s", "accuracy", "memory", "score"}


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The result of a benchmark. The first record is what the others are compared with.

    `error` is the probability of a false verdict that this look at the times may have; the
    variants share it, so that their intervals hold together. `flops` are the floating-point
    operations of one step, by torch's counter. `command` repeats the benchmark;
    `dropout_off` says that dropout layers were off while accuracy was checked (each kernel draws
    other masks). `unrestorable` names what can't be put back; `repeats` says what is
    measured where a call after another does less than the first.
    """

    records: tuple[Record, ...]
    environment: dict[str, Any]
    budget_s: float
    error: float = ERROR
    round_s: float | None = None
    flops: int | None = None
    command: str = ""
    skipped_rounds: int = 0
    dropout_off: bool = False
    unrestorable: tuple[str, ...] = ()
    repeats: str = ""

    @property
    def baseline(self) -> Record:
        """The variant that the ratios refer to."""
        return self.records[0]

    @property
    def best(self) -> Record | None:
        """The fastest that is proven faster, and right or accepted; None where none is."""
        words = ("faster", "accepted")
        ahead = [record for record in self.records if self.verdict(record) in words]
        return max(ahead, key=self._median, default=None)

    def runner_up(self) -> tuple[Record, Ratio] | None:
        """The next best after `best`, and how much faster `best` is: a comparison of its own.

        Both were chosen by their times, so the interval allows for every pair of candidates.
        """
        best = self.best
        rivals = [
            record
            for record in self.records
            if record is not best
            and self.times_s(record)
            and self.verdict(record) in ("faster", "accepted", "same", "too noisy")
            and not record.is_refused
            and (record.is_accepted or not record.is_other_model(self.baseline))
        ]
        if best is None or not rivals:
            return None
        second = max(rivals, key=self._median)
        candidates = len(self.records) - 1
        error = bonferroni_share(self.error, candidates * (candidates - 1) // 2)
        ratio = ratio_of(self.baseline if second.same_as_baseline else second, best, error)
        return None if ratio is None else (second, ratio)

    def ratio(self, record: Record) -> Ratio | None:
        """Baseline time over this variant's, round by round; None where one has no times."""
        if record.same_as_baseline:
            return Ratio(1.0, 1.0, 1.0, len(self.baseline.times_s))
        if record is self.baseline or record.failure:
            return None
        variants = sum(bool(variant.times_s) for variant in self.records[1:])
        return ratio_of(self.baseline, record, bonferroni_share(self.error, variants))

    @property
    def busy(self) -> str:
        """How much other processes held up the rounds, in a line; empty where they hardly did."""
        rounds = zip_longest(*(record.interrupted for record in self.records))
        times_s = sum(sum(record.times_s) for record in self.records)
        waited_s = sum(sum(record.waited_s) for record in self.records)
        return held_up([any(one) for one in rounds], "rounds", waited_s / max(times_s, TICK_S))

    def verdict(self, record: Record) -> Word:
        """One word for the variant."""
        if record.failure:
            return "declined" if record.declined else "failed"
        if record.accuracy is not None and record.accuracy.verdict == "wrong":
            return "wrong"
        if record is self.baseline:
            return "baseline"
        ratio = self.ratio(record)
        word = "too noisy" if ratio is None else ratio.verdict
        if record.is_refused or record.is_other_model(self.baseline):
            judged: Word = "accepted" if record.is_accepted else "other model"
            return judged if word == "faster" else word
        may_win = word in ("faster", "too noisy")
        return "not checked" if may_win and not record.is_checked else word

    def times_s(self, record: Record) -> list[float]:
        """Its own times, or the baseline's where its plan is the baseline's."""
        return self.baseline.times_s if record.same_as_baseline else record.times_s

    def break_even_steps(self, record: Record) -> int | None:
        """After how many steps the time to compile is paid back; None where there is none."""
        ratio = self.ratio(record)
        if not record.is_compiled or ratio is None or ratio.median <= 1:
            return None
        saved_s = spread(self.baseline.times_s).median_s * (1 - 1 / ratio.median)
        return math.ceil(record.settling_s / saved_s)

    def share_of_limit(self, record: Record) -> float | None:
        """The limit of this machine over the median time: 1 is as fast as it can get.

        A step that was seen to be faster than the measured limit is the limit itself: a loaded
        machine was measured, or the step's state lies in a cache.
        """
        times = self.times_s(record)
        if record.limit_s is None or not times or record.failure:
            return None
        return min(record.limit_s, *times) / spread(times).median_s

    @property
    def has_too_few_rounds(self) -> bool:
        """Whether the rounds can't give each variant an interval."""
        ratios = [self.ratio(record) for record in self.records]
        few = len(self.baseline.times_s) < least_rounds(len(self.records) - 1)
        return few and any(ratio is not None and math.isinf(ratio.high) for ratio in ratios)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `variants` is a list of records."""
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        rows = [self._row(record) for record in values.pop("records")]
        unrestorable = list(self.unrestorable)
        return {**values, "variants": rows, "unrestorable": unrestorable, "busy": self.busy}

    def rows(self) -> list[dict[str, Any]]:
        """One for each variant: what was measured in numbers and words, without raw samples."""
        return [self._flat(row) for row in self.to_dict()["variants"]]

    def to_frame(self) -> pd.DataFrame:
        """The rows by variant. Raises SpeedKitError where pandas is missing."""
        return super().to_frame().set_index("name")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Comparison:
        """Return the comparison that `to_dict` described."""
        known = {
            column.name: values[column.name] for column in fields(cls) if column.name in values
        }
        known["records"] = tuple(map(Record.from_dict, values["variants"]))
        known["unrestorable"] = tuple(known.get("unrestorable", ()))
        return cls(**known)

    def _median(self, record: Record) -> float:
        ratio = self.ratio(record)
        return 0.0 if ratio is None else ratio.median

    def _row(self, record: Record) -> dict[str, Any]:
        """What was measured, and what follows from it."""
        ratio = self.ratio(record)
        seconds = self.times_s(record)
        times = spread(seconds) if seconds else None
        derived = {
            "name": record.name,
            "verdict": self.verdict(record),
            "speedup": None if ratio is None else ratio.median,
            "low": None if ratio is None else ratio.low,
            "high": None if ratio is None or ratio.high == float("inf") else ratio.high,
            "median_s": None if times is None else times.median_s,
            "quartiles_s": None if times is None else [times.low_s, times.high_s],
            "break_even_steps": self.break_even_steps(record),
            "share_of_limit": self.share_of_limit(record),
        }
        score = None if record.score is None else record.score.to_dict()
        return derived | asdict(record) | {"times_s": list(seconds), "score": score}

    @staticmethod
    def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
        lower, upper = row["quartiles_s"] or (None, None)
        return {
            **{k: v for k, v in row.items() if k not in NESTED and not isinstance(v, dict | list)},
            "lower_quartile_s": lower,
            "upper_quartile_s": upper,
            "accuracy": (row["accuracy"] or {}).get("verdict"),
            "peak_bytes": (row["memory"] or {}).get("peak_bytes"),
            "score": ((row["score"] or {}).get("after") or {}).get("value"),
        }
