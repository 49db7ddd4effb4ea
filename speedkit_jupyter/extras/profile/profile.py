"""What a profile found: the time of a step, by its parts, and the lines that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from speedkit_jupyter.extras.profile.costs import Costs
from speedkit_jupyter.extras.profile.lines import LineTimes
from speedkit_jupyter.extras.profile.split import PARTS, Line, Part, Split, shares
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.statistics import BUSY, SELDOM, TICK_S
from speedkit_jupyter.support.source_lines import Spot, source

# Where telling makes a call this many times as long, other calls tell of whole parts alone.
COSTLY = 1.05


class Wait(NamedTuple):
    """A line that waits for the device: `times` and `seconds` of one step."""

    line: Line
    times: float
    seconds: float


@dataclass(repr=False)
class Profile(Shown):
    """The result. Seconds are of one step; a call of the cell or function makes `steps` of them, as
    many as its optimizer made, or one.

    `first` is the split of the first call, which may have compiled, `splits` are those of profiled
    calls, `plain_s` the seconds of plain calls in between; `whole` are splits of the parts as a
    whole, without what is within them, where telling takes long.
    `timed_s` are the seconds of all plain calls (or the first call), `held_up_s` those for which
    other processes kept it from the cores.
    A profile that `is_interrupted` ended by Ctrl-C.
    `lines` are the user's own, `costs` those of modules and operators, or `why_no_costs` says why
    there are none; `names` are the notebook's for files.
    """

    REPORTS = f"{__package__}.report"

    first: Split | None = None
    splits: list[Split] = field(default_factory=list)
    whole: list[Split] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    lines: LineTimes = field(default_factory=LineTimes)
    costs: Costs | None = None
    why_no_costs: str = ""
    timed_s: float = 0.0
    held_up_s: float = 0.0
    is_interrupted: bool = False
    device: str = "cpu"
    names: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def taken(self) -> list[Split]:
        """Return the calls that count: the first one where there was no time for others."""
        return self.splits or ([self.first] if self.first is not None else [])

    @property
    def steps(self) -> int:
        """Return how many steps a call makes."""
        return max(max((split.steps for split in self.taken), default=1), 1)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: by the median of the plain calls, or by the only call."""
        calls = self.plain_s or [split.total_s for split in self.taken]
        return median(calls) / self.steps

    @property
    def load(self) -> str:
        """Return for how long other processes held up the calls; empty if hardly."""
        share = self.held_up_s / max(self.timed_s, TICK_S)
        told = f"{BUSY}: other processes held up the calls for up to {share:.0%} of the time"
        return told if share > SELDOM else ""

    @property
    def cost(self) -> float | None:
        """Return how many times as long a profiled call takes as a plain one, if there are both."""
        if not (self.plain_s and self.splits):
            return None
        told_s = median(sum(split.pieces.values()) for split in self.splits)
        return told_s / median(self.plain_s)

    @property
    def is_costly(self) -> bool:
        """Return whether telling takes so long that it may hide how long the parts are."""
        return (self.cost or 1.0) > COSTLY

    def seconds(self, part: Part) -> float:
        """Return those of one step. The parts sum to the step."""
        return self.share(part) * self.step_s

    def share(self, part: Part) -> float:
        """Return that of a part, 0 to 1."""
        return shares(self.taken, self.whole if self.is_costly else [])[part]

    def waits(self) -> list[Wait]:
        """Return lines that wait, what takes longest first, then what waits most often."""
        times, waited_s = Counter[Line](), Counter[Line]()
        for split in self.taken:
            times.update(split.waits)
            waited_s.update(split.waited_s)  # type: ignore[arg-type]
        calls, total_s = len(self.taken) * self.steps, sum(waited_s.values())
        # What telling takes is taken off the part, in all.
        share = min(self.seconds("synchronizations") * calls / total_s, 1.0) if total_s else 1.0
        found = [Wait(line, times[line] / calls, share * waited_s[line] / calls) for line in times]
        return sorted(found, key=lambda wait: (-wait.seconds, -wait.times, wait.line))

    def place(self, line: Line | Spot) -> str:
        """Return where a line stands, as the notebook says it."""
        return f"{self.names.get(line.file) or line.file.rpartition('/')[2]}, line {line.number}"

    def _at(self, line: Line | Spot) -> dict[str, str]:
        return {"place": self.place(line), "source": source(line.file, line.number)}

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"part": part, "seconds": self.seconds(part), "share": self.share(part)}
            for part in PARTS
        ]

    def to_dict(self) -> dict[str, Any]:
        costs = self.costs or Costs()
        return {
            "parts": self.rows(),
            "step_s": self.step_s,
            "steps": self.steps,
            "calls": len(self.taken),
            "cost": self.cost,
            "first_call_s": None if self.first is None else self.first.total_s,
            "first_compiling_s": None if self.first is None else self.first.seconds["compiling"],
            "synchronizations": [
                {**self._at(line), "call": line.call, "times": times, "seconds": seconds}
                for line, times, seconds in self.waits()
            ],
            "lines": [
                {**self._at(spot), "part": self.lines.part(spot), "share": share}
                for spot, share in self.lines.costliest()
            ],
            "modules": [asdict(cost) for cost in costs.modules],
            "operators": [asdict(cost) for cost in costs.operators],
            "busy": costs.busy,
            "environment": dict(self.environment),
            "command": self.command,
        }
