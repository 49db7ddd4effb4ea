"""Many steps of an operator: the last state with what it took, or a stream of states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch

from speedkit_jupyter.extras.rollouts.drift import Drift
from speedkit_jupyter.extras.rollouts.programs import Program, Way, buffers_kept, policy_of, way_of
from speedkit_jupyter.extras.rollouts.way_choice import WaySearch, WayTrial
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.presentable import Shown
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.state.process import generators_kept
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.units import count

# Progress is told, and Ctrl-C keeps what is done, this many times in a rollout.
PARTS = 50
# Modules that act otherwise while they train, by the begin of their class's name.
TRAINED = ("Dropout", "BatchNorm", "SyncBatchNorm", "LazyBatchNorm", "AlphaDropout",
           "FeatureAlphaDropout")  # fmt: skip


@dataclass(repr=False)
class Rollout(Shown):
    """The last `state` after `steps` of the steps that were `asked`, and how they were made.

    `seconds` are those of the steps, with compiling. `trials` are the ways that were measured, and
    `rounding` is how far one rounding of the first state comes from float32 in as many steps.
    """

    REPORTS = f"{__package__}.report"

    state: torch.Tensor
    asked: int
    way: Way
    tolerance: float
    steps: int = 0
    seconds: float = 0.0
    trials: list[WayTrial] = field(default_factory=list)
    rounding: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.steps == self.asked

    @property
    def taken(self) -> WayTrial | None:
        """Return what was measured of the way that was taken."""
        return next((one for one in self.trials if one.way.words == self.way.words), None)

    def drift(self) -> Any:
        """Return a matplotlib figure: the drift of every way that was compared with float32."""
        curves = self.drifts()
        if not curves:
            raise ArgumentError("no drift was measured: give tune=True")
        plots = import_module(f"{__package__}.plots")
        return plots.drift_curves(curves, self.tolerance)

    def drifts(self) -> dict[str, Drift]:
        return {one.way.name: one.drift for one in self.trials if one.drift is not None}

    def rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.trials]

    def to_dict(self) -> dict[str, Any]:
        names = ("asked", "steps", "seconds", "tolerance", "rounding", "environment")
        plain = {name: getattr(self, name) for name in names}
        return {"way": self.way.name, "shape": [*self.state.shape], **plain, "trials": self.rows()}


@hide_internal_frames
def rollout(
    operator: Callable[..., Any],
    x0: torch.Tensor,
    steps: int = 500,
    policy: Any = "autoregressive",
    *,
    every: int | None = None,
    way: str | Way = "plain",
    micro_batch: int | None = None,
    tune: bool = False,
    tolerance: float = 0.01,
    budget_s: float | None = None,
    runs: int = 1,
    progress: Callable[[Progress], object] | None = None,
) -> Rollout | Iterator[torch.Tensor]:
    """Apply `operator` to `x0`, then to its own result, `steps` times. Records no gradients.

    Returns a Rollout, whose `state` is the last one, of the shape, dtype and device of `x0`; with
    `every=10` an iterator over the states after so many steps each, and the last.
    `policy` makes the next state of f(x) and x: "autoregressive" is f(x), ("convex", a) is
    a·f(x) + (1 - a)·x, ("residual", dt) is x + dt·f(x); or a function of both.

    `way` joins by +: bf16, channels_last, compile, bf16_states, cuda_graph; or it is the `way` of a
    Rollout. `tune=True` finds one, for `budget_s` seconds beside compiling (default 30, or a fifth
    of the rollout): it takes what is proven faster and drifts from float32 by `tolerance` at most,
    as a share of the state's norm. With more `runs` planned compiling may pay. `micro_batch`
    samples at a time keep memory low; an `x0` in main memory visits the operator's device in parts.

    `progress` is called with a Progress. Ctrl-C returns a Rollout of the steps that are done.
    Raises ArgumentError for what does not fit.
    """
    steps, runs, rule = _count("steps", steps), _count("runs", runs), policy_of(policy)
    every = None if every is None else _count("every", every)
    most = arguments.amount("tolerance", tolerance) or 0.0
    budget_s, chosen = arguments.seconds("budget_s", budget_s), way_of(way, micro_batch)
    _check(operator, x0)
    tell, plain = progress or (lambda _: None), Program(operator, rule, Way())
    few = x0 if chosen.micro_batch is None else x0[: chosen.micro_batch]
    with buffers_kept(operator), generators_kept():
        plain.advance(few, 1)
    device = plain.device or x0.device
    result, program = Rollout(x0, steps, chosen, most, environment=environment(device)), None
    if arguments.flag("tune", tune):
        few = few.detach().to(device)
        choice = WaySearch(operator, rule, few, steps, most, budget_s, runs)
        program = _tuned(result, choice, tell)
    program = program or Program(operator, rule, chosen)
    states = _told(result, _states(program, x0, result, every or -(-steps // PARTS)), tell)
    return states if every is not None else _drained(result, states, device)


def _count(name: str, value: Any) -> int:
    if (number := arguments.whole(name, value)) < 1:
        raise ArgumentError(f"{name} must be 1 or more, not {number}")
    return number


def _check(operator: Any, x0: Any) -> None:
    """Raise ArgumentError for what can't be rolled out."""
    if not callable(operator):
        raise ArgumentError(f"operator must be callable, not {type(operator).__name__}")
    is_dense = isinstance(x0, torch.Tensor) and x0.layout is torch.strided
    if not is_dense or not x0.is_floating_point():
        raise ArgumentError("x0 must be a tensor of floating-point numbers, not sparse: (batch, …)")
    if not x0.ndim or not x0.numel():
        raise ArgumentError(f"x0 must have a dimension and elements, not {tuple(x0.shape)}")
    modules = operator.modules() if isinstance(operator, torch.nn.Module) else ()
    for module in modules:
        if module.training and type(module).__name__.startswith(TRAINED):
            kind = type(module).__name__
            raise ArgumentError(f"the operator trains, and its {kind} with it: call eval() first")


def _tuned(result: Rollout, choice: WaySearch, tell: Callable[[Progress], object]) -> Program:
    """Return the program of the best way, and note what was measured."""
    with buffers_kept(choice.operator), generators_kept():
        for one in choice.run():
            tell(Progress(one.done, f"tuning: {one.text}"))
    result.trials, program = choice.trials, choice.program
    result.rounding = max(choice.rounding.errors)
    result.way = program.way = Way(choice.best.way.words, result.way.micro_batch)
    return program


def _states(
    program: Program, x0: torch.Tensor, result: Rollout, every: int
) -> Iterator[torch.Tensor]:
    """Yield the state after every so many steps, where `x0` is."""
    state = x0.detach()
    while result.steps < result.asked:
        steps = min(every, result.asked - result.steps)
        state = program.advance(state, steps)
        # A copy is the caller's to change.
        result.steps, result.state = result.steps + steps, state.clone()
        yield result.state


def _told(
    result: Rollout, states: Iterator[torch.Tensor], tell: Callable[[Progress], object]
) -> Iterator[torch.Tensor]:
    further = hide_internal_frames(partial(next, states, None))
    while (state := further()) is not None:
        tell(Progress(result.steps / result.asked, f"{count(result.steps, 'step')} done"))
        yield state


def _drained(result: Rollout, states: Iterator[torch.Tensor], device: torch.device) -> Rollout:
    begun_s = clock.now()
    try:
        for _ in states:
            synchronize(device)  # else Ctrl-C would wait for all that is queued
    except KeyboardInterrupt:
        if not result.steps:
            raise
    result.seconds = clock.now() - begun_s
    return result
