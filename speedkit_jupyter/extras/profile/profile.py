"""The result of a profile: the time of a step by its parts, lines, modules and operators."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from speedkit_jupyter.extras.profile.costs import Cost, Costs
from speedkit_jupyter.extras.profile.split import (
    PARTS,
    LineSample,
    Part,
    Split,
    WaitingLine,
    shares,
)
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section, Table, TableCell, banner
from speedkit_jupyter.rounds.presentable import Shown, report_of
from speedkit_jupyter.rounds.statistics import BUSY, SELDOM, TICK_S
from speedkit_jupyter.support.source_lines import Spot, source
from speedkit_jupyter.support.units import count, seconds, share

# Where instruments make a call this many times as long, other calls record whole parts alone. Below
# it, the shares of both kinds of calls agreed within their noise.
COSTLY = 1.05
# The sampled seconds of a part count for at most this many times themselves: a part that is seen
# only once would give all of its time to one line.
MOST_SCALED = 4.0
# Rows of a table, here and in advice.
MOST_ROWS = 8
ABOUT: dict[Part, str] = {
    "data": "waiting for the next batch",
    "host to device": "copies to the device",
    "forward": "modules, and operations that lead to the loss",
    "backward": "gradients",
    "optimizer": "step, zero_grad, clipping, GradScaler",
    "synchronizations": "Python waits for values of tensors",
    "compiling": "torch.compile at work",
    "rest": "Python, metrics, and all else",
}
TIME = ("of a step", "share")
NUMBERS = ("times a step", *TIME, "backward")
MODULES = ("module", "class", "times a step", *TIME, "backward")
OPERATORS = ("operator", "times a step", *TIME, "backward")
NOTES = (
    "Modules and operators are timed by torch's profiler, in calls of their own, which it slows "
    "down; a backward pass counts for its module."
)


class Wait(NamedTuple):
    """A line that waits for the device: `times` and `seconds` of one step."""

    line: WaitingLine
    times: float
    seconds: float


@dataclass
class LineTimes:
    """Shares of a step by the user's lines, 0 to 1, each without other lines that it calls.

    `own` has them by line and part of the step; `python` has the share of each line that is spent
    outside of torch.
    """

    own: Mapping[tuple[Spot, Part], float] = field(default_factory=dict)
    python: Mapping[Spot, float] = field(default_factory=dict)

    @staticmethod
    def of(samples: Sequence[LineSample], shares: Mapping[Part, float]) -> LineTimes:
        """Return the shares of the sampled lines; `shares` are the parts' shares by the split."""
        own = defaultdict[tuple[Spot, Part], float](float)
        python = defaultdict[Spot, float](float)
        seen_s = defaultdict[Part, float](float)
        for sample in samples:
            seen_s[sample.part] += sample.seconds
        most = MOST_SCALED / (sum(seen_s.values()) or 1.0)
        for sample in samples:
            part_share = shares.get(sample.part, 0.0)
            taken = sample.seconds * min(part_share / (seen_s[sample.part] or 1.0), most)
            if sample.spot is not None:
                own[sample.spot, sample.part] += taken
                if sample.part in ("rest", "data") and not sample.in_torch:
                    python[sample.spot] += taken
        return LineTimes(own, python)

    def costliest(self, part: Part | None = None) -> list[tuple[Spot, float]]:
        """Return lines with their own share (of one part of the step), the costliest first."""
        found = defaultdict[Spot, float](float)
        for (spot, where), taken in self.own.items():
            if part in (None, where):
                found[spot] += taken
        return sorted(found.items(), key=lambda item: -item[1])

    def part(self, spot: Spot) -> Part:
        """Return the part of the step in which a line takes most of its time."""
        found = {where: taken for (at, where), taken in self.own.items() if at == spot}
        return max(found, key=lambda where: found[where])


