"""The result of a profile and its report: parts, lines, modules and operators of a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from statistics import median
from typing import Any, Literal, NamedTuple

from speedkit_jupyter.extras.profile.costs import Cost, Costs
from speedkit_jupyter.report.elements import Section, Table, TableCell, banner
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.busy_machine import BUSY, SELDOM
from speedkit_jupyter.rounds.comparison import Shown
from speedkit_jupyter.rounds.statistics import TICK_S
from speedkit_jupyter.support.source_lines import Spot, place, source
from speedkit_jupyter.support.units import count, number, seconds, share

Part = Literal[
    "data", "host to device", "forward", "backward", "optimizer", "synchronizations", "compiling",
    "rest", "overhead",
]  # fmt: skip
# Maximum number of rows in a table, and the titles of columns with times or other numbers.
MOST_ROWS = 8
TIME = ("of a step", "share")
NUMBERS = ("times a step", *TIME, "backward")
NOTE = (
    "Modules and operators are timed by torch's profiler, in calls of their own, which it slows "
    "down; a backward pass counts for its module."
)
# If a profiled call takes over this many times as long as a plain call, additional calls record
# whole parts only, not the waits and copies in them. Below this ratio, shares hardly differed.
COSTLY = 1.05
# Limit for a part's measured share ÷ its share of the samples. Without this limit, a single sample
# could assign all of the part's time to one line.
MOST_SCALED = 4.0
ABOUT: dict[Part, str] = {
    "data": "waiting for the next batch",
    "host to device": "copies to the device",
    "forward": "modules, and operations that lead to the loss",
    "backward": "gradients",
    "optimizer": "step, zero_grad, clipping, GradScaler",
    "synchronizations": "Python waits for tensor values",
    "compiling": "torch.compile at work",
    "rest": "Python, metrics, and all else",
}
_code = partial(TableCell, code=True)
# The parts in the order of a step; "overhead" is the time of the instruments, not a part.
PARTS: tuple[Part, ...] = tuple(ABOUT)


@dataclass
class LineSample:
    """A sample: the user's line, if any, the part, and the seconds since the previous sample.

    `in_torch` is true if a torch function outside of all other parts was running.
    """

    spot: Spot | None
    part: Part
    seconds: float
    in_torch: bool = False


@dataclass
class Split:
    """The times of one call.

    `pieces` has seconds by whole part and inner part: ("forward", "synchronizations") is a wait in
    forward. `waits` has the seconds of waits by line and method. `stepped` is by optimizer id.
    """

    pieces: dict[tuple[Part, Part], float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[tuple[Spot, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    stepped: Counter[int] = field(default_factory=Counter, repr=False)
    samples: list[LineSample] = field(default_factory=list, repr=False)

    @property
    def seconds(self) -> dict[Part, float]:
        """Return the seconds of each part, and of the overhead."""
        found: dict[Part, float] = dict.fromkeys((*PARTS, "overhead"), 0.0)
        for (_, part), spent_s in self.pieces.items():
            found[part] += spent_s
        return found

    @property
    def total_s(self) -> float:
        return sum(spent_s for (_, part), spent_s in self.pieces.items() if part != "overhead")

    @property
    def steps(self) -> int:
        """Return the fewest steps of any optimizer (a GAN has two); 0 without optimizer steps."""
        return min(self.stepped.values(), default=0)


class Wait(NamedTuple):
    """A line that reads a tensor's value with the method `call`, and waits for the value."""

    spot: Spot
    call: str
    times_per_step: float
    seconds_per_step: float


@dataclass
class LineTimes:
    """The share of a step, 0 to 1, that each of the user's lines takes, without lines it calls.

    `own` has the shares by line and part. `python` has shares of data and rest outside of torch.
    """

    own: Mapping[tuple[Spot, Part], float] = field(default_factory=dict)
    python: Mapping[Spot, float] = field(default_factory=dict)

    @staticmethod
    def of(samples: Sequence[LineSample], shares: Mapping[Part, float]) -> LineTimes:
        """Return the shares of the sampled lines; `shares` are the parts' shares of a step."""
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
        """Return lines with their shares, in all parts or one part, the costliest first."""
        found = defaultdict[Spot, float](float)
        for (spot, where), taken in self.own.items():
            if part in (None, where):
                found[spot] += taken
        return sorted(found.items(), key=lambda item: -item[1])

    def part(self, spot: Spot) -> Part:
        found = {where: taken for (at, where), taken in self.own.items() if at == spot}
        return max(found, key=lambda where: found[where])


