"""One variant at work."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from speedkit_jupyter.context import SpeedContext
from speedkit_jupyter.measure import accuracy
from speedkit_jupyter.measure.accuracy import Observation
from speedkit_jupyter.measure.comparison import Record
from speedkit_jupyter.measure.isolation import State
from speedkit_jupyter.measure.routing import Router
from speedkit_jupyter.measure.step import Step


@dataclass
class Runner:
    """One variant at work: a context for each model, and the state that its rounds start from."""

    step: Step
    contexts: list[SpeedContext]
    record: Record
    warm: State | None = field(default=None, repr=False)
    _router: Router | None = None

    def applied(self) -> ExitStack:
        """The variant in force; a step that doesn't call the context is routed."""
        stack = ExitStack()
        for context in self.contexts:
            stack.enter_context(context.in_force())
        if not self.step.calls_context:
            self._router = Router(self.contexts, self.step.optimizers)
            stack.enter_context(self._router.installed())
        return stack

    def once(self) -> object:
        """One step."""
        __tracebackhide__ = True
        self.step.rewind()
        if self._router is None:
            return self.step.run(self.contexts[0])
        return self._router.run(partial(self.step.run, self.contexts[0]))

    def observed(self, stop_at_step: bool = False) -> Observation:
        """What one step computes."""
        scalers = [one.grad_scaler for one in self.contexts if one.plan["grad_scaler"].active]

        def scale() -> float:
            return float(scalers[0].get_scale()) if scalers else 1.0

        calls = self.step.calls_context
        with accuracy.observing(self.step.models, scale, calls, stop_at_step) as seen:
            result = self.once()
            if not seen.outputs:
                seen.outputs = accuracy.returned(result)
        return seen

    @property
    def precision(self) -> str:
        """The lowest precision that the variant multiplies in."""
        plan = self.contexts[0].plan
        if plan["precision"].active:
            return str(plan["precision"].value)
        if plan["tf32"].active and plan["tf32"].value != "highest":
            return "bf16" if self.contexts[0].device.type == "cpu" else "tf32"
        return "fp32"

    def state(self) -> State:
        """A copy of what the step changes, as it is now, the variant's own scalers with it."""
        scalers = [one.grad_scaler for one in self.contexts if one.plan["grad_scaler"].active]
        return self.step.state(scalers)
