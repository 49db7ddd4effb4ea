"""Apply an operator to its own result many times, check the arguments, and report the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.extras.rollouts.programs import Program, Way, buffers_kept, policy_of, way_of
from speedkit_jupyter.extras.rollouts.way_choice import Drift, WaySearch, WayTrial
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.report import rendering
from speedkit_jupyter.report.elements import BLANK, Picture, Row, Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.comparison import Shown, environment
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.units import between, count, ratio, seconds, share

COLUMNS = ("", "way", "a step", "vs. best before", INTERVAL, "drift", "")


@dataclass(repr=False)
class Rollout(Shown):
    """The `state` after `steps` of the `asked` steps, and the `way` in which they were computed."""

    REPORT = f"{__name__}:rollout_report"

    state: torch.Tensor
    asked: int
    way: Way
    tolerance: float
    steps: int = 0
    seconds: float = 0.0  # of all steps; includes compiling, unless tuned
    trials: list[WayTrial] = field(default_factory=list)  # the plain loop, then the ways tried
    rounding: float = 0.0  # largest change of states by one rounding of the first state
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.steps == self.asked

    @property
    def taken(self) -> WayTrial | None:
        return next((one for one in self.trials if one.way.words == self.way.words), None)

    def drift(self) -> Any:
        """Return a figure of drifts; raise ArgumentError if no drift was measured."""
        drifts = {one.way.name: one.drift for one in self.trials if one.drift is not None}
        if not drifts:
            raise ArgumentError("no drift was measured: tune=True measures faster ways")
        axes = rendering.axes_of(3.2, "steps")
        for name, drift in drifts.items():
            axes.plot(drift.steps, drift.errors, label=name, linewidth=1.5)
        axes.axhline(self.tolerance, color=rendering.BAD, linestyle="--", label="allowed")
        axes.set_yscale("log" if self.tolerance > 0 else "linear")
        axes.set_ylabel("distance from the plain loop", color=rendering.NEUTRAL)
        axes.legend(frameon=False, labelcolor=rendering.NEUTRAL)
        return axes.figure

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
) -> Rollout | Iterator[torch.Tensor]:
    """Apply `operator` to `x0`, then to its own result, `steps` times, without gradients.

    Args:
        operator: a module or function from a state to a tensor of the same shape.
        x0: the first state, floating-point, of shape (batch, …). A state in main memory is moved to
            the operator's device, in parts with `micro_batch`.
        steps: the number of steps.
        policy: the next state, from f(x) and x: "autoregressive" is f(x), ("convex", a) is
            a·f(x) + (1 - a)·x, ("residual", dt) is x + dt·f(x); or a function of f(x) and x.
        every: return an iterator over every `every`-th state and the last state.
        way: the way to compute steps: "plain", or words joined by + (bf16, channels_last, compile,
            cuda_graph), or the `way` of a Rollout.
        micro_batch: number of samples at a time, to save memory (default: all).
        tune: search for the fastest way whose states are within `tolerance`, instead of `way`.
        tolerance: the largest difference from the plain states, as a share of the state's norm.
            Ways without bf16 may differ by twice the effect of rounding `x0`, if that is larger.
        budget_s: seconds of tuning except compiling (default: a fifth of the rollout, at least 30).
        runs: the number of planned rollouts of this kind; with more runs, compiling may save time.

    Returns:
        A Rollout, whose `state` has the shape, dtype and device of `x0`; with `every` an iterator.
        Ctrl-C returns a Rollout of the finished steps, if any.

    Raises:
        ArgumentError: an argument does not fit.
        StepError: a number or flag has the wrong type, or `tolerance` or `budget_s` is invalid.

    Example::

        found = rollout(operator, x0, steps=500, policy=("residual", 0.01), tune=True)
        found.state  # the state after 500 steps
    """
    steps, runs = arguments.count("steps", steps), arguments.count("runs", runs)
    every, rule = None if every is None else arguments.count("every", every), policy_of(policy)
    most = arguments.amount("tolerance", tolerance) or 0.0
    budget_s, chosen = arguments.seconds("budget_s", budget_s), way_of(way, micro_batch)
    _check(operator, x0)
    plain = Program(operator, rule, Way())
    few = x0 if chosen.micro_batch is None else x0[: chosen.micro_batch]
    device = plain.device or x0.device
    result = Rollout(x0, steps, chosen, most, environment=environment(device))
    with buffers_kept(operator):
        plain.advance(few, 1)
        if arguments.flag("tune", tune):
            few = few.detach().to(device)
            program = _tuned(result, WaySearch(operator, rule, few, steps, most, budget_s, runs))
        else:
            program = Program(operator, rule, chosen)
    # Up to 50 states per rollout are saved, so that Ctrl-C keeps the finished steps.
    made = _states(program, x0, result, every or -(-steps // 50))
    states = iter(hide_internal_frames(partial(next, made, None)), None)
    return states if every is not None else _drained(result, states, device)


def _check(operator: Any, x0: Any) -> None:
    if not callable(operator):
        raise ArgumentError(f"operator must be callable, not {type(operator).__name__}")
    is_dense = isinstance(x0, torch.Tensor) and x0.layout is torch.strided
    if not is_dense or not x0.is_floating_point():
        raise ArgumentError("x0 must be a tensor of floating-point numbers, not sparse: (batch, …)")
    if not x0.ndim or not x0.numel():
        raise ArgumentError(f"x0 must have a dimension and elements, not {tuple(x0.shape)}")
    for module in operator.modules() if isinstance(operator, torch.nn.Module) else ():
        kind = type(module).__name__
        if module.training and ("Dropout" in kind or "BatchNorm" in kind):
            raise ArgumentError(f"the operator's {kind} is in training mode: call eval() first")


def _tuned(result: Rollout, search: WaySearch) -> Program:
    search.run()
    result.trials, result.rounding = search.trials, max(search.rounding.errors)
    result.way = search.program.way = Way(search.best.way.words, result.way.micro_batch)
    return search.program


def _states(program: Program, x0: torch.Tensor, result: Rollout, every: int) -> Iterator[Any]:
    state = x0.detach()
    while result.steps < result.asked:
        steps = min(every, result.asked - result.steps)
        state = program.advance(state, steps)
        # A copy, because the caller may modify the yielded state.
        result.steps, result.state = result.steps + steps, state.clone()
        yield result.state


def _drained(result: Rollout, states: Iterator[torch.Tensor], device: torch.device) -> Rollout:
    begun_s = clock.now()
    try:
        for _ in states:
            synchronize(device)  # else Ctrl-C would wait for all queued steps
    except KeyboardInterrupt:
        if not result.steps:
            raise
    result.seconds = clock.now() - begun_s
    return result


def rollout_report(result: Rollout) -> Document:
    done = count(result.steps, "step")
    if not result.is_complete:
        done = f"stopped after {result.steps:,} of {count(result.asked, 'step')}"
    headline = f"{done} in {seconds(result.seconds)}: {result.way.name}"
    taken = result.taken
    if taken is not None and taken.over_best is not None:
        headline += f", about {ratio(taken.over_plain)} as fast as the plain loop"
        if taken.drift is not None:
            headline += f", drift {drifted(taken.drift)}"
    rows = [_row(result, one) for one in result.trials]
    content: list[Any] = [Table(COLUMNS, rows, COLUMNS[2:6], wraps=("way",)), *_words(result)]
    if any(one.drift is not None for one in result.trials):
        content.insert(1, Picture(lambda: rendering.as_png(result.drift()), "Drift of each way"))
    return Document(headline, content, result.to_dict())


def drifted(drift: Drift) -> str:
    """Return the largest drift as text; if extrapolated or unknown, with the last compared step."""
    if not math.isfinite(drift.largest):
        return f"unknown beyond {count(drift.steps[-1], 'step')}"
    words = f"{100 * drift.largest:.2g} %"
    return words if drift.is_whole else f"{words} (extrapolated from {drift.steps[-1]:,} steps)"


def _row(result: Rollout, one: WayTrial) -> Row:
    found, is_taken = one.over_best, one is result.taken
    cells = (
        "→" if is_taken else "",
        one.way.name,
        BLANK if one.step_s is None else seconds(one.step_s),
        ratio(found.median) if found else "",
        between(found.low, found.high) if found else "",
        drifted(one.drift) if one.drift else "",
        one.why_not or ("the plain loop" if not found else "taken" if is_taken else "kept"),
    )
    is_bad = one.why_not.startswith(("failed", "drifts"))
    return Row(cells, "good" if is_taken and found else "bad" if is_bad else "plain")


def _words(result: Rollout) -> list[str]:
    if not result.trials:
        return ["Nothing was measured: `tune=True` looks for a faster way."]
    return [
        "Drift is the largest distance from the plain loop over the steps, as a share of the "
        f"state's norm, of the first samples; {share(result.tolerance)} is allowed (tolerance=).",
        "These states are chaotic: one rounding of the first state moves them by "
        f"{share(result.rounding)}. Ways in float32 may drift by twice that.",
    ][: 1 + (result.rounding > result.tolerance)]
