"""The controls of a panel, one for each option of the catalog, and where everything lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.decision import Decision, Effect
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import choices
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.sources import from_word
from speedkit_jupyter.report.panel_report import unavailable
from speedkit_jupyter.report.units import word
from speedkit_jupyter.support.exceptions import ConfigError

# Words of more letters than these in all stand in a list rather than on buttons.
ON_BUTTONS = 34
# Between a label and its control.
GAP_PX = 10
NOTE = "font-size:12px;line-height:1.35;opacity:.8;margin:0 0 2px {}px"


class Control:
    """One option. `widget` is its control with a note below, and a label of `label_px` pixels;
    `chosen(path, value)` is called for what the user picks, and may raise ConfigError.
    """

    def __init__(
        self,
        optimization: Optimization,
        path: str,
        annotation: Any,
        chosen: Callable[[str, Any], None],
        label_px: Callable[[str], int],
    ) -> None:
        import ipywidgets

        self.path, self._chosen, self._drawing = path, chosen, False
        name, _, field = path.partition(".")
        self.effect = optimization.effect
        self.is_first = path == next(iter(optimization.paths))
        self.label = name if self.is_first else f"{name} {field}"
        self.words, self._summary = choices(annotation), optimization.summary
        self._label_px = label_px(self.label)
        self.input = self._input(optimization.summary)
        self.note = ipywidgets.HTML()
        self.widget = ipywidgets.VBox([self.input, self.note])
        self.widget.layout.overflow = "visible"
        self.input.observe(self._picked, "value")

    def _input(self, summary: str) -> Any:
        """Buttons for few words, a list for many, a field for what is no word."""
        import ipywidgets

        kind: Any = ipywidgets.Text
        more: dict[str, Any] = {"continuous_update": False}
        if len(self.words) > 1:
            short = sum(map(len, self.words)) <= ON_BUTTONS
            kind = ipywidgets.ToggleButtons if short else ipywidgets.Dropdown
            more = {"options": self.words}
        made = kind(
            description=self.label,
            style={"description_width": f"{self._label_px}px"},
            layout=ipywidgets.Layout(width="auto", max_width="100%"),
            **tooltip(kind, summary),
            **more,
        )
        if kind is ipywidgets.ToggleButtons:
            made.style.button_width = "auto"
            made.layout.display, made.layout.align_items = "flex", "center"
        return made

    def show(self, config: SpeedConfig, decisions: Mapping[str, Decision]) -> None:
        """Follow a config; `decisions` are those for each word."""
        asked = config.word(self.path)
        notes = [(f"{', '.join(words)}: {why}") for words, why in self._refused(decisions)]
        if self.words[1:] and self.is_first:
            self._set_options(asked, decisions, config.is_alone)
        self._drawing = True
        try:
            if self.words[1:]:
                self.input.value = asked
            else:
                self.input.value = "" if asked == "auto" else asked
                self.input.placeholder = self._auto(decisions, config.is_alone)
        finally:
            self._drawing = False
        self._say(notes)

    def _set_options(self, asked: str, decisions: Mapping[str, Decision], is_alone: bool) -> None:
        """The words that work here, and the one that is asked for, whether it works or not."""
        options = []
        for value in self.words:
            declined = value in decisions and decisions[value].declined
            label = self._auto(decisions, is_alone) if value == "auto" else value
            if not declined:
                options.append((label, value))
            elif value == asked:
                options.append((f"{label} ✕", value))
        if tuple(options) != tuple(self.input.options):
            self._drawing = True
            try:
                self.input.options = options
            finally:
                self._drawing = False
        if hasattr(self.input, "tooltips"):  # of buttons
            reasons = {value: decisions[value].reason for value in self.words if value in decisions}
            tips = [f"{self._summary}. {value}: {reasons.get(value, '')}" for _, value in options]
            self.input.tooltips = [tip.rstrip(": ") for tip in tips]

    def _auto(self, decisions: Mapping[str, Decision], is_alone: bool) -> str:
        """`auto → bf16`: what it stands for here."""
        if "auto" not in decisions or not self.is_first:
            return ""
        return f"auto → {'as is' if is_alone else word(decisions['auto'].value)}"

    def _refused(self, decisions: Mapping[str, Decision]) -> list[tuple[list[str], str]]:
        return unavailable(decisions) if self.is_first else []

    def _picked(self, change: Any) -> None:
        if self._drawing:
            return
        text = str(change["new"]).strip()
        value: Any = from_word(text, self.words) if text else ("auto" if self.is_first else None)
        try:
            self._chosen(self.path, value)
        except ConfigError as error:
            self._say([str(problem).partition(": ")[2] for problem in error.problems])

    def _say(self, notes: list[str]) -> None:
        lines = "".join(f"<div>✕ {escape(note)}</div>" for note in notes)
        style = NOTE.format(self._label_px + GAP_PX)
        self.note.value = f'<div style="{style}">{lines}</div>' if lines else ""
        self.note.layout.display = None if lines else "none"


def controls(
    chosen: Callable[[str, Any], None], label_px: Callable[[str], int]
) -> dict[str, Control]:
    """One for every option and field in the catalog, by its path; labels as wide as these ask."""
    return {
        path: Control(optimization, path, annotation, chosen, label_px)
        for optimization in CATALOG
        for path, annotation in optimization.paths.items()
    }


def tooltip(kind: Any, text: str) -> dict[str, str]:
    """The keyword for it: some widgets of ipywidgets 7 have another one."""
    return {"tooltip" if kind.class_traits().get("tooltip") else "description_tooltip": text}


# What most people want to see, in this order; the rest stands under MORE, with longer labels, in
# groups.
FIRST = ("precision", "tf32", "compile", "sdpa")
MORE = "more"
GROUPS = {
    Effect.EXACT: "the same numbers",
    Effect.ROUNDING: "the same up to rounding",
    Effect.CHANGES_MODEL: "another model",
}
HEADING = '<div style="font-size:12px;font-weight:600;opacity:.8;margin:4px 2px 0">{}</div>'
LABEL_PX, LONG_LABEL_PX = 70, 148
BUTTONS = {
    "Apply": ("check", "put the choice into force, on this model"),
    "Restore": ("undo", "put everything back exactly"),
    "Measure": ("clock-o", "baseline against the choice, with intervals"),
    "Tune": ("search", "search the fastest safe plan by measuring"),
    "Stop": ("stop", "end the measurement, with the results so far"),
}
# One of them is all there is room for where the panel is narrower than 900 pixels; front ends
# without container queries wrap there too, by the columns' own widths.
COLUMN = "speedkit-column"
# Once the front end has lost the kernel, dead controls are hidden: the saved record takes their
# place. The rest is what core widgets leave open. On a narrow page a result stands under the
# buttons, before the plan.
TOP = """<style>
.speedkit-panel.jupyter-widgets-disconnected { display: none !important }
.speedkit-panel .widget-label { text-align: left; flex: none; margin: 0 8px 0 2px }
.speedkit-panel .widget-toggle-buttons { margin: 3px 2px 3px 2px }
.speedkit-panel .widget-toggle-button.mod-active { font-weight: 600 }
.speedkit-panel .widget-html, .speedkit-panel .widget-html-content { height: auto; min-width: 0 }
.speedkit-panel { container-type: inline-size }
.speedkit-left { order: 1 } .speedkit-right { order: 2 } .speedkit-below { order: 3 }
@container (max-width: 900px) { .speedkit-panel .speedkit-column { flex: 1 1 100% !important;
  max-width: none !important; margin-right: 0 !important }
  .speedkit-below { order: 2 } .speedkit-right { order: 3 } }
