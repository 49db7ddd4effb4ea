"""The state of the panels of one model: the choice, the run, and its result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from speedkit_jupyter.notebook.namespace import or_learned
from speedkit_jupyter.notebook.panel.background_run import BackgroundRun
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.plans import context
from speedkit_jupyter.plans.applying import Preview, applied_to, apply_speedups, preview
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.naming import CTX, keep, name_of
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison
from speedkit_jupyter.rounds.from_function import step_of
from speedkit_jupyter.search.outcome import MEMORY, Tuning
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import AUTO, BASELINE, Variant
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.support.weak import Alive, Listeners

GONE = "This model no longer exists. `%speedkit panel` shows a panel for another one."
NO_STEP = (
    "nothing to measure yet: run a %%speedbench cell that uses this model, or give a step, as in "
    "Panel(model, step=train_step)"
)


class PanelState:
    """The config that the controls show, and the run in progress. It does not keep the model alive.

    Each of `listeners` is called at every change by a control, a button or a magic.
    """

    def __init__(self, session: Session, model: torch.nn.Module) -> None:
        self.session, self.name = session, name_of(session.names, model)
        self._model = ref(model, self._gone)
        self.given: Alive[torch.optim.Optimizer] | None = None
        # Whether the user has picked something on a control since a plan was applied.
        self._chosen = False
        self.step: Callable[..., object] | str | None = None
        if (applied := self.context) is not None:
            self.config = applied.config
        else:
            self.config = or_learned(SpeedConfig(), model, self.optimizers())
        self._take_found()
        self.run: BackgroundRun | None = None
        self.result: Comparison | None = None
        self.report: Document | None = None
        self.message = ""
        self.listeners = Listeners()
        context.CHANGES.add(self._applied_or_restored)
        session.listeners.add(self._session_changed)

    @classmethod
    def of(cls, session: Session, model: torch.nn.Module) -> PanelState:
        """Return the state that all panels of the model share."""
        choice = session.panels.get(id(model))
        if not isinstance(choice, PanelState) or choice.model is not model:
            choice = session.panels[id(model)] = cls(session, model)
        return choice

    @property
    def model(self) -> torch.nn.Module | None:
        """The model; None once it is gone."""
        return self._model()

    @property
    def busy(self) -> bool:
        return self.run is not None and self.run.state == "running"

    @property
    def found(self) -> Tuning | None:
        """The newest answer of a search for the model."""
        return MEMORY.of(self.model)

    @property
    def context(self) -> SpeedContext | None:
        """The context that is in force on the model."""
        return None if (model := self.model) is None else applied_to(model)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the given optimizers, or the notebook's optimizers that hold the model."""
        if self.given is None:
            return self.session.optimizers_of(self._alive())
        return list(self.given)

    def preview(self) -> Preview:
        """Return the changes that applying would make; raises SpeedKitError without the model."""
        return preview(self._alive(), self.config, self.optimizers())

    def choose(self, path: str, value: Any) -> None:
        """Set one option; nothing is applied. Raises ConfigError."""
        self._chosen = True
        self.config = self.config.changed(path, value)
        self.tell()

    def apply(self) -> None:
        """Put the choice into force, as `%speedkit apply` does."""
        model = self._alive()
        _, applied = apply_speedups(model, self.config, optimizer=self.optimizers())
        self.name = name_of(self.session.names, model, self.name)
        variable = keep(self.session.names, self.name, applied)
        if variable != CTX:
            self.tell(f"`{CTX}` is in use: this context is `{variable}`")

    def restore(self) -> None:
        self._alive()
        while self.context is not None:
            self.context.restore()

    def measure(self, budget_s: float | None) -> None:
        """Baseline against the choice, between the turns of the event loop."""
        name = "this choice" if self.config.to_dict() or self.config.is_alone else AUTO
        variants = [Variant(BASELINE), Variant(name, self.config)]
        self._start(Benchmark(self._step(), variants, budget_s))

    def tune(self, budget_s: float | None) -> None:
        """Start a search; its plan becomes the choice, and is not applied."""
        self._start(PlanSearch(self._step(), budget_s))

    def stop(self) -> None:
        """End the measurement, with the results so far."""
        if self.run is not None:
            self.run.stop()

    @property
    def measured(self) -> str:
        """The name of the step that would be measured; empty without one."""
        if self.step is not None:
            return str(getattr(self.step, "__name__", self.step))
        return "" if self.session.measured is None else self.session.measured.title

    def tell(self, message: str = "") -> None:
        """Tell all panels of a change, with a message for the user."""
        self.message = message
        self.listeners.tell()

    def _alive(self) -> torch.nn.Module:
        if (model := self.model) is None:
            raise SpeedKitError(GONE)
        return model

    def _step(self) -> Step:
        model, cell = self._alive(), self.session.measured
        if self.step is not None:
            names = self.session.names or {}
            step = names.get(self.step) if isinstance(self.step, str) else self.step
            if not callable(step):
                raise StepError(f"there is no function {self.step} any more")
            return step_of(step, model, self.optimizers() or None)
        if cell is None:
            raise StepError(NO_STEP)
        try:
            return cell.step().on(model)
        except StepError as error:
            raise StepError(f"the last %%speedbench cell ({cell.title}): {error}") from None

    def _start(self, engine: Any) -> None:
        if self.busy:
            raise StepError("something is being measured already")
        self.result, self.report, self.message = None, None, ""
        self.run = BackgroundRun(engine, self._ran)
        self.run.start()
        self.listeners.tell()

    def _ran(self, run: BackgroundRun) -> None:
        """Take the result, in a form that keeps no model alive."""
        if run.state != "running":
            result, self.message = run.result, run.message
            self.report = None if result is None else result.report().brief()
            self.result = result.comparison if isinstance(result, Tuning) else result
            if isinstance(result, Tuning) and result.is_settled:
                self._chosen = False
                self._take_found()
            elif isinstance(result, Tuning) and (likely := result.likely_config):
                self.config, self._chosen = likely, True
                self.message = f"Apply would put {result.likely} into force: likely, not proven."
        self.listeners.tell()

    def _applied_or_restored(self, model: torch.nn.Module) -> None:
        if model is self.model:
            if self.context is not None:
                self.config, self._chosen = self.context.config, False
            self.tell()

    def _session_changed(self, topic: str) -> None:
        if topic == "tuned" and not self._chosen:
            self._take_found()
        self.tell()

    def _take_found(self) -> None:
        """Choose the plan that was tuned since a plan was applied."""
        if (found := self.found) is not None and found.is_newer:
            self.config = found.config

    def _gone(self, reference: Any) -> None:
        if not sys.is_finalizing():
            self.stop()
            self.listeners.tell()
