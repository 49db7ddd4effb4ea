"""What a plan that changes the optimizer's step alone leaves as it is: all that comes before it."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.measure.checks.comparing.deviation import Deviation
from speedkit_jupyter.measure.checks.comparing.errors import Errors, errors
from speedkit_jupyter.measure.checks.judging.verdicts import Judge
from speedkit_jupyter.measure.checks.judging.yardstick import Yardstick
from speedkit_jupyter.measure.checks.observing.course import Course

# The same kernels on the same numbers give the same bits, unless memory lies elsewhere.
SAME, OF_OWN = 1e-6, 4.0


def otherwise(course: Course, known: Judge, exactly: bool = False) -> str:
    """What it computes otherwise than the baseline, before the optimizer; empty where nothing.

    With `exactly` a single bit counts.
    """
    for number, yardstick in known.stretches.items():
        if number not in course.stretches or yardstick.void:
            continue
        deviations = errors(
            course.stretches[number], known.baseline.stretches[number], yardstick.dropped
        )
        for name, value, own in _pairs(deviations, yardstick) if deviations.fits else ():
            limit = 0.0 if exactly else SAME + OF_OWN * own
            if not value.distance <= limit:
                return (
                    f"{name} off from the baseline's by {value.distance:.2g}, where the plan "
                    f"changes nothing but the optimizer ({limit:.2g})"
                )
    return ""


def _pairs(deviations: Errors, known: Yardstick) -> Iterator[tuple[str, Deviation, float]]:
    """Each tensor, by its name, and what the baseline itself is off by there."""
    own = known.own
    for index, deviation in enumerate(deviations.numbers):
        theirs = own.numbers[index].distance if index < len(own.numbers) else 0.0
        yield deviations.names[index], deviation, theirs
    for which, deviation in zip(deviations.which, deviations.gradients, strict=True):
        mine = own.gradient_of(which)
        name = f"gradient of {known.names.parameter(which)}"
        yield name, deviation, 0.0 if mine is None else mine.distance
