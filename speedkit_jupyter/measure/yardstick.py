"""The steps by which variants are judged: the baseline, twice; the reference; the controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure import draws, labels, roofline, rounding
from speedkit_jupyter.measure.accuracy import Yardstick
from speedkit_jupyter.measure.buffers import settle
from speedkit_jupyter.measure.deviation import Errors, errors
from speedkit_jupyter.measure.isolation import State
from speedkit_jupyter.measure.observation import Observation
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.tolerance import Tolerance

if TYPE_CHECKING:
    import torch

Surrounding = Callable[[], AbstractContextManager[object]]
# Two runs of the same step, and the step in float64, are alike where outputs and gradients differ
# by less; a GPU's kernels add up in another order each time.
ALIKE_OUTPUT, ALIKE_GRADIENT = 2e-4, 1e-2
# The controls of a lowered precision round at different places; of long steps one is enough.
SCALES, LONG_S = (1.0, 1.37), 0.05
# Before a variant is accused narrowly there are more of them.
MORE_SCALES = (1.13, 1.71, 1.23, 1.57, 1.91)


class Steps:
    """Runs single steps of variants from the user's own state, watched, and puts all back.

    `dropout_off` and `is_random` are known once the baseline ran; `drawn_inside` names kernels
    whose draws can't be made to agree.
    """

    def __init__(self, start: State, check: Sequence[str]) -> None:
        self._start, self._check = start, check
        self.dropout_off = self.is_random = False
        self.drawn_inside: set[str] = set()

    def observed(
        self, runner: Runner, *surroundings: Surrounding, stop_at_step: bool = False
    ) -> Observation:
        """One step of a variant."""
        __tracebackhide__ = True
        self._start.restore()  # before the plan is applied: settings are part of the state
        try:
            with ExitStack() as stack:
                stack.enter_context(runner.applied())
                models = runner.step.models
                self.dropout_off = stack.enter_context(draws.without_dropout(models))
                for one in surroundings:
                    stack.enter_context(one())
                if self.is_random and not is_compiled(runner):
                    stack.enter_context(self._replayed())
                return runner.observed(self._check, stop_at_step=stop_at_step)
        finally:
            self._start.restore()

    def twice(self, runner: Runner) -> tuple[Observation, Observation]:
        """The same step two times; whether it draws from torch's generators is known then."""
        __tracebackhide__ = True
        self.is_random = False
        counts: list[bool] = []
        first = self.observed(runner, lambda: _counting(counts))
        self.is_random = any(counts)
        if self.is_random:
            first = self.observed(runner)
        return first, self.observed(runner)

    def alike(self, runner: Runner, kept: Mapping[str, Any]) -> bool:
        """Whether the baseline gives what it gave when this was kept, bit for bit."""
        __tracebackhide__ = True
        self.is_random, self.drawn_inside = kept["random"]
        found = errors(self.observed(runner), kept["yardstick"].baseline, frozenset())
        off = (found.output.distance, found.gradient.distance)
        return found.fits and not any(off) and not any(count for count, _ in found.differing)

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        with draws.replayed() as beyond:
            yield
        self.drawn_inside |= set(beyond)


def is_compiled(runner: Runner) -> bool:
    """By the plan or by the user: such code draws its own numbers."""
    if runner.record.applied.get("compile"):
        return True
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
        for model in runner.step.models
        for part in model.modules()
    )


def made(steps: Steps, runners: Sequence[Runner]) -> Yardstick:
    """What these variants are judged by; the first is the baseline.

    The stages of a search begin in the same state: where the baseline gives the same bits as it
    did before, the other steps need not be run again.
    """
    __tracebackhide__ = True
    kept = runners[0].step.kept
    known: Yardstick | None = kept.get("yardstick")
    if known is not None and steps.alike(runners[0], kept):
        extend(known, steps, runners)
        return known
    known = kept["yardstick"] = _made(steps, runners)
    kept["random"] = steps.is_random, steps.drawn_inside
    return known


def _made(steps: Steps, runners: Sequence[Runner]) -> Yardstick:
    __tracebackhide__ = True
    runner = runners[0]
    baseline, again = steps.twice(runner)
    void, dropped = _unlike(again, baseline)
    same = errors(again, baseline, dropped)
    settle(again, baseline)
    if void:
        return Yardstick(baseline, baseline, same, void=void)
    reference = _reference(steps, runner)
    exact = reference is not None and _explained(steps, runner, reference, baseline, dropped)
    known = reference if reference is not None and exact else baseline
    own = errors(baseline, known, dropped)
    found = Yardstick(
        known,
        baseline,
        own,
        dropped=dropped,
        names=labels.of(runner.step.models, runner.step.optimizers),
    )
    extend(found, steps, runners)
    return found


