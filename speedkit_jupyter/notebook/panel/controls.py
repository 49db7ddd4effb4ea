"""Make the panel's controls (catalog options, buttons, `auto`), and lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from html import escape
from typing import Any

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.optimization import Optimization, choices
from speedkit_jupyter.notebook.panel.background_run import later_in_main_thread
from speedkit_jupyter.plans.config import SpeedConfig, from_word
from speedkit_jupyter.support.exceptions import ConfigError
from speedkit_jupyter.support.units import word

# Label, icon and tooltip of each button.
BUTTONS = {
    "Apply": ("check", "apply the choice to this model"),
    "Restore": ("undo", "put everything back exactly"),
    "Measure": ("clock-o", "baseline against the choice, with intervals"),
    "Tune": ("search", "search the fastest safe plan by measuring"),
    "Stop": ("stop", "stop with the results so far"),
}
AUTO_HINT = "plans race on the steps of your own loops while they train"
# The most common controls, in order. Other controls are under MORE, with wider labels.
FIRST = ("precision", "tf32", "compile", "sdpa")
MORE = "more"
LABEL_PX, LONG_LABEL_PX, GAP_PX = 70, 148, 10
# An option whose words have more letters than this in total gets a dropdown, not buttons.
ON_BUTTONS = 34
NOTE = "font-size:12px;line-height:1.35;opacity:.8;margin:0 0 2px {}px"
# Styles that core widgets don't set. Below a width of 900 pixels there is one column; front ends
# without container queries wrap by the columns' widths.
TOP = """<style>
.speedkit-panel .widget-label { text-align: left; flex: none; margin: 0 8px 0 2px }
.speedkit-panel .widget-toggle-buttons { margin: 3px 2px 3px 2px }
.speedkit-panel .widget-toggle-button { padding: 0 7px }
.speedkit-panel .widget-toggle-button.mod-active { font-weight: 600 }
.speedkit-panel .widget-html, .speedkit-panel .widget-html-content { height: auto; min-width: 0 }
.speedkit-panel { container-type: inline-size }
@container (max-width: 900px) { .speedkit-panel .speedkit-column { flex: 1 1 100% !important;
  max-width: none !important; margin-right: 0 !important } }
</style>"""


class Control:
    """The widget of one option. It calls `chosen(path, value)` when the user picks a value."""

    def __init__(
        self,
        optimization: Optimization,
        path: str,
        annotation: Any,
        chosen: Callable[[str, Any], None],
    ) -> None:
        import ipywidgets as w

        self.path, self._chosen, self._drawing = path, chosen, False
        name, _, field = path.partition(".")
        self.is_first = path == next(iter(optimization.paths))
        self.label = name if self.is_first else f"{name} {field}"
        self.words = choices(annotation)
        width = LABEL_PX if self.label in FIRST else LONG_LABEL_PX
        # Buttons for few words, a dropdown for many words, a text field for other values.
        kind: Any = w.ToggleButtons if sum(map(len, self.words)) <= ON_BUTTONS else w.Dropdown
        kind = kind if len(self.words) > 1 else w.Text
        self.input = kind(
            description=self.label,
            style={"description_width": f"{width}px"},
            layout=w.Layout(width="auto", max_width="100%"),
            **_tooltip(kind, optimization.summary),
            **({"continuous_update": False} if kind is w.Text else {"options": self.words}),
        )
        if kind is w.ToggleButtons:
            self.input.style.button_width = "auto"
            self.input.layout.display, self.input.layout.align_items = "flex", "center"
        self.note = w.HTML()
        self._note_style = NOTE.format(width + GAP_PX)
        self.widget = w.VBox([self.input, self.note], layout=w.Layout(overflow="visible"))
        self.input.observe(self._picked, "value")

    def show(self, config: SpeedConfig, decisions: Mapping[str, Decision]) -> None:
        """Show the option's value in `config`; name the value that SpeedKit decides for `auto`."""
        asked, auto = config.word(self.path), "auto"
        if self.is_first and "auto" in decisions:
            value = "as is" if config.is_alone else word(decisions["auto"].value)
            auto = f"auto → {value}" if value != "auto" else auto
        options = tuple((auto if value == "auto" else value, value) for value in self.words)
        self._drawing = True
        try:
            if not self.words[1:]:
                asked, self.input.placeholder = "" if asked == "auto" else asked, auto
            elif options != tuple(self.input.options):
                self.input.options = options
            self.input.value = asked
        finally:
            self._drawing = False
        self._say("")

    def _picked(self, change: Any) -> None:
        if self._drawing or later_in_main_thread(partial(self._picked, change)):
            return
        text = str(change["new"]).strip()
        value: Any = from_word(text, self.words) if text else ("auto" if self.is_first else None)
        try:
            self._chosen(self.path, value)
        except ConfigError as error:
            self._say("; ".join(str(one).partition(": ")[2] for one in error.problems))

    def _say(self, problem: str) -> None:
        self.note.value = f'<div style="{self._note_style}">✕ {escape(problem)}</div>'
        self.note.layout.display = None if problem else "none"


