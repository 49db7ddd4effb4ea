"""What variants are judged by: the baseline, twice; the reference; the controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks import roofline
from speedkit_jupyter.measure.checks.comparing import labels
from speedkit_jupyter.measure.checks.comparing.buffers import settle
from speedkit_jupyter.measure.checks.comparing.errors import Errors, errors
from speedkit_jupyter.measure.checks.comparing.tolerance import Tolerance
from speedkit_jupyter.measure.checks.judging.extrapolated import extrapolated, with_alike
from speedkit_jupyter.measure.checks.judging.verdicts import Judge
from speedkit_jupyter.measure.checks.judging.yardstick import Yardstick
from speedkit_jupyter.measure.checks.observing.course import LEFT, Course
from speedkit_jupyter.measure.checks.observing.observation import Observation
from speedkit_jupyter.measure.checks.observing.trials import Steps, Surrounding
from speedkit_jupyter.measure.checks.reference import kernels_of_layouts, promotion, rounding
from speedkit_jupyter.measure.checks.values.parameters import parameters_of
from speedkit_jupyter.measure.rounds import other_threads
from speedkit_jupyter.measure.rounds.runner import Runner

if TYPE_CHECKING:
    import torch

# Two runs of the same step, and the step in float64, are alike where outputs and gradients differ
# by less; a GPU's kernels add up in another order each time.
ALIKE_OUTPUT, ALIKE_GRADIENT = 2e-4, 1e-2
# The controls of a lowered precision round at different places.
SCALES = (1.0, 1.37)
# Before a variant is accused narrowly there are more of them.
MORE_SCALES = (1.13, 1.71, 1.23, 1.57, 1.91)
# Where all steps have more stretches, the reference and the controls end after SOME (they take many
# times as long): what comes later is judged by what came before.
WHOLE, SOME = 16, 4


def made(steps: Steps, runners: Sequence[Runner]) -> Judge:
    """What these variants are judged by; the first is the baseline.

    The stages of a search begin in the same state: where the baseline gives the same bits as it
    did before, the other steps need not be run again.
    """
    __tracebackhide__ = True
    kept = runners[0].step.kept
    judge: Judge | None = kept.get("yardstick")
    if judge is not None and steps.alike(runners[0], kept):
        extend(judge, steps, runners)
        return judge
    judge = kept["yardstick"] = _made(steps, runners)
    kept["random"] = steps.is_random, steps.drawn_inside
    return judge


def _made(steps: Steps, runners: Sequence[Runner]) -> Judge:
    __tracebackhide__ = True
    runner = runners[0]
    with other_threads.noted(runner.step.models) as calls, rounding.noted_autocast() as entered:
        baseline, again = steps.twice(runner)
    judge = Judge(baseline, {}, own=rounding.lowest(*entered, *_of_parameters(runner)))
    if calls.only_elsewhere:
        judge.void = other_threads.NOT_REACHED
        return judge
    if again.ends != baseline.ends:
        judge.void = "the step takes another number of optimizer steps each time it runs"
        return judge
    limit = _limit(baseline)
    # Of a thread of the step's own float64 would reach the model, and not its input.
    reference = None if calls.in_pythons else _reference(steps, runner, limit)
    covered = _covered(steps, runner, reference, judge, again, limit)
    names = labels.of(runner.step.models, runner.step.optimizers)
    for number, stretch in baseline.stretches.items():
        void, dropped = _unlike(again.stretches[number], stretch)
        settle(again.stretches[number], stretch)
        fits = reference is not None and number in covered
        there = reference.stretches[number] if reference is not None and fits else stretch
        same = again.stretches[number] if not fits else stretch
        own = Errors() if void else errors(same, there, dropped)
        judge.stretches[number] = Yardstick(
            there, stretch, own, void=void, dropped=dropped, names=names
        )
    judge.covered = covered
    extend(judge, steps, runners)
    return judge


def extend(known: Judge, steps: Steps, runners: Sequence[Runner]) -> None:
    """Tolerances for the precisions of these variants, where they are not known yet."""
    if known.void or known.stretches[0].void:
        return
    first = runners[0]
    limit = _limit(known.baseline)
    for runner in runners:
        precision = known.judged_in(runner.precision)
        if precision in known.precisions:
            continue
        known.precisions.add(precision)
        itself = runner is first and len(runners) > 1 and precision == runner.precision
        if itself and known.covered:
            controls: list[Course] = []
        else:
            controls = _controls(known, steps, first, precision, runner.scale(), limit)
        known.controls[precision] = controls
        by_number = {
            number: _seen_in(known, number, controls, precision)
            for number, yardstick in known.stretches.items()
            if not yardstick.void
        }
        for number in by_number:
            yardstick = known.stretches[number]
            evidence = with_alike(number, by_number, known.baseline.stretches)
            evidence = evidence or extrapolated(number, by_number, known.baseline.stretches)
            tolerances = {**yardstick.tolerances, precision: Tolerance(precision, evidence)}
            yardstick.tolerances = tolerances


def _seen_in(known: Judge, number: int, controls: Sequence[Course], precision: str) -> list[Errors]:
    """How far the controls are off in a stretch, and the baseline itself."""
    yardstick = known.stretches[number]
    courses = [course.stretches[number] for course in controls if number in course.stretches]
    evidence = [errors(stretch, yardstick.reference, yardstick.dropped) for stretch in courses]
    evidence = [control for control in evidence if control.fits]
    if not evidence and (controls or (known.covered and number not in known.covered)):
        return []
    own = [yardstick.own] if number in known.covered or precision == "fp32" else []
    return [*evidence, *(deviations for deviations in own if deviations.fits)]


def more(known: Judge, steps: Steps, runners: Sequence[Runner], precision: str) -> list[Course]:
    """Further controls, which round elsewhere."""
    precision = known.judged_in(precision)
    first = runners[0]
    scales = MORE_SCALES
    judged_in = {known.judged_in(runner.precision): runner.scale() for runner in reversed(runners)}
    loss_scale = judged_in.get(precision, 1.0)
    limit = _limit(known.baseline)
    compute = kernels_of_layouts.in_the_other_layout if precision == "fp32" else rounding.exactly
    return _rounded(known, steps, first, precision, scales, loss_scale, limit, compute=compute)


def _controls(
    known: Judge, steps: Steps, first: Runner, precision: str, loss_scale: float, limit: int | None
) -> list[Course]:
    # float32 itself, where there is no float64, rounds elsewhere
    of_float32 = SCALES[:1] if known.covered else SCALES[1:]
    scales = of_float32 if precision == "fp32" else SCALES
    return _rounded(known, steps, first, precision, scales, loss_scale, limit)


def _rounded(
    known: Judge, steps: Steps, first: Runner, precision: str, scales: Sequence[float],
    loss_scale: float, limit: int | None, in_float64: bool = False,
    compute: Callable[[Any, Any, Any], Any] = rounding.exactly,
) -> list[Course]:  # fmt: skip
    in_float64 = in_float64 or bool(known.covered)
    suspends = not _of_parameters(first)
    ways = [
        partial(rounding.rounded, precision, scale, loss_scale, suspends, compute)
        for scale in scales
    ]
    courses = [_control(steps, first, way, in_float64, limit) for way in ways]
    return [course for course in courses if course is not None]


def _control(
    steps: Steps, runner: Runner, rounded: Surrounding, in_float64: bool, limit: int | None
) -> Course | None:
    models: Sequence[torch.nn.Module] = runner.step.models
    exact: list[Surrounding] = [runner.guarded, promotion.without_wrappers]
    exact += [lambda: promotion.in_float64(models)] if in_float64 else []
    with suppress(Exception):  # code that doesn't allow a dispatch mode
        return steps.observed(runner, roofline.eager, *exact, rounded, limit=limit)
    return None


def _reference(steps: Steps, runner: Runner, limit: int | None) -> Course | None:
    models = runner.step.models
    with suppress(Exception):  # an operation without float64, or code that asks for float32
        return steps.observed(
            runner,
            runner.guarded,
            roofline.eager,
            promotion.without_wrappers,
            lambda: promotion.in_float64(models),
            limit=limit,
        )
    return None


def _of_parameters(runner: Runner) -> set[str]:
    held = parameters_of([*runner.step.models, *runner.step.optimizers])
    return rounding.of_parameters(held)


def _limit(baseline: Course) -> int | None:
    """How many stretches the reference and the controls are run for; None for all."""
    if baseline.count <= WHOLE:
        return None
    first = [number for number in baseline.stretches if number < baseline.ends[0]]
    telling = [n for n in first[:SOME] if baseline.stretches[n].has_numbers()]
    telling = [n for n in telling if baseline.stretches[n].role != LEFT]
    return max(telling, default=first[0]) + 1


def _covered(
    steps: Steps, runner: Runner, reference: Course | None, known: Judge, again: Course,
    limit: int | None,
) -> frozenset[int]:  # fmt: skip
    """The stretches, from the first one on, in which float64 computes the same as the baseline."""
    baseline, own = known.baseline, known.own
    numbers: list[int] = []
    controls: list[Course] | None = None
    for number, stretch in baseline.stretches.items():
        if reference is None or number not in reference.stretches:
            break
        there = reference.stretches[number]
        dropped = _unlike(again.stretches[number], stretch)[1]
        if not _close(stretch, there, dropped):
            if controls is None:
                scales = SCALES if own != "fp32" else SCALES[:1]
                controls = _rounded(known, steps, runner, own, scales, runner.scale(), limit, True)
            if not _explained(controls, own, number, there, stretch, dropped):
                if stretch.role or (number and not stretch.has_gradients()):
                    continue  # what it returns is another's concern
                break
        numbers.append(number)
    return frozenset(numbers)


def _close(baseline: Observation, reference: Observation, dropped: frozenset[int]) -> bool:
    deviations = errors(baseline, reference, dropped)
    close = (
        deviations.output.distance < ALIKE_OUTPUT and deviations.gradient.distance < ALIKE_GRADIENT
    )
    return deviations.fits and close


def _explained(
    controls: Sequence[Course],
    precision: str,
    number: int,
    reference: Observation,
    baseline: Observation,
    dropped: frozenset[int],
) -> bool:
    """Whether float64 computes the same as the baseline, but for what its precision rounds."""
    deviations = errors(baseline, reference, dropped)
    courses = [course.stretches[number] for course in controls if number in course.stretches]
    evidence = [errors(stretch, reference, dropped) for stretch in courses]
    evidence = [control for control in evidence if control.fits]
    return (
        deviations.fits and bool(evidence) and not Tolerance(precision, evidence).beyond(deviations)
    )


def _unlike(again: Observation, first: Observation) -> tuple[str, frozenset[int]]:
    """Why two runs of the same step can't be compared; or the outputs that are others each time."""
    deviations = errors(again, first, frozenset())
    if not deviations.fits:
        return "the step gives others results in number or shape each time it runs", frozenset()
    if not deviations.gradient.distance <= ALIKE_GRADIENT and _finite(deviations.gradient.distance):
        off = f"gradients off by {deviations.gradient.distance:.2g}"
        return f"the step computes something else each time it runs ({off})", frozenset()
    calls = len(deviations.numbers) - len(first.outputs.numbers)
    unlike = [
        i
        for i, deviation in enumerate(deviations.numbers)
        if ALIKE_OUTPUT < deviation.distance < float("inf")
    ]
    returned = not any(gradient is not None for gradient in first.gradients)
    if not unlike or (returned and min(unlike) >= calls and len(unlike) < len(deviations.numbers)):
        return "", frozenset(i - calls for i in unlike)
    off = f"output off by {max(deviations.numbers[i].distance for i in unlike):.2g}"
    return f"the step computes something else each time it runs ({off})", frozenset()


def _finite(value: float) -> bool:
    return value < float("inf")
