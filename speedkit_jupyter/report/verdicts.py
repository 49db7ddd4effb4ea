"""The words, colors and documentation pages of verdicts and of other messages."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from html import escape
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speedkit_jupyter.report.elements import Tone
    from speedkit_jupyter.rounds.comparison import Comparison, Record

NO_GAIN, CHANGES_RESULTS = "no gain", "changes the results"
# A variant is called slower only at or below this speed-up: it takes at least 2 % longer.
SLOWER_BELOW = 0.98
VERDICT_TONES: dict[str, Tone] = {
    "faster": "good",
    **dict.fromkeys(("slower", "wrong", "failed", "above the limit"), "bad"),
}
# The words of each message, with the name of its page in docs/messages.
PAGES = {
    "too noisy": "too_noisy", "too few rounds": "too_noisy", "could not decide": "too_noisy",
    "likely": "likely", "wrong": "wrong", "declined": "declined", "failed": "failed",
    "not checked": "not_checked", NO_GAIN: "no_gain", "nothing to gain": "no_gain",
    CHANGES_RESULTS: "changes_the_results", "the machine was busy": "busy",
    "graph break": "graph_break", "recompile": "recompile", "fall-back": "recompile",
    "has no kernels": "no_kernels",
}  # fmt: skip
# Matches a message at the start of a text, or after a sign, a number or a variant's name.
MESSAGE = re.compile(rf"(^|: |[✕×] |\d )({'|'.join(PAGES)})(?=s?(?![\w-]))", re.IGNORECASE)
LINK = "color:inherit;text-decoration:underline dotted;text-underline-offset:3px"


def verdict_text(comparison: Comparison, record: Record) -> str:
    """Return the verdict in words for users. A variant that is hardly slower has "no gain"."""
    verdict, gain = comparison.verdict(record), comparison.ratio(record)
    if verdict in ("slower", "same") and gain is not None and gain.median > SLOWER_BELOW:
        return NO_GAIN
    return CHANGES_RESULTS if verdict == "other model" else verdict


@cache
def project_urls() -> dict[str, str]:
    """Return the URLs in the package's metadata, by `[project.urls]` name; {} if not installed."""
    with suppress(metadata.PackageNotFoundError):  # imported from a clone without installing it
        lines = metadata.metadata("speedkit-jupyter").get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    return {}


def linked(html: str) -> str:
    """Turn the first message in the HTML into a link, if the package has a documentation URL."""
    site = escape(project_urls().get("Documentation", ""))
    start = rf'\1<a href="{site}docs/messages/{{}}.html" target="_blank" rel="noopener"'
    link = rf'{start} style="{LINK}">\2</a>'
    replaced = lambda m: m.expand(link.format(PAGES[m[2].lower()]))  # noqa: E731
    return MESSAGE.sub(replaced, html, count=1) if site else html
