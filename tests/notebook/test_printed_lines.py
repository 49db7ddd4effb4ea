"""Commands that documents, notebooks, errors and reports print can be parsed."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.error import UsageError

import speedkit_jupyter
from speedkit_jupyter.notebook.commands import commands
from speedkit_jupyter.notebook.options import without_comment
from speedkit_jupyter.notebook.speedbench import parser, with_statement

PACKAGE = Path(speedkit_jupyter.__file__).parent
ROOT = PACKAGE.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Commands in backticks or on their own line are parsed whole; in prose, only their first words.
QUOTED = re.compile(r"(?<!`)`(%%?speed(?:kit|bench)\b[^`\n]*)`(?!`)")
OWN_LINE = re.compile(r"^(?:In:)?\s*(%%?speed(?:kit|bench)\b[^`\n]*)$", re.MULTILINE)
PROSE = re.compile(r"%speedkit (?P<command>[a-z]+)|%%speedbench (?P<options>(?:--[a-z-]+ ?)+)")
OWN = re.compile(r'@optimization\("(\w+)"')
# Replaces a value in an f-string.
HOLE = "1"
FOR = {"NUMBER": "1", "N": "2", "TIMES": "2", "FORM": "torch", "ACTION": "show", "TOPIC": "apply"}


def parsed(line: str) -> None:
    """Parse a whole line as the magic does; raise UsageError if it is wrong."""
    words = [FOR.get(word, word) for word in without_comment(line).split(" ")]
    magic, _, rest = " ".join(words).partition(" ")
    if magic.endswith("speedbench"):
        parser().parse_line(rest if magic[:2] == "%%" else with_statement(rest)[0])
        return
    command, _, arguments = rest.strip().partition(" ")
    if command != HOLE:
        commands()[command or "status"].parse_line(arguments)


def check(text: str, where: str, around: str = "") -> int:
    # Cut error messages at the colon after the command. Skip synopses and rows of tables.
    lines = [*QUOTED.findall(text), *(line.partition(": ")[0] for line in OWN_LINE.findall(text))]
    apart = re.compile(rf"\||\[[a-z-]|--{HOLE}|(help|bench) {HOLE}|takes no more|bench  ")
    own = OWN.findall(around or text)  # options that the text itself registers
    whole = [re.sub(rf" --({'|'.join(own)}) \w+", "", line) if own else line for line in lines]
    whole = [line for line in whole if not apart.search(line)]
    for line in whole:
        try:
            parsed(line)
        except UsageError as error:
            if "needs a value" in str(error) or "are required" in str(error):
                continue  # only names an option or a command
            pytest.fail(f"{where}: {line!r}: {error}")
    for match in PROSE.finditer(text):
        assert match["command"] is None or match["command"] in commands(), f"{where}: {match[0]}"
        known = parser()._option_string_actions
        assert all(word in known for word in (match["options"] or "").split()), match[0]
    return len(whole)


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a source file except docstrings, with HOLE for values in f-strings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    apart = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    apart += [node.value for node in nodes if isinstance(node, ast.Expr)]
    inside = set(map(id, apart))
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] * (id(node) not in inside)


def test_documents_reports_and_errors_name_commands_that_run():
    assert sum(check(path.read_text(encoding="utf-8"), path.name) for path in DOCUMENTS) > 20
    assert sum(check(t, path.name) for path in PACKAGE.rglob("*.py") for t in strings(path)) > 20


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_and_their_outputs_name_commands_that_run(path):
    found, own = 0, path.read_text(encoding="utf-8").replace('\\"', '"')
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        outputs = cell.get("outputs", ())
        texts = [cell["source"], *(output.get("text", "") for output in outputs)]
        texts += [output.get("data", {}).get("text/plain", "") for output in outputs]
        found += sum(check("".join(text), path.name, own) for text in texts)
    assert found or "%load_ext" not in own


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("%speedkit apply   # applies the plan; with -v NAME, NAME.apply() too", "Applied to"),
        ("%speedkit   # what is on, and what isn't", "would do this"),
        ("%speedkit explain gemm # it's", "gemm"),
        ('%%speedbench -n 1 -r 1  # a note about --tune and "quotes\nmodel(x)', "per loop"),
    ],
)
def test_comments_behind_a_line_are_ignored(shell, line, shown):
    assert shown in shell.run(line)


def test_a_number_sign_in_quotes_or_in_a_word_is_no_comment():
    assert without_comment("--save a#3 'b # c' \"d # e\" # f 'g'") == "--save a#3 'b # c' \"d # e\""
    assert without_comment("total = 'it\\'s # x'  # y") == "total = 'it\\'s # x'"
