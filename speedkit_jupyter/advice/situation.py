"""All that a rule sees of a step: what was measured, what was seen, and the objects themselves."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.advice.code import Code, Part
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.watched import Watched
from speedkit_jupyter.loading import samples
from speedkit_jupyter.loading.obstacles import drawing
from speedkit_jupyter.loading.samples import Samples
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.undo.walk import Walk
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.profiling.costs import Cost
from speedkit_jupyter.profiling.line_times import Spot
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.split import Part as PartOfStep
from speedkit_jupyter.support.database import Learned

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

# What a line of the user's does by itself.
BESIDE: frozenset[PartOfStep] = frozenset(["rest", "data", "synchronizations", "host to device"])
# A probe takes this many pairs of calls.
PAIRS = 5


@dataclass
class Situation:
    """`names` are what the user calls things, by their ids; `plans` what the rules of the catalog
    would do to each model, `learned` what tuning has proven for them, `in_force` what is applied
    already; `settle` puts the step's state back, `affords` says whether there is time for so many
    seconds; of `loaders` the first `lasting` are there before the step, the others it makes itself;
    `said` are the opportunities that other rules have found before.
    """

    profile: Profile
    watched: Watched
    code: Code
    hardware: Hardware
    device: torch.device
    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loaders: Sequence[DataLoader[Any]] = ()
    lasting: int | None = None
    plans: Sequence[Plan] = ()
    learned: Learned | None = None
    in_force: frozenset[str] = frozenset()
    names: Mapping[int, str] = field(default_factory=dict)
    settle: Callable[[], object] = lambda: None
    affords: Callable[[float], bool] = lambda seconds: True
    said: Sequence[Opportunity] = ()
    _samples: dict[int, Samples | None] = field(default_factory=dict, init=False, repr=False)

    # What was measured.

    def share(self, *parts: PartOfStep) -> float:
        """Of the step, 0 to 1."""
        return sum(self.profile.share(part) for part in parts)

    @property
    def computing(self) -> float:
        """The share of forward and backward passes."""
        return self.share("forward", "backward")

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.profile.step_s

    @property
    def steps(self) -> int:
        """In a call."""
        return self.profile.steps

    @property
    def cores(self) -> int:
        """That may be used."""
        return self.hardware.cpu.usable_cores

    @property
    def on_cpu(self) -> bool:
        """Whether the step computes on the CPU."""
        return self.device.type == "cpu"

    def line_share(self, part: Part, *nodes: ast.AST) -> float:
        """Of the step: statements of the user's, with what they call of libraries; without what
        other lines of the user's do meanwhile, nor models and optimizers.
        """
        spots = {spot for node in nodes for spot in part.spots(part.statement(node))}
        own = self.profile.lines.own.items()
        return sum(share for (spot, where), share in own if spot in spots and where in BESIDE)

    def operators(self, *names: str) -> float:
        """The share of operators whose names begin so, as `aten::softmax`."""
        if self.profile.costs is None:
            return 0.0
        return sum(cost.share for cost in self.profile.costs.operators if _is(cost, names))

    def operator_calls(self) -> float:
        """How many operators run in a step."""
        if self.profile.costs is None:
            return 0.0
        ours = (cost.times for cost in self.profile.costs.operators if "::" in cost.name)
        return sum(ours) / self.steps

    def modules(self, is_meant: Callable[[str], bool]) -> tuple[float, float]:
        """Shares of modules by their names, and how much of it is in backward passes."""
        if self.profile.costs is None:
            return 0.0, 0.0
        meant = [cost for cost in self.profile.costs.modules if is_meant(cost.name)]
        return sum(cost.share for cost in meant), sum(cost.backward for cost in meant)

    # What it is about.

    def samples(self, loader: DataLoader[Any]) -> Samples | None:
        """Return what a loader's samples are like; None where its data set can't be asked."""
        if id(loader) not in self._samples:
            self.settle()
            try:
                self._samples[id(loader)] = samples.look_at(loader, Walk(drawing(loader)))
            except Exception:  # a data set without indices, or one that draws otherwise
                self._samples[id(loader)] = None
            finally:
                self.settle()
        return self._samples[id(loader)]

    def name(self, value: Any, otherwise: str) -> str:
        """As the user calls it."""
        return self.names.get(id(value)) or otherwise

    @cached_property
    def subject(self) -> Subject:
        """What a remedy may change."""
        return Subject(self.models, self.optimizers, self.loaders)

    @cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all models, each once."""
        return self.subject.parameters

    @cached_property
    def held(self) -> set[int]:
        """Ids of what optimizers step, those that the step makes itself included."""
        return self.subject.held | self.watched.held

    @property
    def trains(self) -> bool:
        """Whether gradients are computed in a step."""
        return bool(self.watched.backwards) or self.watched.gradients_asked

    def place(self, part: Part, node: ast.AST) -> str:
        """`cell 4, line 12`."""
        return self.profile.place(Spot(part.file, getattr(node, "lineno", 0)))

    # What can be tried at once.

    def ratio(
        self, first: Callable[[], object], second: Callable[[], object], pairs: int = PAIRS
    ) -> float | None:
        """How many times as long the first takes as the second, in turn; None without time."""
        first_s, second_s = [clock.timed(first, self.device)], [clock.timed(second, self.device)]
        for _ in range(pairs if self.affords(pairs * (first_s[0] + second_s[0])) else 0):
            first_s.append(clock.timed(first, self.device))
            second_s.append(clock.timed(second, self.device))
        if len(first_s) == 1:
            return None
        return median(first_s[1:]) / median(second_s[1:])


def _is(cost: Cost, names: Iterable[str]) -> bool:
    _, _, name = cost.name.rpartition("#")
    return name.startswith(tuple(names))


def spots_of(*found: tuple[Part, ast.AST]) -> Iterator[Spot]:
    """All their lines."""
    for part, node in found:
        yield from part.spots(node)
