"""Find, by trials, the fastest way to compute steps with a drift within the tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.catalog.facts.model import is_convolution
from speedkit_jupyter.extras.rollouts.programs import Program, StateRule, Way
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.rounds import clock, statistics
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds, block_length
from speedkit_jupyter.rounds.statistics import Ratio, least_pairs, paired_ratio
from speedkit_jupyter.support.exceptions import in_a_line

# Fewest rounds before the interval may decide, and most rounds.
ROUNDS = (10, 30)
# Compiling takes more than these seconds; it is not tried if all planned rollouts take less.
COMPILING_S = 5.0
# Error probability of each test: an eighth of the usual one, because many tests are made.
ERROR = statistics.ERROR / 8
# Words that at most change the order of operations. Ways of only these words may drift twice as
# far as one rounding of the first state: they may round up where the plain way rounds down.
EXACT_WORDS, ROUNDINGS = {"channels_last", "compile", "cuda_graph"}, 2.0
# Drift is measured on the first SAMPLES samples, after fewer than 2 * POINTS of the steps.
POINTS, SAMPLES = 40, 2
# Extrapolation fits the errors of the later half of compared steps, at least LEAST_POINTS, and
# covers at most FAR times the last step. The result is multiplied by MARGIN: a fit is no proof.
LEAST_POINTS, FAR, MARGIN = 6, 10.0, 2.0


@dataclass
class Drift:
    """Relative `errors` of the worst sample after each of `steps`, compared with the plain loop."""

    horizon: int  # the number of steps in the rollout
    steps: list[int]
    errors: list[float]

    @property
    def is_whole(self) -> bool:
        return self.steps[-1] >= self.horizon

    @property
    def largest(self) -> float:
        """Return the largest error up to the horizon, measured or extrapolated; inf if unknown."""
        if not all(map(math.isfinite, self.errors)):
            return math.inf
        measured = max(self.errors)
        return measured if self.is_whole else max(measured, MARGIN * self._extrapolated())

    def _extrapolated(self) -> float:
        """Extrapolate by the better of a power and an exponential law; return inf if unreliable."""
        half = len(self.steps) // 2
        steps, errors = np.array(self.steps[half:], float), np.array(self.errors[half:])
        if not errors.any():
            return 0.0
        if len(steps) < LEAST_POINTS or self.horizon > FAR * steps[-1]:
            return math.inf
        logs = np.log(np.maximum(errors, np.finfo(float).tiny))
        fits = []
        for scale in (np.log, np.asarray):
            line = np.polynomial.Polynomial.fit(scale(steps), logs, 1)
            miss = float(np.square(line(scale(steps)) - logs).sum())
            fits.append((miss, float(line(scale(float(self.horizon))))))
        return math.exp(min(min(fits)[1], 700.0))

    def to_dict(self) -> dict[str, Any]:
        largest = self.largest if math.isfinite(self.largest) else None
        return {**vars(self), "largest": largest, "is_whole": self.is_whole}


def compared_steps(steps: int) -> list[int]:
    """Return 1, `steps` and evenly spaced numbers between; fewer than 2 * POINTS in all."""
    gap = max(steps // POINTS, 1)
    return sorted({1, *range(gap, steps + 1, gap), steps})


def states_at(program: Program, x: torch.Tensor, steps: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the state after each number of steps in the increasing sequence `steps`."""
    done = 0
    for step in steps:
        x, done = program.advance(x, step - done), step
        yield x


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference ÷ the norm of `exact`, for the worst sample."""
    with torch.inference_mode():
        rows = len(exact) if exact.ndim > 1 else 1
        # MPS has no float64.
        wide = torch.float32 if exact.device.type == "mps" else torch.float64
        exact, found = (one.to(wide).reshape(rows, -1) for one in (exact, found))
        missed, size = (found - exact).norm(dim=1), exact.norm(dim=1)
        return float(torch.where(missed == 0, missed, missed / size).max())


@dataclass
class WayTrial:
    """The measurements of a way: its speed-ups over the best earlier way and the plain loop."""

    way: Way
    over_best: Ratio | None = None
    over_plain: float = 1.0
    drift: Drift | None = None
    step_s: float | None = None
    why_not: str = ""  # the reason for rejecting the way; empty if accepted

    def to_dict(self) -> dict[str, Any]:
        found, drift = self.over_best, self.drift and self.drift.to_dict()
        over_best = found and [found.median, found.low, found.high]
        return {**vars(self), "way": self.way.name, "over_best": over_best, "drift": drift}


@dataclass
class WaySearch:
    """Find the fastest way to compute rollout steps whose drift is within the tolerance.

    Call `run()`, then read `best`, `program` and `trials`. Steps are timed with the whole batch
    `x`, on the operator's device; drift is measured on the batch's first samples.
    """

    operator: Callable[..., Any]
    policy: StateRule
    x: torch.Tensor
    steps: int
    tolerance: float
    budget_s: float | None = None
    runs: int = 1  # planned rollouts
    trials: list[WayTrial] = field(default_factory=list)

    def run(self) -> None:
        """Try adding each candidate word to the best way; set `best`, `program` and `trials`."""
        plain = Program(self.operator, self.policy, Way())
        step_s = _step_s(plain, self.x)
        self._budget = Budget(self.budget_s or max(30.0, 0.2 * step_s * self.steps))
        best = WayTrial(Way(), step_s=step_s)
        self.trials, self.best, self.program = [best], best, plain
        # Plain states are computed twice, with and without one rounding, in half of the budget.
        few = self._few = self.x[:SAMPLES]
        most = self._budget.seconds / 4 / max(_step_s(plain, few), 1e-9)
        self._steps = compared_steps(max(min(self.steps, int(most)), 1))
        self._states = [state.cpu() for state in states_at(plain, few, self._steps)]
        # Rounding the first state once shows the uncertainty of the plain way itself.
        noise = torch.finfo(few.dtype).eps * torch.sign(torch.randn_like(few))
        self.rounding = self.drift_of(plain, few + few * noise)
        for more in self._candidates():
            way = self.best.way.plus(more)
            if any(one.way == way for one in self.trials):
                continue
            trial = WayTrial(way)
            self.trials.append(trial)
            if self._budget.left_s < 0:
                trial.why_not = "left out: the budget was spent (budget_s=)"
            elif "compile" in way.words and self.runs * self.steps * step_s < COMPILING_S:
                trial.why_not = "left out: compiling takes longer than these steps (runs=)"
            else:
                try:
                    trial.why_not = self._try(trial)
                except Exception as error:
                    trial.why_not = f"failed: {in_a_line(error)}"

    def _candidates(self) -> list[str]:
        model: Any = self.operator
        is_module = isinstance(model, torch.nn.Module)
        is_low = is_module and self.x.dtype is torch.float32 and has_bf16(self.x.device)
        layout = ["channels_last"] * (is_module and any(map(is_convolution, model.modules())))
        # CUDA graphs first: while launches dominate, less computation gains nothing.
        words = ["cuda_graph"] * self.x.is_cuda + ["bf16"] * is_low
        # The layout is tried again after compile, because compiled code reads it differently.
        return [*words, *layout, "compile", *layout]

    def _allowed(self, way: Way) -> float:
        # In a chaotic system, the states on two machines differ as much as after one rounding.
        is_exact = set(way.words) <= EXACT_WORDS
        return max(self.tolerance, ROUNDINGS * max(self.rounding.errors) if is_exact else 0.0)

    def _try(self, trial: WayTrial) -> str:
        """Time a way and compare its states. Return the reason to reject it, or make it `best`."""
        best, program = self.best, Program(self.operator, self.policy, trial.way)
        begun_s = clock.now()
        program.advance(self.x, 1)
        synchronize(self.x.device)
        self._budget.exclude(clock.now() - begun_s)  # the first call may compile
        trial.over_best, best.step_s, trial.step_s = self._raced(program)
        trial.over_plain = best.over_plain * trial.over_best.median
        if trial.over_best.low <= 1:
            return "not proven faster"
        trial.drift = self.drift_of(program)
        if not trial.drift.largest <= self._allowed(trial.way):
            return "drifts too far"
        self.best, self.program = trial, program
        return ""

    def _raced(self, program: Program) -> tuple[Ratio, float, float]:
        """Time a program against the best; return its speed-up, and both step times (best, new)."""
        device = self.x.device
        one_s = clock.timed(partial(program.advance, self.x, 1), device)
        steps = min(block_length(one_s), self.steps)
        runs = [partial(one.advance, self.x, steps) for one in (self.program, program)]
        times: list[list[float]] = [[], []]
        rounds = ShuffledRounds((0, 1), most=ROUNDS[1])
        for order in rounds:
            for at in order:
                times[at].append(clock.timed(runs[at], device))
            if rounds.number >= max(ROUNDS[0], least_pairs(ERROR)):
                found = paired_ratio(times[0], times[1], ERROR)
                if found.verdict in ("faster", "slower") or self._budget.left_s < 0:
                    break
        return found, median(times[0]) / steps, median(times[1]) / steps

    def drift_of(self, program: Program, x: torch.Tensor | None = None) -> Drift:
        states = states_at(program, self._few if x is None else x, self._steps)
        pairs = zip(states, self._states, strict=True)
        errors = [distance(state.cpu(), exact) for state, exact in pairs]
        return Drift(self.steps, self._steps, errors)


def _step_s(program: Program, x: torch.Tensor) -> float:
    """Run two steps; return the seconds of the second step, because the first is often slow."""
    program.advance(x, 1)
    return clock.timed(partial(program.advance, x, 1), x.device)


def has_bf16(device: torch.device) -> bool:
    hardware = Hardware.current()
    found = hardware.cpu if device.type == "cpu" else hardware.accelerator(str(device))
    return found is not None and found.bf16
