"""Reports: what was decided, changed and measured, as text, HTML and JSON."""