def extend(known: Yardstick, steps: Steps, runners: Sequence[Runner]) -> None:
    """Tolerances for the precisions of these variants, where they are not known yet."""
    if known.void:
        return
    first, tolerances = runners[0], dict(known.tolerances)
    for runner in runners:
        precision = runner.precision
        if precision in tolerances:
            continue
        in_float64 = known.reference is not known.baseline
        if runner is first and len(runners) > 1 and in_float64:  # judges itself, by its own errors
            tolerances[precision] = Tolerance(precision, [known.own])
            continue
        tolerances[precision] = _tolerance(known, steps, first, precision, runner.scale())
    known.tolerances = tolerances


def _tolerance(
    known: Yardstick, steps: Steps, first: Runner, precision: str, loss_scale: float
) -> Tolerance:
    in_float64 = known.reference is not known.baseline
    scales = SCALES[:1] if first.step_s > LONG_S else SCALES
    if precision == "fp32":  # float32 itself, where there is no float64, rounds elsewhere
        scales = (1.0,) if in_float64 else (SCALES[1],)
    ways = [partial(rounding.rounded, precision, scale, loss_scale) for scale in scales]
    controls = [_control(steps, first, way, in_float64) for way in ways]
    found = [errors(one, known.reference, known.dropped) for one in controls if one is not None]
    own = [known.own] if in_float64 or precision == "fp32" else []
    return Tolerance(precision, [*(one for one in found if one.fits), *own])


def more(known: Yardstick, steps: Steps, runners: Sequence[Runner], precision: str) -> list[Errors]:
    """Further controls, which round elsewhere."""
    first, in_float64 = runners[0], known.reference is not known.baseline
    scales = MORE_SCALES[: 2 if first.step_s > LONG_S else None]
    loss_scale = next((one.scale() for one in runners if one.precision == precision), 1.0)
    ways = [partial(rounding.rounded, precision, scale, loss_scale) for scale in scales]
    controls = [_control(steps, first, way, in_float64) for way in ways]
    found = [errors(one, known.reference, known.dropped) for one in controls if one is not None]
    return [one for one in found if one.fits]


def _control(
    steps: Steps, runner: Runner, rounded: Surrounding, in_float64: bool
) -> Observation | None:
    models: Sequence[torch.nn.Module] = runner.step.models
    exact: list[Surrounding] = [lambda: rounding.in_float64(models)] if in_float64 else []
    try:
        return steps.observed(
            runner,
            roofline.eager,
            *exact,
            rounded,
            stop_at_step=True,
        )
    except Exception:  # code that doesn't allow a dispatch mode
        return None


def _reference(steps: Steps, runner: Runner) -> Observation | None:
    models = runner.step.models
    try:
        return steps.observed(
            runner, roofline.eager, lambda: rounding.in_float64(models), stop_at_step=True
        )
    except Exception:  # an operation without float64, or code that asks for float32
        return None


def _explained(
    steps: Steps,
    runner: Runner,
    reference: Observation,
    baseline: Observation,
    dropped: frozenset[int],
) -> bool:
    """Whether float64 computes the same as the baseline, but for what float32 rounds."""
    found = errors(baseline, reference, dropped)
    if not found.fits:
        return False
    if found.output.distance < ALIKE_OUTPUT and found.gradient.distance < ALIKE_GRADIENT:
        return True
    control = _control(steps, runner, lambda: rounding.rounded("fp32"), in_float64=True)
    seen = Errors(fits=False) if control is None else errors(control, reference, dropped)
    return seen.fits and not Tolerance("fp32", [seen]).beyond(found)


def _unlike(again: Observation, first: Observation) -> tuple[str, frozenset[int]]:
    """Why two runs of the same step can't be compared; or the outputs that are others each time."""
    found = errors(again, first, frozenset())
    if not found.fits:
        return "the step gives others results in number or shape each time it runs", frozenset()
    if not found.gradient.distance <= ALIKE_GRADIENT and _finite(found.gradient.distance):
        off = f"gradients off by {found.gradient.distance:.2g}"
        return f"the step computes something else each time it runs ({off})", frozenset()
    calls = len(found.numbers) - len(first.outputs.numbers)
    unlike = [
        i for i, one in enumerate(found.numbers) if ALIKE_OUTPUT < one.distance < float("inf")
    ]
    returned = not any(one is not None for one in first.gradients)
    if not unlike or (returned and min(unlike) >= calls and len(unlike) < len(found.numbers)):
        return "", frozenset(i - calls for i in unlike)
    off = f"output off by {max(found.numbers[i].distance for i in unlike):.2g}"
    return f"the step computes something else each time it runs ({off})", frozenset()


def _finite(value: float) -> bool:
    return value < float("inf")


@contextmanager
def _counting(counts: list[bool]) -> Iterator[None]:
    """Whether torch's generators were drawn from in the block."""
    import torch

    def states() -> list[torch.Tensor]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *cuda]

    before = states()
    yield
    after = states()
    counts.append(
        len(before) != len(after)
        or not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    )