@dataclass(repr=False)
class Profile(Shown):
    """The time of one step by its parts; a call of the cell or function makes `steps` of them.

    `first` is the split of the first call, which may have compiled. `splits` are of profiled calls,
    `plain_s` the seconds of plain calls between them. `whole` are splits by whole parts
    alone, if instruments within the parts take long. `timed_s` are the seconds of all plain calls,
    or of the first call, and `held_up_s` those in which other processes may have held them up.
    `names` are the notebook's for files.
    """

    REPORTS = __name__

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
        """Return the calls that count: the first call if there was no time for others."""
        return self.splits or ([self.first] if self.first is not None else [])

    @property
    def steps(self) -> int:
        """Return the number of steps in a call: its optimizer's steps, or 1."""
        return max(max((split.steps for split in self.taken), default=1), 1)

    @property
    def step_s(self) -> float:
        """Return the seconds of a step: by the median of the plain calls, or by the only call."""
        calls = self.plain_s or [split.total_s for split in self.taken]
        return median(calls) / self.steps

    @property
    def load(self) -> str:
        """Return for how much of the time other processes held up the calls; empty if hardly."""
        taken = self.held_up_s / max(self.timed_s, TICK_S)
        told = f"{BUSY}: other processes held up the calls for up to {taken:.0%} of the time"
        return told if taken > SELDOM else ""

    @property
    def cost(self) -> float | None:
        """Return the time of a profiled call over the time of a plain call, if there are both."""
        if not (self.plain_s and self.splits):
            return None
        profiled_s = median(sum(split.pieces.values()) for split in self.splits)
        return profiled_s / median(self.plain_s)

    @property
    def is_costly(self) -> bool:
        """Return whether instruments take long enough to distort the lengths of parts."""
        return (self.cost or 1.0) > COSTLY

    def share(self, part: Part) -> float:
        """Return the share of a part in the step, 0 to 1."""
        return shares(self.taken, self.whole if self.is_costly else [])[part]

    def seconds(self, part: Part) -> float:
        """Return the seconds of a part in one step. The parts sum to the step."""
        return self.share(part) * self.step_s

    def waits(self) -> list[Wait]:
        """Return lines that wait, by their time, then by their number of calls; largest first."""
        times, waited_s = Counter[WaitingLine](), Counter[WaitingLine]()
        for split in self.taken:
            times.update(split.waits)
            waited_s.update(split.waited_s)  # type: ignore[arg-type]
        calls, total_s = len(self.taken) * self.steps, sum(waited_s.values())
        # Instrumentation overhead is subtracted from the part as a whole.
        scale = min(self.seconds("synchronizations") * calls / total_s, 1.0) if total_s else 1.0
        found = [Wait(line, times[line] / calls, scale * waited_s[line] / calls) for line in times]
        return sorted(found, key=lambda wait: (-wait.seconds, -wait.times, wait.line))

    def place(self, line: WaitingLine | Spot) -> str:
        """Return the place of a line in the notebook's words: `cell 3, line 2`."""
        return f"{self.names.get(line.file) or line.file.rpartition('/')[2]}, line {line.number}"

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"part": part, "seconds": self.seconds(part), "share": self.share(part)}
            for part in PARTS
        ]

    def to_dict(self) -> dict[str, Any]:
        costs, first = self.costs or Costs(), self.first

        def at(line: WaitingLine | Spot) -> dict[str, str]:
            return {"place": self.place(line), "source": source(line.file, line.number)}

        return {
            "parts": self.rows(),
            "step_s": self.step_s,
            "steps": self.steps,
            "calls": len(self.taken),
            "cost": self.cost,
            "first_call_s": None if first is None else first.total_s,
            "first_compiling_s": None if first is None else first.seconds["compiling"],
            "synchronizations": [
                {**at(line), "call": line.call, "times": times, "seconds": waited_s}
                for line, times, waited_s in self.waits()
            ],
            "lines": [
                {**at(spot), "part": self.lines.part(spot), "share": taken}
                for spot, taken in self.lines.costliest()
            ],
            "modules": [asdict(cost) for cost in costs.modules],
            "operators": [asdict(cost) for cost in costs.operators],
            "busy": costs.busy,
            "environment": dict(self.environment),
            "command": self.command,
        }


@report_of.register
def profile_report(profile: Profile) -> Document:
    """Return the parts first, then lines, modules and operators."""
    if not profile.taken:
        return Document("Nothing was profiled")
    of = {part: profile.share(part) for part in PARTS}
    rows = [  # a part below half of the last digit is no row; a bar of 24 characters is the step
        (part, seconds(profile.seconds(part)), share(of[part]), "█" * round(of[part] * 24), about)
        for part, about in ABOUT.items()
        if of[part] >= 0.0005 or part == "rest"
    ]
    content = [
        Table(("part", *TIME, "", "meaning"), rows, TIME, optional=("meaning",)),
        Section(_waits_table(profile), "Synchronizations"),
        Section(_lines_table(profile), "Lines of your code, each without the lines that it calls"),
        *_costs(profile),
        "\n".join(_notes(profile)),
    ]
    of_a_call = f" ({profile.steps} in a call)" if profile.steps > 1 else ""
    largest = sorted(PARTS, key=lambda part: -of[part])[:2]
    most = ", ".join(f"{share(of[part])} {part}" for part in largest)
    headline = f"{seconds(profile.step_s)} a step{of_a_call}: {most}"
    return Document(f"{banner(profile.load)}{headline}", content, profile.to_dict())


