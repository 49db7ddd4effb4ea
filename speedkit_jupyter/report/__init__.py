"""Reports of decisions, changes and measurements, as text, HTML and JSON."""
