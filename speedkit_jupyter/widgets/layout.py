"""Where everything lies: controls and buttons at the left, what they change at the right.

Core widgets only, in boxes that wrap on narrow pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.widgets.controls import Control, tooltip

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
