"""The panel: clicks change its state, and changes of the state are drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from speedkit_jupyter.notebook import session
from speedkit_jupyter.notebook.panel.controls import arranged, button, columns, every_control
from speedkit_jupyter.notebook.panel.state import PanelState
from speedkit_jupyter.notebook.progress import INTERVAL_S
from speedkit_jupyter.plans.applying import Preview
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.report.comparison_report import live_report
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.plan_report import panel_report, state_report
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError
from speedkit_jupyter.support.weak import Alive
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    from speedkit_jupyter.rounds.comparison import Comparison

# The bar is never full while a run goes on, even if the budget is spent.
ALMOST = 0.97
VIEW = "application/vnd.jupyter.widget-view+json"
# Icon, hint, and the method of the state that a click calls.
BUTTONS = {
    "Apply": ("check", "put the choice into force, on this model", "apply"),
    "Restore": ("undo", "put everything back exactly", "restore"),
    "Measure": ("clock-o", "baseline against the choice, with intervals", "measure"),
    "Tune": ("search", "search the fastest safe plan by measuring", "tune"),
    "Stop": ("stop", "end the measurement, with the results so far", "stop"),
}


class Panel:
    """See, toggle and measure a model's plan. Show it as a cell's last value, or with `display`.

    Args:
        model: the model; the panel does not keep it alive.
        optimizer: its optimizers (default: all of the notebook that hold its parameters).
        step: the function that Measure and Tune run, or its name in the notebook (default: the last
            `%%speedbench` cell).
        budget_s: seconds of Measure, as in `benchmark` (default: 10, or more if a step is long).
        tune_budget_s: seconds of Tune, as in `tune` (the same default).

    Raises:
        ArgumentError: an argument of the wrong kind.

    Example::

        panel = Panel(model, step=train_step)
        panel
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        step: Callable[..., object] | str | None = None,
        budget_s: float | None = None,
        tune_budget_s: float | None = None,
    ) -> None:
        import ipywidgets as w
        from IPython import get_ipython

        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"Panel needs a torch.nn.Module, not {type(model).__name__}")
        self._budgets_s = {"Measure": budget_s, "Tune": tune_budget_s}
        known = session.current(getattr(get_ipython(), "user_ns", None))  # the magics' session
        self._choice = PanelState.of(known, model)
        self._choice.step = step or self._choice.step
        if optimizer is not None:
            given = each_once(arguments.optimizers("optimizer", optimizer))
            self._choice.given = Alive(given)
        self._drawn_at, self._was_busy = 0.0, False
        self.controls = every_control(self._choice.choose)
        self.buttons = {name: button(name, icon, hint) for name, (icon, hint, _) in BUTTONS.items()}
        bar = w.Box([*self.buttons.values()], layout=w.Layout(flex_flow="row wrap"))
        bar.layout.margin = "8px 0 0 0"
        self.progress = w.FloatProgress(max=1.0, layout=w.Layout(width="auto", display="none"))
        # The right side, the line of a run, and its result.
        self.state, self.status, self.outcome = w.HTML(), w.HTML(), w.HTML()
        left = [*arranged(self.controls), bar, self.progress, self.status]
        self.widget = columns(left, [self.state], [self.outcome])
        for name, one in self.buttons.items():
            one.on_click(partial(self._clicked, name))
        self._choice.listeners.add(self._follow)
        self._follow()

    @property
    def config(self) -> SpeedConfig:
        """The config that `Apply` puts into force."""
        return self._choice.config

    @property
    def context(self) -> SpeedContext | None:
        """The context in force on the model, or None."""
        return self._choice.context

    @property
    def result(self) -> Comparison | None:
        """The last comparison; after a search, the comparison that proves its winner."""
        return self._choice.result

    def report(self) -> Document:
        """Return the panel's content as a report. Raises SpeedKitError if the model was deleted."""
        it = self._choice
        return panel_report(it.preview(), it.name, it.message, it.report, it.found)

    def __repr__(self) -> str:
        return str(self._repr_mimebundle_()["text/plain"])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        try:
            return {VIEW: view, **self.report()._repr_mimebundle_()}
        except SpeedKitError as error:
            return {VIEW: view, **Document(str(error))._repr_mimebundle_()}

    def _clicked(self, name: str, pressed: Any) -> None:
        *_, method = BUTTONS[name]
        budgets_s = [self._budgets_s[name]] if name in self._budgets_s else []
        try:
            getattr(self._choice, method)(*budgets_s)
        except SpeedKitError as error:
            self._choice.tell(str(error))

    def _follow(self, topic: str = "") -> None:
        """Draw the changes."""
        choice, now = self._choice, time.monotonic()
        steady = choice.busy and self._was_busy
        if steady and now - self._drawn_at < INTERVAL_S:
            return
        self._drawn_at, self._was_busy = now, choice.busy
        self._show_run()
        if steady:
            return
        try:
            self._show(choice.preview())
        except SpeedKitError as error:
            inputs = (control.input for control in self.controls.values())
            for part in (*self.buttons.values(), *inputs):
                part.disabled = True
            self.state.value = Document(str(error)).to_html()
            self.status.value = ""

    def _show(self, preview: Preview) -> None:
        choice = self._choice
        for path, control in self.controls.items():
            control.show(choice.config, preview.words[path.partition(".")[0]])
        self.state.value = state_report(preview, choice.name, choice.found).to_html()
        idle, applied = not choice.busy, preview.applied is not None
        self.buttons["Apply"].disabled = not (idle and (preview.pending or not applied))
        self.buttons["Restore"].disabled = not (idle and applied)
        for name in self._budgets_s:
            self.buttons[name].disabled = not idle
        self.outcome.value = "" if choice.report is None else choice.report.to_html()

    def _show_run(self) -> None:
        """Draw progress, a message, or the step that a click on Measure would time."""
        choice, run = self._choice, self._choice.run
        self.buttons["Stop"].disabled = not choice.busy
        self.progress.layout.display = None if choice.busy else "none"
        text = escape(choice.message)
        if choice.busy and run is not None:
            self.progress.value = min(run.progress.done, ALMOST)
            text = live_report(run.progress).to_html()
        elif not text and run is not None and run.state == "stopped":
            text = "Stopped." + " The results so far are below." * bool(choice.report)
        elif not text and choice.report is None and choice.measured:
            text = escape(f"Measure and Tune run: {choice.measured}")
        polite = "" if choice.busy else ' aria-live="polite" style="line-height:1.4"'
        self.status.value = f'<div role="status"{polite}>{text}</div>'
