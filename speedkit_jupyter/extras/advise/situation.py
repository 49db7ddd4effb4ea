"""All that a rule sees of a step: what was measured, what was seen, and the objects themselves."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.advise.advice import Opportunity, Subject
from speedkit_jupyter.extras.advise.code import CodePart, StepCode
from speedkit_jupyter.extras.advise.observed_call import Watched
from speedkit_jupyter.extras.data import loader_samples as samples
from speedkit_jupyter.extras.profile.profile import Profile
from speedkit_jupyter.extras.profile.split import Part as PartOfStep
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.support import units
from speedkit_jupyter.support.exceptions import StepError

# The parts of a step that a line of the user's does by itself.
BESIDE: frozenset[PartOfStep] = frozenset(["rest", "data", "synchronizations", "host to device"])
# A probe takes this many pairs of calls.
PAIRS = 5


@dataclass
class Situation:
    """`names` are what the user calls things, by their ids; `plans` what the rules of the catalog
    would do to each model, `is_tuned` whether tuning has measured them, `in_force` what is applied
    already; `settle` puts the step's state back, `affords` says whether there is time for some
    seconds; of `loaders` the first `lasting` are there before the step, the others it makes itself;
    `said` are the opportunities that other rules have found before.
    """

    profile: Profile
    watched: Watched
    code: StepCode
    hardware: Hardware
    device: torch.device
    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loaders: Sequence[DataLoader[Any]] = ()
    lasting: int | None = None
    plans: Sequence[Plan] = ()
    is_tuned: bool = False
    in_force: frozenset[str] = frozenset()
    names: Mapping[int, str] = field(default_factory=dict)
    settle: Callable[[], object] = lambda: None
    affords: Callable[[float], bool] = lambda seconds: True
    said: Sequence[Opportunity] = ()
    _samples: dict[int, samples.Samples | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.step_s, self.steps = self.profile.step_s, self.profile.steps
        self.cores, self.on_cpu = self.hardware.cpu.usable_cores, self.device.type == "cpu"
        self.trains = bool(self.watched.backwards) or self.watched.gradients_asked
        self.subject = Subject(self.models, self.optimizers, self.loaders)
        # Of what has parameters: no loss, no activation.
        self.calls = [one for one in self.watched.calls if [*one.module.parameters()]]
        self.inputs = [one for call in self.calls for one in call.inputs]
        modules = (one for model in self.models for one in model.modules())
        self.modules = list({id(one): one for one in modules}.values())
        self.parameters = self.subject.parameters
        # Those that the step makes itself included.
        self.held = self.subject.held | self.watched.held

    def share(self, *parts: PartOfStep) -> float:
        """Return that of parts of the step, 0 to 1."""
        return sum(self.profile.share(part) for part in parts)

    @property
    def computing(self) -> float:
        return self.share("forward", "backward")

    def line_share(self, part: CodePart, *nodes: ast.AST) -> float:
        """Return that of the user's statements, with what they call of libraries; without what
        other lines of the user's do meanwhile, nor models and optimizers.
        """
        spots = {spot for node in nodes for spot in part.spots(part.statement(node))}
        own = self.profile.lines.own.items()
        return sum(share for (spot, where), share in own if spot in spots and where in BESIDE)

    def operators(self, *names: str) -> float:
        """Return the share of operators whose names begin so, as `aten::softmax`."""
        found = [] if self.profile.costs is None else self.profile.costs.operators
        return sum(one.share for one in found if one.name.rpartition("#")[2].startswith(names))

    def module_share(self, names: Collection[str] | None = None) -> float:
        """Return the share of modules by name, or of all."""
        found = [] if self.profile.costs is None else self.profile.costs.modules
        return sum(one.share for one in found if one.name and (names is None or one.name in names))

    def samples(self, loader: DataLoader[Any]) -> samples.Samples | None:
        """Return what a loader's samples are like; None where its data set can't be asked."""
        if id(loader) not in self._samples:
            self._samples[id(loader)] = None
            self.settle()
            with suppress(Exception):  # a data set without indices, or one that draws otherwise
                self._samples[id(loader)] = samples.look_at(loader)
            self.settle()
        return self._samples[id(loader)]

    def name(self, value: Any, otherwise: str) -> str:
        """Return how the user calls it."""
        return self.names.get(id(value)) or otherwise

    def place(self, part: CodePart, node: ast.AST) -> str:
        """Return `cell 4, line 12`."""
        return self.profile.place(part.spots(node)[0])

    def ratio(self, first: Callable[[], object], second: Callable[[], object]) -> float | None:
        """Return how many times as long the first takes as the second, in turn, each without
        gradients; None where one raises. Raises StepError where there is no time.
        """

        def pair_s() -> tuple[float, float]:
            return clock.timed(first, self.device), clock.timed(second, self.device)

        self.settle()
        try:
            with torch.no_grad():
                needed_s = PAIRS * sum(pair_s())  # which warms up
                if not self.affords(needed_s):
                    raise StepError(f"there was no time to try it for {units.seconds(needed_s)}")
                first_s, second_s = zip(*(pair_s() for _ in range(PAIRS)), strict=True)
        except StepError:
            raise
        except Exception:  # a model for this input alone
            return None
        finally:
            self.settle()
        return float(median(first_s) / median(second_s))
