"""What a benchmark found of one variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.compilations import Compilations
from speedkit_jupyter.measure.checks.memory import Memory
from speedkit_jupyter.measure.results.statistics import SAME, Ratio, paired_ratio
from speedkit_jupyter.measure.subject.named_accuracy import Scored


@dataclass
class Record:
    """One variant. Times are seconds of one step, in the order of the rounds; `waited_s` are those
    of them in which other processes may have held the cores.

    `applied` is what its plan changes, `plan` the same in the config's words, `changes_model` what
    of it makes another model, which no speed decides about. `first_call_s` holds compilation;
    `settling_s` is what all warm-up steps together took beyond ordinary ones.
    `limit_s` is the machine's own limit for this step in this precision. `declines` are the
    reasons of what the plan was refused, by optimization; `declined` says that nothing is left of
    it, so that `failure` is a reason not to run it, and nothing that went wrong. `score` is the
    number of the user's, where one was named: the baseline's, and the one under this plan.
    """

    name: str
    times_s: list[float] = field(default_factory=list)
    first_call_s: float | None = None
    settling_s: float = 0.0
    failure: str | None = None
    declined: bool = False
    declines: dict[str, str] = field(default_factory=dict)
    accuracy: Accuracy | None = None
    same_as_baseline: bool = False
    applied: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    changes_model: dict[str, Any] = field(default_factory=dict)
    memory: Memory | None = None
    compilations: Compilations = field(default_factory=Compilations)
    limit_s: float | None = None
    score: Scored | None = None
    waited_s: list[float] = field(default_factory=list)

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile is a part of its plan."""
        return bool(self.applied.get("compile"))

    @property
    def why_not_measured(self) -> str:
        """What was seen of it, or how short the time was; empty where nothing is known."""
        short = self.notes.get("left out")
        return self.notes.get("dropped") or (f"left out: {short}" if short else "")

    @property
    def is_checked(self) -> bool:
        """Whether nothing speaks against that it computes the same as the baseline."""
        return self.accuracy is None or self.accuracy.verdict != "not checked"

    @property
    def interrupted(self) -> list[bool]:
        """Whether each of the times may hold waiting that would be seen in a ratio."""
        waited_s = zip(self.times_s, self.waited_s, strict=False)  # older results have none
        return [waited > SAME * seconds for seconds, waited in waited_s]

    def is_other_model(self, baseline: Record) -> bool:
        """Whether it computes something else on purpose, so that it can't win by speed alone."""
        return self.changes_model != baseline.changes_model

    @property
    def is_accepted(self) -> bool:
        """Whether the user has named a number, and no more of it is given up than is allowed."""
        return self.score is not None and self.score.is_accepted

    @property
    def is_refused(self) -> bool:
        """Whether the user has named a number, and more of it is given up than is allowed."""
        return self.score is not None and not self.score.is_accepted

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Record:
        """What was measured; what follows from it is computed anew."""
        values = {column.name: row[column.name] for column in fields(cls) if column.name in row}
        times_s = [] if row["same_as_baseline"] else row["times_s"]
        return _adapter().validate_python(values | {"times_s": times_s})


def ratio_of(before: Record, after: Record, error: float) -> Ratio | None:
    """How many times as fast `after` is, by the rounds that both took part in; None without any."""
    pairs = min(len(before.times_s), len(after.times_s))
    if not pairs:
        return None
    waited_s = [
        [*record.waited_s[:pairs], *[0.0] * (pairs - len(record.waited_s))]
        for record in (before, after)
    ]
    return paired_ratio(
        before.times_s[:pairs], after.times_s[:pairs], error, (waited_s[0], waited_s[1])
    )


@cache
def _adapter() -> TypeAdapter[Record]:
    return TypeAdapter(Record)
