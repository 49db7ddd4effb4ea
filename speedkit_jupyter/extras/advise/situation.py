"""The situation that rules judge: measured times, one observed call, and the objects themselves."""

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
from speedkit_jupyter.extras.advise.observed_call import FunctionCode, ObservedCall
from speedkit_jupyter.extras.data import loader_samples as samples
from speedkit_jupyter.extras.profile.profile import Profile
from speedkit_jupyter.extras.profile.split import Part
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.support import units
from speedkit_jupyter.support.exceptions import StepError

# Parts of a step that are a line's own work, and not a model's or an optimizer's.
OF_LINES: frozenset[Part] = frozenset(["rest", "data", "synchronizations", "host to device"])


@dataclass
class Situation:
    """The objects and measurements that a rule judges.

    The first `lasting` of the `loaders` exist before the step, which makes the others. `plans` are
    the plans by `auto` for each model, `in_force` the switches that are applied already. `settle`
    puts the step's state back, `affords` says whether there is time for a number of seconds.
    `found` are the opportunities of earlier rules.
    """

    profile: Profile
    observed: ObservedCall
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
    found: list[Opportunity] = field(default_factory=list)
    _samples: dict[int, samples.Samples | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.step_s, self.steps = self.profile.step_s, self.profile.steps
        self.cores, self.on_cpu = self.hardware.cpu.usable_cores, self.device.type == "cpu"
        self.trains = bool(self.observed.backwards) or self.observed.gradients_asked
        self.subject = Subject(self.models, self.optimizers, self.loaders)
        # Modules with parameters alone: no loss, no activation.
        self.calls = [one for one in self.observed.calls if [*one.module.parameters()]]
        self.inputs = [one for call in self.calls for one in call.inputs]
        modules = (one for model in self.models for one in model.modules())
        self.modules = list({id(one): one for one in modules}.values())
        self.parameters = self.subject.parameters
        self.held = self.subject.held | self.observed.held  # also by optimizers of the step's own

    def share(self, *parts: Part) -> float:
        """Return the share of parts of the step, 0 to 1."""
        return sum(self.profile.share(part) for part in parts)

    @property
    def computing(self) -> float:
        return self.share("forward", "backward")

    def line_share(self, code: FunctionCode, node: ast.AST) -> float:
        """Return the share of the statement around a node, with the library code that it calls,
        without other lines of the user's, models and optimizers.
        """
        spots = set(code.spots(code.statement(node)))
        own = self.profile.lines.own.items()
        return sum(share for (spot, where), share in own if spot in spots and where in OF_LINES)

    def operators(self, *names: str) -> float:
        """Return the share of operators whose names begin with one of these: `aten::softmax`."""
        found = [] if self.profile.costs is None else self.profile.costs.operators
        return sum(one.share for one in found if one.name.startswith(names))

    def module_share(self, names: Collection[str] | None = None) -> float:
        """Return the share of modules by name, or of all modules."""
        found = [] if self.profile.costs is None else self.profile.costs.modules
        return sum(one.share for one in found if names is None or one.name in names)

    def samples(self, loader: DataLoader[Any]) -> samples.Samples | None:
        """Return the properties of a loader's samples; None if its data set can't be asked."""
        if id(loader) not in self._samples:
            self._samples[id(loader)] = None
            self.settle()
            with suppress(Exception):  # a data set without indices, or that draws otherwise
                self._samples[id(loader)] = samples.look_at(loader)
            self.settle()
        return self._samples[id(loader)]

    def name(self, value: Any, otherwise: str) -> str:
        """Return the user's name of an object."""
        return self.names.get(id(value)) or otherwise

    def ratio(self, first: Callable[[], object], second: Callable[[], object]) -> float | None:
        """Return the time of the first call over the time of the second, both without gradients.

        None if one of them raises. Raises StepError if there is no time.
        """

        def pair_s() -> tuple[float, float]:
            return clock.timed(first, self.device), clock.timed(second, self.device)

        pairs = 5  # the median of five pairs leaves out two that other processes disturbed
        self.settle()
        try:
            with torch.no_grad():
                needed_s = pairs * sum(pair_s())  # this first pair warms up
                if not self.affords(needed_s):
                    raise StepError(f"there was no time to try it for {units.seconds(needed_s)}")
                first_s, second_s = zip(*(pair_s() for _ in range(pairs)), strict=True)
        except StepError:
            raise
        except Exception:  # a model for this input alone
            return None
        finally:
            self.settle()
        return float(median(first_s) / median(second_s))