@dataclass(repr=False)
class Profile(Shown):
    """The time of one step by part; `steps` is the number of steps in a call.

    `first` is the split of the first call, which may have compiled, and `splits` has profiled
    calls. `whole` has calls that record whole parts only (see COSTLY). `plain_s` has the seconds of
    plain calls in between, and `timed_s` their sum (without them, the seconds of the first call).
    Other processes delayed these calls by up to `held_up_s` seconds.
    """

    REPORT = f"{__name__}:profile_report"

    first: Split | None = None
    splits: list[Split] = field(default_factory=list)
    whole: list[Split] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    costs: Costs | None = None
    why_no_costs: str = ""
    timed_s: float = 0.0
    held_up_s: float = 0.0
    is_interrupted: bool = False
    device: str = "cpu"
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def taken(self) -> list[Split]:
        """Return the splits of profiled calls, or of the first call if there are none."""
        return self.splits or ([self.first] if self.first is not None else [])

    @cached_property
    def lines(self) -> LineTimes:
        samples = [sample for split in self.taken for sample in split.samples]
        return LineTimes.of(samples, self.shares())

    @property
    def steps(self) -> int:
        """Return the number of steps in a call: the most `steps` of any split, or 1."""
        return max(max((split.steps for split in self.taken), default=1), 1)

    @property
    def step_s(self) -> float:
        """Return a step's seconds: the median plain call (or profiled call) divided by `steps`."""
        return median(self.plain_s or [split.total_s for split in self.taken]) / self.steps

    @property
    def load(self) -> str:
        """Return a sentence if other processes delayed the calls; empty for short delays."""
        taken = self.held_up_s / max(self.timed_s, TICK_S)
        told = f"{BUSY}: other programs used the CPU for up to {taken:.0%} of the calls"
        return told if taken > SELDOM else ""

    @property
    def cost(self) -> float | None:
        """Return the median profiled call ÷ the median plain call; None if one is missing."""
        if not (self.plain_s and self.splits):
            return None
        return median(sum(split.pieces.values()) for split in self.splits) / median(self.plain_s)

    @property
    def is_costly(self) -> bool:
        return (self.cost or 1.0) > COSTLY

    def shares(self) -> dict[Part, float]:
        """Return the share of each part in the step, 0 to 1.

        If instruments inside parts (for waits and copies) are slow, `whole` gives the times of
        the whole parts, and `splits` divides these parts.
        """
        pieces, found = _summed(self.taken), dict.fromkeys(PARTS, 0.0)
        lengths = pieces if not (self.is_costly and self.whole) else _summed(self.whole)
        seen, wanted = _by_whole(pieces), _by_whole(lengths)
        total_s = sum(wanted[around] for around in seen)
        for (around, part), spent_s in pieces.items():
            if total_s and seen[around]:
                found[part] += wanted[around] / total_s * spent_s / seen[around]
        return found

    def share(self, part: Part) -> float:
        return self.shares()[part]

    def seconds(self, part: Part) -> float:
        """Return the seconds of a part per step; all parts sum to the step's time."""
        return self.share(part) * self.step_s

    def waits(self) -> list[Wait]:
        """Return the lines that read tensors' values: the longest wait first, then most calls."""
        waits = defaultdict[tuple[Spot, str], list[float]](list)
        for line, waited_s in (pair for split in self.taken for pair in split.waits.items()):
            waits[line] += waited_s
        calls, total_s = len(self.taken) * self.steps, sum(map(sum, waits.values()))
        # The scaled waits sum to at most the part's seconds, which exclude overhead.
        scale = min(self.seconds("synchronizations") * calls / total_s, 1.0) if total_s else 1.0
        found = [Wait(*at, len(s) / calls, scale * sum(s) / calls) for at, s in waits.items()]
        return sorted(found, key=lambda one: (-one.seconds_per_step, -one.times_per_step, one.spot))

    def rows(self) -> list[dict[str, Any]]:
        each = self.shares().items()
        return [{"part": part, "seconds": of * self.step_s, "share": of} for part, of in each]

    def to_dict(self) -> dict[str, Any]:
        costs, first = self.costs or Costs(), self.first

        def at(spot: Spot) -> dict[str, str]:
            return {"place": place(spot), "source": source(*spot)}

        return {
            "parts": self.rows(),
            "step_s": self.step_s,
            "steps": self.steps,
            "calls": len(self.taken),
            "cost": self.cost,
            "first_call_s": None if first is None else first.total_s,
            "first_compiling_s": None if first is None else first.seconds["compiling"],
            "synchronizations": [
                {**at(spot), "call": call, "times": times, "seconds": waited_s}
                for spot, call, times, waited_s in self.waits()
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


def _summed(splits: Sequence[Split]) -> dict[tuple[Part, Part], float]:
    """Return summed seconds by piece, without overhead, in the faster half of the calls.

    Other processes interrupted the faster half less.
    """
    found = defaultdict[tuple[Part, Part], float](float)
    for split in sorted(splits, key=lambda one: one.total_s)[: (len(splits) + 1) // 2]:
        for piece, spent_s in split.pieces.items():
            if piece[1] != "overhead":
                found[piece] += spent_s
    return found


def _by_whole(pieces: Mapping[tuple[Part, Part], float]) -> dict[Part, float]:
    found = defaultdict[Part, float](float)
    for (around, _), spent_s in pieces.items():
        found[around] += spent_s
    return found


def profile_report(profile: Profile) -> Document:
    """Return the report: parts, lines, modules and operators."""
    if not profile.taken:
        return Document("Nothing was profiled")
    of = profile.shares()
    rows = [  # parts that round to zero are left out
        (part, seconds(profile.seconds(part)), TableCell(share(of[part]), share=of[part]), about)
        for part, about in ABOUT.items()
        if of[part] >= 0.0005 or part == "rest"
    ]
    content = [
        Table(("part", *TIME, "meaning"), rows, TIME, optional=("meaning",)),
        Section(_waits_table(profile), "Synchronizations"),
        Section(_lines_table(profile), "Lines of your code, each without the lines that it calls"),
        *_costs_tables(profile),
        f"Modules and operators: {profile.why_no_costs}." if profile.why_no_costs else "",
        "\n".join(_notes(profile)),
    ]
    of_a_call = f" ({profile.steps} in a call)" if profile.steps > 1 else ""
    largest = sorted(PARTS, key=lambda part: -of[part])[:2]
    most = ", ".join(f"{share(of[part])} {part}" for part in largest)
    headline = f"{seconds(profile.step_s)} a step{of_a_call}: {most}"
    return Document(f"{banner(profile.load)}{headline}", content, profile.to_dict())


def _waits_table(profile: Profile) -> Table:
    rows = [
        (place(spot), number(times), seconds(waited_s), _code(source(*spot) or call))
        for spot, call, times, waited_s in profile.waits()[:MOST_ROWS]
    ]
    return Table(("where", "times a step", "of a step", "line"), rows, NUMBERS)


def _lines_table(profile: Profile) -> Table:
    lines, step_s = profile.lines, profile.step_s
    rows = [
        (place(spot), seconds(taken * step_s), share(taken), lines.part(spot), _code(source(*spot)))
        for spot, taken in lines.costliest()[:MOST_ROWS]
        if taken >= 0.02  # about 20 samples; with fewer, a line's share is rough
    ]
    return Table(("where", *TIME, "mostly", "line"), rows, NUMBERS)


def _costs_tables(profile: Profile) -> list[Any]:
    """Return the tables of modules and operators, with notes; empty without costs."""
    if (costs := profile.costs) is None:
        return []
    # With one root, names omit the root: `unet.mid_block` instead of `pipe.unet.mid_block`.
    roots = {cost.name.partition(".")[0] for cost in costs.modules if cost.kind}

    def table(heads: tuple[str, ...], rows: list[Cost], names: Callable[[Cost], list[str]]) -> Any:
        cells = [
            (
                *names(cost),
                number(cost.times / profile.steps) if cost.times else "",
                seconds(cost.share * profile.step_s),
                share(cost.share),
                share(cost.backward / cost.share),
            )
            for cost in rows[:MOST_ROWS]
            if cost.share >= 0.01
        ]
        return Table((*heads, *NUMBERS), cells, NUMBERS, heads[:1], heads[1:])

    def module(cost: Cost) -> list[str]:
        return [(len(roots) == 1 and cost.name.partition(".")[2]) or cost.name, cost.kind]

    def operator(cost: Cost) -> list[str]:
        """Return `linear` for `aten::linear`, `AdamW.step` for `Optimizer.step#AdamW.step`."""
        name = cost.name.rpartition("#")[2].removeprefix("aten::")
        return ["DataLoader" if cost.name.startswith("enumerate(DataLoader)") else name]

    modules = table(("module", "class"), costs.modules, module)
    busy = "The device was busy {} of the time, and idle for the rest."
    return [
        Section(modules, "Modules, each without the modules inside of it"),
        Section(table(("operator",), costs.operators, operator), "Operators"),
        "" if costs.busy is None else busy.format(share(costs.busy)),
        Section(NOTE, folded=True),
    ]


def _notes(profile: Profile) -> Iterator[str]:
    if profile.waits() and profile.device == "cpu":
        yield "On a CPU these lines wait for nothing, on a GPU until the GPU is idle."
    if profile.is_interrupted:
        yield "Interrupted: results until then."
    calls = count(len(profile.taken), "profiled call")
    if profile.cost is None:
        if not profile.is_interrupted:
            yield f"{calls}: a call is too long for a second one within the budget."
        return
    yield f"{calls}, each {profile.cost:.2f} times as long as a plain call in between."
    if profile.is_costly:
        yield "Seconds are by the plain calls; the shares of short parts are rough."
    if profile.first is not None and (compiling_s := profile.first.seconds["compiling"]) > 0:
        yield f"Before, the first call compiled for {seconds(compiling_s)}."
