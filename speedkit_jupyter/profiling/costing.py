"""Calls of a step that are made to learn what its modules and operators cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from speedkit_jupyter.machines.fp32_precision import MATMUL_PRECISION, read
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.profiling.costs import Costs, costs
from speedkit_jupyter.profiling.counted import Work, counted
from speedkit_jupyter.profiling.module_calls import ModuleCalls
from speedkit_jupyter.profiling.traced import Trace

if TYPE_CHECKING:
    import torch

# Up to so many calls are traced; the next one is begun where so many calls' time is left.
MOST_TRACED, ROOM = 5, 4


class Costing:
    """`call` makes the step once, `settle` puts it back to where it began; `names` are those of
    modules by their ids, `kinds` their classes by these names.
    """

    def __init__(
        self,
        call: Callable[[], object],
        settle: Callable[[], object],
        device: torch.device,
        names: Mapping[int, str],
        kinds: Mapping[str, str],
    ) -> None:
        self._call, self._settle, self._device = call, settle, device
        self._modules, self._kinds = ModuleCalls(names), kinds

    def found(self, call_s: float, budget: Budget) -> Costs:
        """One call is counted, then as many are traced as the budget allows, at least one.

        `call_s` are the seconds of a plain one. Raises StepError beside another profiler.
        """
        __tracebackhide__ = True
        work, trace = self._counted(), Trace()
        operators = {one.place.operator for one in work}
        while trace.calls < MOST_TRACED and (not trace.calls or budget.allows(ROOM * call_s)):
            self._settle()
            trace.add(self._call, self._modules, self._device, operators)
        return costs(trace, work, self._kinds, self._device, _setting(), call_s)

    def _counted(self) -> Counter[Work]:
        """Nothing where some code does not allow the dispatch mode that counts."""
        with suppress(Exception):
            self._settle()
            return counted(self._call, self._modules)
        return Counter()


def _setting() -> str:
    """How float32 products are made: `fp32`, or as torch calls it."""
    precision = str(read()[MATMUL_PRECISION])
    return "fp32" if precision == "highest" else precision