</style>"""


class Parts:
    """The widgets of a panel; `whole` holds them all.

    `state` is the right side, `status` and `progress` are those of a run, `outcome` what it found,
    `listing` the code; both lie `below` the buttons.
    """

    def __init__(self, controls: Mapping[str, Control]) -> None:
        import ipywidgets as w

        self.controls = dict(controls)
        self.state, self.status = w.HTML(), w.HTML()
        self.outcome, self.listing = w.HTML(), w.HTML()
        self.progress = w.FloatProgress(max=1.0, layout=w.Layout(width="auto", display="none"))
        self.buttons = {
            name: w.Button(description=name, icon=icon, layout=_button(), **tooltip(w.Button, hint))
            for name, (icon, hint) in BUTTONS.items()
        }
        self.buttons["Apply"].button_style = "primary"
        self.code = w.ToggleButton(
            description="Code",
            icon="code",
            layout=_button(),
            **tooltip(w.ToggleButton, "the plan to take along"),
        )
        right = w.VBox([self.state], layout=_column("2 1 540px", "none"))
        right.add_class(COLUMN)
        right.add_class("speedkit-right")
        self.below = w.VBox([self.outcome, self.listing], layout=_column("1 1 100%", "none"))
        self.below.add_class("speedkit-below")
        self.whole = w.VBox(
            [
                w.HTML(TOP, layout=w.Layout(margin="0")),
                w.Box(
                    [self._left(), right, self.below],
                    layout=w.Layout(flex_flow="row wrap", width="100%"),
                ),
            ],
            layout=w.Layout(width="100%", padding="4px 0"),
        )
        self.whole.add_class("speedkit-panel")

    def _left(self) -> Any:
        """The first controls, the others under MORE, and the buttons below."""
        import ipywidgets as w

        main = [c for path, c in self.controls.items() if c.is_first and c.label in FIRST]
        main.sort(key=lambda control: FIRST.index(control.label))
        rest = [control for control in self.controls.values() if control not in main]
        more = w.Accordion([w.VBox(_grouped(rest))], selected_index=None)
        more.set_title(0, MORE)
        plan, measure = [*self.buttons.values()][:2], [*self.buttons.values()][2:]
        bar = w.Box([*plan, self.code, *measure], layout=w.Layout(flex_flow="row wrap"))
        bar.layout.margin = "8px 0 0 0"
        below = [more, bar, self.progress, self.status]
        column = w.VBox([*(control.widget for control in main), *below])
        column.layout = _column("1 1 380px", "430px")
        column.add_class(COLUMN)
        return column.add_class("speedkit-left")


def label_px(label: str) -> int:
    """How wide a label is where it stands."""
    return LABEL_PX if label in FIRST else LONG_LABEL_PX


def _grouped(controls: Iterable[Control]) -> list[Any]:
    """Their widgets, by what they do to the numbers, the harmless first."""
    import ipywidgets as w

    ordered = list(controls)
    widgets: list[Any] = []
    for effect, title in GROUPS.items():
        members = [control.widget for control in ordered if control.effect is effect]
        if members:
            widgets += [w.HTML(HEADING.format(title)), *members]
    return widgets


def _button() -> Any:
    import ipywidgets

    return ipywidgets.Layout(flex="1 1 30%", width="auto")


def _column(flex: str, most: str) -> Any:
    import ipywidgets

    return ipywidgets.Layout(
        flex=flex, max_width=most, min_width="0", overflow="visible", margin="0 24px 0 0"
    )
