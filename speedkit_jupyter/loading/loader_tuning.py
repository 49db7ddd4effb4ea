"""The result: each way to load, what it takes, and which one was taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.candidate import Candidate
from speedkit_jupyter.loading.race import Race
from speedkit_jupyter.measure.results.presentable import Shown
from speedkit_jupyter.measure.results.statistics import Ratio

if TYPE_CHECKING:
    from speedkit_jupyter.loading.samples import Samples
    from speedkit_jupyter.loading.tuned_loader import TunedLoader


@dataclass(repr=False)
class LoaderTuning(Shown):
    """`loader` is the one that was rebuilt, with the user's own settings where nothing was proven
    faster. `declined` says what was not tried, and why; `remarks` what the choice changes beside
    time; `source` makes the same in plain torch. `against` is the step that it was measured with,
    `name` the user's word for the loader.
    """

    loader: TunedLoader
    race: Race
    chosen: Candidate
    samples: Samples
    name: str = "loader"
    against: str = ""
    declined: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    source: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def own(self) -> Candidate:
        """The loader as its user made it."""
        return self.race.candidates[0]

    @property
    def is_changed(self) -> bool:
        """Whether another one was proven faster."""
        return self.chosen is not self.own

    @property
    def ratio(self) -> Ratio | None:
        """How many times as fast the choice is."""
        return self.race.ratio(self.chosen) if self.is_changed else None

    def rows(self) -> list[dict[str, Any]]:
        """A row for each way to load."""
        return [self._row(one) for one in self.race.candidates]

    def _row(self, one: Candidate) -> dict[str, Any]:
        ratio = self.race.ratio(one)
        return {
            "settings": one.words,
            "batch_s": one.batch_s(self.race.epoch) if one.times_s else None,
            "waiting": one.waiting if one.times_s else None,
            "ratio": None if ratio is None else ratio.median,
            "low": None if ratio is None else ratio.low,
            "high": None if ratio is None else ratio.high,
            "rounds": len(one.times_s),
            "chosen": one is self.chosen,
            "note": one.failure or one.why_out,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "loader": self.name,
            "against": self.against,
            "epoch": self.race.epoch,
            "rows": self.rows(),
            "declined": dict(self.declined),
            "remarks": list(self.remarks),
            "source": self.source,
            "environment": dict(self.environment),
            "command": self.command,
        }
