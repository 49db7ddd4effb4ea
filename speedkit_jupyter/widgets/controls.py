"""A control for each option of the catalog: buttons for words, a field for numbers and names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.decision import Decision
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
