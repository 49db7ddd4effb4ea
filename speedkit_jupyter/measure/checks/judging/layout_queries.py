"""Steps that ask how their tensors lie in memory: the answer is the plan's, and no wrong result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from speedkit_jupyter.measure.checks.observing.course import Course
from speedkit_jupyter.measure.checks.observing.observation import Observation
from speedkit_jupyter.measure.checks.values.leaves import Leaves

QUERIES = ("is_contiguous", "stride", "data_ptr", "storage_offset", "untyped_storage", "dim_order")


@contextmanager
def noted(asked: set[str]) -> Iterator[None]:
    """Adds the names of those that are asked in the block."""
    from torch.overrides import TorchFunctionMode

    class Noting(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, classes: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            if name in QUERIES:
                asked.add(name)
            return function(*args, **(kwargs or {}))

    with Noting():
        yield


def without_exact(course: Course, baseline: Course) -> Course:
    """The same with the baseline's whole numbers and words in place of its own."""
    there = baseline.stretches
    stretches = {
        number: _without_exact(stretch, there[number]) if number in there else stretch
        for number, stretch in course.stretches.items()
    }
    return replace(course, stretches=stretches)


def _without_exact(stretch: Observation, theirs: Observation) -> Observation:
    calls = stretch.calls
    if len(calls) == len(theirs.calls):
        pairs = zip(calls, theirs.calls, strict=True)
        calls = [replace(call, results=_exact_of(call.results, its.results)) for call, its in pairs]
    return replace(stretch, outputs=_exact_of(stretch.outputs, theirs.outputs), calls=calls)


def _exact_of(results: Leaves, theirs: Leaves) -> Leaves:
    return replace(results, exact=theirs.exact, words=theirs.words)
