"""Insert the generated reference into pages, link to repository files, and write llms.txt."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import generated
from sphinx.application import Sphinx

import speedkit_jupyter as public
from speedkit_jupyter.report.verdicts import project_urls

GENERATED = re.compile(r"<!-- generated: (\w+) -->")
# Links to files and folders of the repository that are not pages of the site.
FILE = re.compile(
    r"\[([^][]*)\]\((?:\.\./)+((?:tests|configs|speedkit_jupyter|notebooks/(?:kernels|scripts))[^)]*)\)"
)
KERNEL = re.compile(r"\[([^][]*)\]\((kernels/\w+\.py)\)")
DOCUMENTED = re.compile(r"(?s)```{eval-rst}\n\.\. auto\w+:: speedkit_jupyter\.(\w+).*?```")
# The first sentence below a page's heading.
FIRST = re.compile(r"^# .*\n\n([A-Z*][^|\n]*?[.])(?:\s|$)")


def prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace markers by Markdown; link files to the repository, or keep only the link's text."""
    repository = project_urls().get("Repository")
    link = rf"[\1]({repository}/blob/main/{{}}\2)" if repository else r"\1"
    text = GENERATED.sub(lambda found: getattr(generated, found[1])(), source[0])
    text = text.replace('"# NBVAL_CHECK_OUTPUT\\n",', "")
    text = FILE.sub(link.format(""), text)
    source[0] = KERNEL.sub(link.format("notebooks/"), text)
    if not name.startswith("notebooks/"):
        app.texts[name] = source[0]  # type: ignore[attr-defined]


def plain(text: str) -> str:
    """Return a page's Markdown without toctrees, and with docstrings instead of directives."""
    text = re.sub(r"(?s)```{toctree}.*?```\n*", "", text)
    return DOCUMENTED.sub(lambda found: inspect.getdoc(getattr(public, found[1])) or "", text)


def write_for_models(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt (a list of pages), llms-full.txt (their text) and a redirecting index.html."""
    if error or app.builder.format != "html":
        return
    texts: dict[str, str] = app.texts  # type: ignore[attr-defined]
    site = project_urls().get("Documentation", "")
    lines = [f"# {app.config.project}\n", "> Make PyTorch code in notebooks faster, measured.\n"]
    for name, title in sorted(app.env.titles.items()):
        first = FIRST.search(texts.get(name, ""))
        about = f": {first[1].replace('**', '')}" if first else ""
        lines.append(f"- [{title.astext()}]({site}{name}.html){about}")
    full = "\n\n".join(plain(texts[name]) for name in sorted(texts))
    forward = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
    files = {"llms.txt": "\n".join(lines), "llms-full.txt": full, "index.html": forward}
    for name, text in files.items():
        Path(app.outdir, name).write_text(f"{text}\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions above to Sphinx, and highlight magics in Python blocks."""
    from IPython.lib.lexers import IPython3Lexer

    app.texts = {}  # type: ignore[attr-defined]
    app.add_lexer("python", IPython3Lexer)
    app.connect("source-read", prepare)
    app.connect("build-finished", write_for_models)
    return {"parallel_read_safe": False}