def _waits_table(profile: Profile) -> Table:
    rows = []
    for line, times, waited_s in profile.waits()[:MOST_ROWS]:
        text = TableCell(source(line.file, line.number) or line.call, code=True)
        rows.append((profile.place(line), f"{times:.3g}", seconds(waited_s), text))
    return Table(("where", "times a step", "of a step", "line"), rows, NUMBERS)


def _lines_table(profile: Profile) -> Table:
    rows = []
    for spot, taken in profile.lines.costliest()[:MOST_ROWS]:
        if taken >= 0.02:  # some 20 samples: below that a line's share is rough
            text = TableCell(source(spot.file, spot.number), code=True)
            took, mostly = seconds(taken * profile.step_s), profile.lines.part(spot)
            rows.append((profile.place(spot), took, share(taken), mostly, text))
    return Table(("where", *TIME, "mostly", "line"), rows, NUMBERS)


def _notes(profile: Profile) -> Iterator[str]:
    waits = profile.waits()
    if len(waits) > MOST_ROWS:
        yield f"{len(waits) - MOST_ROWS} more lines wait, each for less."
    if waits and profile.device == "cpu":
        yield "On a CPU these lines wait for nothing; on a GPU each one waits until it is idle."
    if profile.is_interrupted:
        yield "Interrupted: results until then."
    calls = count(len(profile.taken), "profiled call")
    if profile.cost is None:
        if not profile.is_interrupted:
            yield f"{calls}: the first one took too long for a second."
        return
    yield f"{calls}, each of them {profile.cost:.2f} times as long as a plain one in between."
    if profile.is_costly:
        yield "Seconds are by the plain calls; the shares of short parts are rough."
    if profile.first is not None and (compiling_s := profile.first.seconds["compiling"]) > 0:
        yield f"Before, the first call compiled for {seconds(compiling_s)}."


def _costs(profile: Profile) -> list[Any]:
    costs = profile.costs
    if costs is None:
        why = profile.why_no_costs
        return [f"Modules and operators: {why}." if why else ""]
    # A module is called by its path inside the model, if only one model has parts.
    roots = {cost.name.partition(".")[0] for cost in costs.modules if "." in cost.name}
    modules = [(len(roots) == 1 and cost.name.partition(".")[2]) or cost.name
               for cost in costs.modules]  # fmt: skip
    # `linear` for `aten::linear`, and `AdamW.step` for torch's own range around it.
    operators = [
        "DataLoader" if cost.name.startswith("enumerate(DataLoader)")
        else cost.name.rpartition("#")[2].removeprefix("aten::")
        for cost in costs.operators
    ]  # fmt: skip
    busy = ""
    if costs.busy is not None:
        busy = f"The device was busy {share(costs.busy)} of the time, and idle for the rest."
    table = _cost_table(profile, MODULES, modules, costs.modules)
    return [
        Section(table, "Modules, each without those inside of it"),
        Section(_cost_table(profile, OPERATORS, operators, costs.operators), "Operators"),
        busy,
        Section(NOTES, folded=True),
    ]


def _cost_table(
    profile: Profile, columns: tuple[str, ...], names: Sequence[str], costs: Sequence[Cost]
) -> Table:
    rows = []
    for name, cost in zip(names[:MOST_ROWS], costs, strict=False):
        if cost.share < 0.01:
            continue
        cells = {
            columns[0]: name,
            "class": cost.kind,
            "times a step": f"{cost.times / profile.steps:.3g}" if cost.times else "",
            "of a step": seconds(cost.share * profile.step_s),
            "share": share(cost.share),
            "backward": share(cost.backward / cost.share),
        }
        rows.append(tuple(cells[title] for title in columns))
    return Table(
        columns, rows, NUMBERS, columns[:1], columns[1:2]
    )  # a narrow text lacks the second
