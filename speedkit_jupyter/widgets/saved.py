"""What stays of a panel in a saved notebook: its last state, as static HTML and text.

A saved widget view is blank without its kernel. So beside the view a second output is shown, which
is kept up to date and hides itself as long as the view is alive on the same page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
RECORD = (
    '<div style="opacity:.8;margin-bottom:6px">This is a record of a panel. Run its cell again '
    "to use it.</div>"
)
STYLE = """<style>
body:has(.{live}:not(.jupyter-widgets-disconnected)) .{saved} {{ display: none }}
.jp-OutputArea-child:has(+ .jp-OutputArea-child .{saved}) .jupyter-widgets:not(:has(*)) {{
  display: none }}
</style>"""


class Saved:
    """The static twin of a widget."""

    def __init__(self, widget: Any) -> None:
        self._widget = widget
        self._live = f"speedkit-live-{widget.model_id[:8]}"
        widget.add_class(self._live)
        self._handles: list[Any] = []
        self._shown: dict[str, str] = {}

    def bundle(self, static: dict[str, str]) -> dict[str, Any]:
        """The view with the same content as HTML and text."""
        return {VIEW: self._view(), **static}

    def display(self, static: dict[str, str]) -> None:
        """Show the view and its twin; without a kernel IPython takes the bundle."""
        from IPython import get_ipython
        from IPython.display import display

        if not hasattr(get_ipython(), "kernel"):
            raise NotImplementedError
        display({VIEW: self._view(), "text/plain": ""}, raw=True)
        self._shown = static
        self._handles.append(display(self._twin(static), raw=True, display_id=True))

    def update(self, made: Callable[[], dict[str, str]]) -> None:
        """Let the twin follow, wherever it is shown."""
        static = made() if self._handles else {}
        if static == self._shown:
            return
        self._shown = static
        for handle in self._handles:
            handle.update(self._twin(static), raw=True)

    def _view(self) -> dict[str, Any]:
        return {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}

    def _twin(self, static: dict[str, str]) -> dict[str, str]:
        saved = self._live.replace("live", "saved")
        style = STYLE.format(live=self._live, saved=saved)
        html = f'<div class="{saved}">{RECORD}{static["text/html"]}</div>{style}'
        return {**static, "text/html": html}
