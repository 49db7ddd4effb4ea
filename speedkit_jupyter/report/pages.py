"""The page of the documentation about each verdict and warning; reports in HTML link to it."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from html import escape
from importlib import metadata

# The words of each message, with the name of its page in docs/messages.
PAGES = {
    "too noisy": "too_noisy",
    "too few rounds": "too_noisy",
    "could not decide": "too_noisy",
    "likely": "likely",
    "wrong": "wrong",
    "declined": "declined",
    "failed": "failed",
    "not checked": "not_checked",
    "no gain": "no_gain",
    "nothing to gain": "no_gain",
    "changes the results": "changes_the_results",
    "the machine was busy": "busy",
    "graph break": "graph_break",
    "recompile": "recompile",
    "fall-back": "recompile",
    "has no kernels": "no_kernels",
}
# A message begins a text, or follows a sign, a number or the name of a variant.
MESSAGE = re.compile(rf"(^|: |[✕×] |\d )({'|'.join(PAGES)})(?=s?(?![\w-]))", re.IGNORECASE)
LINK = "color:inherit;text-decoration:underline dotted;text-underline-offset:3px"


@cache
def project_urls() -> dict[str, str]:
    """Return the addresses in the package's metadata, by their names in `[project.urls]`."""
    with suppress(metadata.PackageNotFoundError):  # imported from a clone without installing it
        lines = metadata.metadata("speedkit-jupyter").get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    return {}


def linked(html: str) -> str:
    """Return HTML whose first message is a link to its page, if the site has an address."""
    site = escape(project_urls().get("Documentation", ""))
    start = rf'\1<a href="{site}docs/messages/{{}}.html" target="_blank" rel="noopener"'
    link = rf'{start} style="{LINK}">\2</a>'
    replaced = lambda m: m.expand(link.format(PAGES[m[2].lower()]))  # noqa: E731
    return MESSAGE.sub(replaced, html, count=1) if site else html
