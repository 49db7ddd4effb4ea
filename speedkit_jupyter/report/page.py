"""A report as one HTML file that needs nothing else: to send, to attach, to open in ten years."""

from __future__ import annotations

from html import escape

from speedkit_jupyter.report import html
from speedkit_jupyter.report.elements import Content

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2em auto; max-width: 64em; padding: 0 1em; }}
pre {{ white-space: pre-wrap; }}
</style>
</head>
<body>
{report}
{repeat}
<script type="application/json" id="data">
{data}
</script>
</body>
</html>
"""


def render(document: Content) -> str:
    """The page; the plain values, raw samples among them, lie in it as JSON under `data`."""
    # "<" in a script element could end it; in JSON strings it may be written like this.
    data = document.to_json().replace("<", "\\u003c")
    command = document.data.get("command")
    repeat = f"<h4>To repeat it</h4>\n<pre>{escape(command)}</pre>" if command else ""
    title, report = escape(document.headline), html.render(document)
    return PAGE.format(title=title, report=report, repeat=repeat, data=data)
