"""The panel: its buttons' actions, and its display of plan, progress and report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from IPython import get_ipython
from IPython.display import display
from IPython.utils.capture import capture_output

from speedkit_jupyter.notebook import session
from speedkit_jupyter.notebook.namespace import find_optimizers, proven_config
from speedkit_jupyter.notebook.panel import background_run, controls
from speedkit_jupyter.notebook.progress import INTERVAL_S, is_kernel
from speedkit_jupyter.plans import registry
from speedkit_jupyter.plans.applying import Preview, applied_to, apply_speedups, preview
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.plans.naming import CTX, assign, name_of
from speedkit_jupyter.report.comparison_report import ALMOST, live_report
from speedkit_jupyter.report.plan_report import panel_report, state_report
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.search.outcome import MEMORY, Tuning
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.step.step import Step, step_of
from speedkit_jupyter.step.variants import AUTO, BASELINE, Variant
from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import SpeedKitError, StepError
from speedkit_jupyter.support.weak import Alive
from speedkit_jupyter.support.wrappers import each_once

if TYPE_CHECKING:
    from speedkit_jupyter.rounds.comparison import Comparison

VIEW = "application/vnd.jupyter.widget-view+json"
HIDING = "<style>body:has(.speedkit-panel) .speedkit-saved { display: none }</style>"
GONE = "This model no longer exists. `%speedkit panel` shows a panel for another one."
NO_STEP = (
    "nothing to measure yet: run a %%speedbench cell that uses this model, or give a step, as in "
    "Panel(model, step=train_step)"
)


class Panel:
    """See, toggle and measure a model's plan. Show the panel as a cell's value, or with `display`.

    Args:
        model: the model; the panel does not keep it alive.
        optimizer: the model's optimizers (default: all in the notebook that hold its parameters).
        step: the function to measure, or its name (default: the last `%%speedbench` cell).
        budget_s: seconds for Measure, as in `benchmark` (default: 10, or more if a step is long).
        tune_budget_s: seconds for Tune (default: as in `tune`).

    Attributes:
        config: the config that Apply puts into force.
        result: the last benchmark's comparison, or the last search's proof; None if there is none.

    Raises:
        ArgumentError: an argument has the wrong type.
        ConfigError: an environment variable of SpeedKit is invalid.

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
        arguments.model("Panel needs", model)
        given = None if optimizer is None else arguments.optimizers("optimizer", optimizer)
        self._given = None if given is None else Alive(each_once(given))
        self._session = session.current(getattr(get_ipython(), "user_ns", None))
        self._name, self._step = name_of(self._session.names, model), step
        self._model = ref(model, self._gone)
        self._budgets_s = {"Measure": budget_s, "Tune": tune_budget_s}
        self._has_picked = False  # True if the config was chosen after the last apply or search
        applied = self.context
        proven = None if applied else proven_config([model], self._optimizers())
        self.config = applied.config if applied else proven or SpeedConfig()
        self._run: background_run.BackgroundRun | None = None
        self.result: Comparison | None = None
        self._report: Document | None = None
        self._message = ""
        self._saved: Any = None  # the display for saved notebooks
        self._take_tuned()
        self._build()
        registry.CHANGES.add(self._applied_or_restored)
        self._session.listeners.add(self._tell)
        MEMORY.listeners.add(self._search_ended)
        self._session.panels.add(self)
        self._draw()

    @property
    def context(self) -> SpeedContext | None:
        """Return the context in force on the model, or None."""
        return None if (model := self._model()) is None else applied_to(model)

    def report(self) -> Document:
        """Return the panel's content as a report. Raises SpeedKitError if the model was deleted."""
        shown = preview(self._alive(), self.config, self._optimizers())
        return panel_report(shown, self._name, self._message, self._report, self._tuned)

    def __repr__(self) -> str:
        return str(self._content()["text/plain"])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {**self._content(), VIEW: view}

    def _ipython_display_(self) -> None:
        """Display the controls, and a static report for saved notebooks."""
        saved = display(self._content(), raw=True, display_id=True)
        self._saved = saved if is_kernel() else None  # a terminal would print each update
        view = self._repr_mimebundle_()[VIEW]
        display({VIEW: view, "text/plain": ""}, raw=True)

    def _content(self) -> dict[str, Any]:
        """Return the static report as text, and as HTML that is hidden if live controls exist."""
        try:
            document = self.report()
        except SpeedKitError as error:
            document = Document(str(error))
        html = f'{HIDING}<div class="speedkit-saved">{document.to_html()}</div>'
        return {"text/plain": document.to_text(), "text/html": html}

    # --- the model, its plan and its step ---

    def _alive(self) -> torch.nn.Module:
        if (model := self._model()) is None:
            raise SpeedKitError(GONE)
        return model

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        if self._given is not None:
            return list(self._given)
        return list(find_optimizers(self._session.names or {}, None, self._alive()).values())

    @property
    def _tuned(self) -> Tuning | None:
        return MEMORY.of(self._model())

    def _take_tuned(self) -> None:
        """Set `config` to the last search's config, unless a plan was applied after the search."""
        if (found := self._tuned) is not None and found.is_newer:
            self.config = found.config

    def _measured_step(self) -> Step:
        model, cell = self._alive(), self._session.measured
        if self._step is not None:
            names = self._session.names or {}
            step = names.get(self._step) if isinstance(self._step, str) else self._step
            if not callable(step):
                raise StepError(f"the function {self._step} no longer exists: define it again")
            return step_of(step, model, self._optimizers() or None)
        if cell is None:
            raise StepError(NO_STEP)
        try:
            return cell.step().on(model)
        except StepError as error:
            raise StepError(f"the last %%speedbench cell ({cell.title}): {error}") from None

    # --- clicks ---

    def _clicked(self, name: str, pressed: Any) -> None:
        if background_run.later_in_main_thread(partial(self._clicked, name, pressed)):
            self.status.value = "Waits until the cell has ended." if name != "Stop" else ""
            return
        try:
            getattr(self, name.lower())()
        except SpeedKitError as error:
            self._tell(str(error))

    def _pick(self, path: str, value: Any) -> None:
        """Set one option of `config`, without applying it. Raises ConfigError."""
        self._has_picked = True
        self.config = self.config.changed(path, value)
        self._tell()

    def apply(self) -> None:
        """Apply `config`; assign the context to `ctx`, or to a longer name if `ctx` is in use."""
        model, names = self._alive(), self._session.names
        _, applied = apply_speedups(model, self.config, optimizer=self._optimizers())
        self._name = name_of(names, model, self._name)
        variable = assign(names, self._name, applied)
        if variable != CTX:
            self._tell(f"`{CTX}` is in use: this context is `{variable}`")

    def restore(self) -> None:
        """Undo all plans of the model. Raises SpeedKitError if the model was deleted."""
        self._alive()
        while self.context is not None:
            self.context.restore()

    def measure(self) -> None:
        """Start a benchmark of the baseline against `config`, in the background."""
        name = "this choice" if self.config.to_dict() or self.config.is_alone else AUTO
        variants = [Variant(BASELINE), Variant(name, self.config)]
        self._start(Benchmark(self._measured_step(), variants, self._budgets_s["Measure"]))

    def tune(self) -> None:
        """Start a search in the background; its plan becomes `config`, but is not applied."""
        self._start(PlanSearch(self._measured_step(), self._budgets_s["Tune"]))

    def stop(self) -> None:
        """Stop the measurement after its current block, and keep the results so far."""
        if self._run is not None:
            self._run.stop()

    def _interrupt(self) -> None:
        """Stop at once, even in a block that is compiling; called in ipykernel's message thread."""
        if self._run is not None:
            self._run.interrupt()

    # --- auto ---

    def _switch(self, change: Any) -> None:
        """Switch `auto` on or off for all cells, as `%speedkit auto` does."""
        if background_run.later_in_main_thread(partial(self._switch, change)):
            return
        if change["new"] != bool(self._session.auto_line):
            with capture_output():  # the panel shows the line of `auto`
                get_ipython().run_line_magic("speedkit", f"auto {'on' if change['new'] else 'off'}")

    def show_auto(self) -> None:
        """Show in the panel whether `auto` is on, and the last line that `auto` reported."""
        self.auto.value = bool(self._session.auto_line)
        self.live.value = escape(self._session.auto_line)

    # --- a run ---

    @property
    def _is_busy(self) -> bool:
        return self._run is not None and self._run.state == "running"

    def _start(self, engine: Any) -> None:
        if self._is_busy:
            raise StepError("a measurement is running already: press Stop, or wait")
        self.result, self._report, self._message = None, None, ""
        self._run = background_run.BackgroundRun(engine, self._followed)
        self._run.start()
        self._draw()

    def _followed(self, run: background_run.BackgroundRun) -> None:
        """Redraw the panel. At the end of a run, first take its result and the plan it found."""
        if run.state != "running":
            result, self._message = run.result, run.message
            self._report = None if result is None else result.report().brief()
            self.result = result.comparison if isinstance(result, Tuning) else result
            if isinstance(result, Tuning) and result.is_settled:
                self._has_picked = False
                self._take_tuned()
            elif isinstance(result, Tuning) and (likely := result.likely_config):
                self.config, self._has_picked = likely, True
                self._message = f"Apply would use {result.likely}: likely, not proven."
        self._draw()

    # --- changes from outside ---

    def _tell(self, message: str = "") -> None:
        self._message = message
        self._draw()

    def _applied_or_restored(self, model: torch.nn.Module) -> None:
        if model is self._model():
            if self.context is not None:
                self.config, self._has_picked = self.context.config, False
            self._tell()

    def _search_ended(self) -> None:
        if not self._has_picked:
            self._take_tuned()
        self._tell()

    def _gone(self, reference: Any) -> None:
        if not sys.is_finalizing():
            self.stop()
            self._draw()

    # --- drawing ---

    def _build(self) -> None:
        import ipywidgets as w

        self._drawn_at, self._was_busy = 0.0, False
        self.controls, self.buttons = controls.plan_controls(self._pick), controls.buttons()
        self.progress = w.FloatProgress(max=1.0, layout=w.Layout(width="auto", display="none"))
        # The HTML of the plan, of the progress, and of the result.
        self.state, self.status, self.outcome = w.HTML(), w.HTML(), w.HTML()
        self.auto, self.live = controls.auto_checkbox(), w.HTML()
        self.auto.disabled = get_ipython() is None
        self.show_auto()
        self.auto.observe(self._switch, "value")
        run = [controls.row(self.buttons.values()), self.progress, self.status]
        left = [*controls.arranged(self.controls), *run, self.auto, self.live]
        self.widget = controls.columns(left, [self.outcome, self.state])
        for name, one in self.buttons.items():
            one.on_click(partial(self._clicked, name))
        background_run.on_arrival(self.buttons["Stop"], self._interrupt)

    def _draw(self) -> None:
        now, is_steady = time.monotonic(), self._is_busy and self._was_busy
        # Before the rounds, each state is drawn immediately: a block may compile for a long time.
        has_rounds = self._run is not None and self._run.progress.known is not None
        if is_steady and has_rounds and now - self._drawn_at < INTERVAL_S:
            return
        self._drawn_at, self._was_busy = now, self._is_busy
        self._draw_run()
        if is_steady:
            return
        if self._saved is not None:
            self._saved.update(self._content(), raw=True)
        try:
            self._draw_plan(preview(self._alive(), self.config, self._optimizers()))
        except SpeedKitError as error:
            inputs = (control.input for control in self.controls.values())
            for part in (*self.buttons.values(), *inputs):
                part.disabled = True
            self.state.value = Document(str(error)).to_html()
            self.status.value = ""

    def _draw_plan(self, shown: Preview) -> None:
        for path, control in self.controls.items():
            control.show(self.config, shown.words[path.partition(".")[0]])
        self.state.value = state_report(shown, self._name, self._tuned).to_html()
        is_idle, is_applied = not self._is_busy, shown.applied is not None
        self.buttons["Apply"].disabled = not (is_idle and (shown.pending or not is_applied))
        self.buttons["Restore"].disabled = not (is_idle and is_applied)
        for name in self._budgets_s:
            self.buttons[name].disabled = not is_idle
        self.outcome.value = "" if self._report is None else self._report.to_html()

    def _draw_run(self) -> None:
        """Draw the progress of a run, or else the last message or the name of the step."""
        run, is_busy = self._run, self._is_busy
        self.buttons["Stop"].disabled = not is_busy
        self.progress.layout.display = None if is_busy else "none"
        text = self._message
        if is_busy and run is not None:
            self.progress.value = min(run.progress.done, ALMOST)
            text = run.progress.text
            self.outcome.value = live_report(run.progress).to_html()
        elif not text and run is not None and run.state == "stopped":
            text = "Stopped." + " These are the results so far." * bool(self._report)
        elif not text and self._report is None:
            cell = self._session.measured
            step = getattr(self._step, "__name__", self._step) or (cell and cell.title)
            text = f"Measure and Tune run: {step}" if step else ""
        polite = "" if is_busy else ' aria-live="polite" style="line-height:1.4"'
        self.status.value = f'<div role="status"{polite}>{escape(text)}</div>'