def buttons() -> dict[str, Any]:
    """Return the panel's buttons by label."""
    import ipywidgets as w

    def button(name: str, icon: str, hint: str) -> Any:
        look = {"icon": icon, "button_style": "primary" if name == "Apply" else ""}
        layout = w.Layout(flex="1 1 30%", width="auto")
        return w.Button(description=name, layout=layout, **look, **_tooltip(w.Button, hint))

    return {name: button(name, *look) for name, look in BUTTONS.items()}


def row(widgets: Iterable[Any]) -> Any:
    """Return widgets in a row, which wraps on narrow pages."""
    import ipywidgets as w

    return w.Box([*widgets], layout=w.Layout(flex_flow="row wrap", margin="8px 0 0 0"))


def auto_checkbox() -> Any:
    """Return the checkbox that switches `auto`."""
    import ipywidgets as w

    return w.Checkbox(description="auto", indent=False, **_tooltip(w.Checkbox, AUTO_HINT))


def _tooltip(kind: Any, text: str) -> dict[str, str]:
    # Some widgets of ipywidgets 7 call the tooltip `description_tooltip`.
    return {"tooltip" if kind.class_traits().get("tooltip") else "description_tooltip": text}


def plan_controls(chosen: Callable[[str, Any], None]) -> dict[str, Control]:
    """Return a control for each option of the catalog, by config path."""
    return {
        path: Control(optimization, path, annotation, chosen)
        for optimization in CATALOG
        for path, annotation in optimization.paths.items()
    }


def arranged(controls: Mapping[str, Control]) -> list[Any]:
    """Return the widgets of the common controls, and an accordion with the other controls."""
    import ipywidgets as w

    labels = {control.label: control for control in controls.values() if control.is_first}
    main = [labels[label] for label in FIRST]
    others = w.VBox([one.widget for one in controls.values() if one not in main])
    more = w.Accordion([others], selected_index=None)
    more.set_title(0, MORE)
    return [*(control.widget for control in main), more]


def columns(left: list[Any], right: list[Any]) -> Any:
    """Return the panel's layout: two columns, or one on narrow pages."""
    import ipywidgets as w

    def column(widgets: list[Any], flex: str, most: str) -> Any:
        layout = w.Layout(flex=flex, max_width=most, min_width="0", overflow="visible")
        layout.margin = "0 24px 0 0"
        return w.VBox(widgets, layout=layout).add_class("speedkit-column")

    both = [column(left, "1 1 380px", "430px"), column(right, "2 1 540px", "none")]
    wrapping = w.Box(both, layout=w.Layout(flex_flow="row wrap", width="100%"))
    style = w.HTML(TOP, layout=w.Layout(margin="0"))
    whole = w.VBox([style, wrapping], layout=w.Layout(width="100%", padding="4px 0"))
    return whole.add_class("speedkit-panel")
