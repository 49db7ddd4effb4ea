"""The reference in float64, and what rounding explains: by itself, and by controls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from speedkit_jupyter.checking.agreement import Explained, rows
from speedkit_jupyter.checking.calls import Drawn, Here, Taken, Values
from speedkit_jupyter.measure.checks import reference, rounding
from speedkit_jupyter.support.torch_private import tree_map


class Truth:
    """What the reference gives in float64; where it can't be run so, its own values."""

    def __init__(self, side: Here) -> None:
        self.side = side
        self._wide = partial(reference.in_float64, [side.function] if side.state else [])

    def values(self, drawn: Drawn, own: Taken, explained: Explained) -> Values:
        """Return the true values of a call, and note what rounding explains."""
        wide = _widened(drawn)
        found = self._run(wide, self._wide)
        truth = found if found is not None and _shapes(found) == _shapes(own) else own
        explained.add(rows(own.values, truth.values))
        for to_nearest in (False, True):
            control = partial(rounding.rounded, explained.precision, to_nearest)
            if explained.precision == "fp32":
                run = self._run(drawn, control)
            else:
                run = self._run(wide, self._wide, control)
            if run is not None and _shapes(run) == _shapes(truth):
                explained.add(rows(run.values, truth.values))
        return truth.values

    def _run(
        self, drawn: Drawn, *around: Callable[[], AbstractContextManager[Any]]
    ) -> Taken | None:
        """Return what the reference gives; None where the surroundings don't allow it."""
        with suppress(Exception), ExitStack() as stack:
            self.side.prepare([drawn])
            for surrounding in around:
                stack.enter_context(surrounding())
            self.side.run()
            return self.side.take(full=True)[0]
        return None


def _shapes(taken: Taken) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in taken.values.items()}


def _widened(drawn: Drawn) -> Drawn:
    """Return it in float64."""

    def wide(value: Any) -> Any:
        is_float = hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.double() if is_float else value

    arguments = tree_map(wide, dict(drawn.arguments))
    return replace(drawn, arguments=arguments, cotangents=tree_map(wide, drawn.cotangents))
