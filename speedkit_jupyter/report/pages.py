"""The page of the documentation about each verdict and warning; reports in HTML link to it."""

from __future__ import annotations

import re
from html import escape

# The address of the site. A page's path there is its path in the repository.
SITE = "https://speedkit-jupyter.readthedocs.io/en/latest/"
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


def address(words: str) -> str:
    """Return the address of the page about a message."""
    return f"{SITE}docs/messages/{PAGES[words.lower()]}.html"


def linked(html: str) -> str:
    """Return HTML whose first message is a link to its page."""
    link = rf'\1<a href="{{}}" target="_blank" rel="noopener" style="{LINK}">\2</a>'
    return MESSAGE.sub(lambda m: m.expand(link.format(escape(address(m[2])))), html, count=1)
