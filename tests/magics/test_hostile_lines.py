"""Lines that nobody would type: an answer or one clear error, soon, and never our own traceback."""

from __future__ import annotations

import sqlite3
import traceback

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from IPython.utils.capture import capture_output

from speedkit_jupyter.magics.commands import COMMANDS
from speedkit_jupyter.plans import context
from speedkit_jupyter.support import database

LINES = (
    "apply model --precision bf16 --optimizer optimizer --ctx ctx", "apply --threads 1 --rules",
    "report model --json", "code model --as torch", "code --as yaml --optimizer optimizer",
    "restore", "config save c.yaml", "config load c.yaml", "config reset", "repair", "status",
    "history NAME --forget", "history", "tuned forget 3", "tuned", "help speedbench", "help",
    "verify --steps 2 --step nothing", "apply model[0]", "report model[3]",
)  # fmt: skip
TOKENS = (
    "\0", "🦊", "ﷺ", "'", '"', "\\", "--", "-", "=", "9" * 24, "-1", "1e400", "nan", "%s", "{x}",
    "$x", "\t", "\u202e", "\ud800", "a" * 5000, "--compile", "--threads", "../../etc", "/",
    "model.0", "model[0]", "model[9]", "model[", "model.__class__", "model[0].weight", "ctx",
    "ctx.model", "__import__('os')", "[m for m in x]", "(" * 300, "true", "None", "[]", "bf16+",
    "+", ",", "baseline", "threads:-1", "threads:" + "9" * 24, "sdpa:x", "auto", "current", "٣",
    "²", "\uff11", "-h", "--help", "--json", "--save", "-v", "class", "x y", "--optimizer",
    "--model", "--config", "/dev/null", "~", "*", "\x1b[31m", "0x10", "1_0", "`", "<b>",
    *COMMANDS,
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, lines: tuple[str, ...]) -> str:
    """A line with some words taken out, put in or put elsewhere."""
    words = draw(st.sampled_from(lines)).split(" ")
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(words)))
        kind = draw(st.sampled_from(["insert", "replace", "cut", "shuffle", "take"]))
        if kind == "insert":
            words.insert(place, draw(st.sampled_from(TOKENS)))
        elif kind == "shuffle":
            words = draw(st.permutations(words))
        elif words and place < len(words):
            cut = words[place][: draw(st.integers(0, len(words[place])))]
            new = {"replace": draw(st.sampled_from(TOKENS)), "cut": cut, "take": ""}[kind]
            words[place] = new
    return " ".join(words)


def check(message: str) -> None:
    """What a user is told: a line, of a config a line for each mistake."""
    message.encode()
    assert len(message.splitlines()) <= 12
    assert len(message) < 3000


@examples(80)
@given(mutated(LINES))
def test_any_line_is_an_answer_or_one_usage_error(shell, monkeypatch, tmp_path, line):
    monkeypatch.chdir(tmp_path)
    try:
        with capture_output() as captured:
            shell.ip.run_line_magic("speedkit", line)
        captured.stdout.encode()
    except UsageError as error:
        check(str(error))
    finally:
        context.restore_all()


def check_it_is_the_set_up_codes(error: Exception) -> None:
    """Raised where we ran it, not by our own code."""
    assert "speedkit_jupyter" not in traceback.extract_tb(error.__traceback__)[-1].filename


BENCHES = (
    "-n 1 -r 1", "-n1 -r1 x = 3", "-n 1 -r 1 -p 3 -q -o", "-n1 -r1 -v res --save n1",
    "-n1 -r1 --budget 0.01", "--compare nothing --budget 0.05", "--tune --compare a,b",
)  # fmt: skip


@examples(40)
@given(mutated(BENCHES))
def test_any_line_of_a_benchmark_is_an_answer_or_one_error_about_it(shell, line):
    try:
        with capture_output():
            shell.ip.run_cell_magic("speedbench", f"{line} -n1 -r1", "pass")
    except UsageError as error:
        check(str(error))
    except SyntaxError:
        pass  # what is no option is set-up code, as with %%timeit
    except Exception as error:
        check_it_is_the_set_up_codes(error)


def broken_row(name: str = "kept") -> None:
    """One good result and one that no reader understands, and the same of learned plans."""
    for _ in range(2):
        database.save(name, {"variants": [], "environment": {}})
        database.learn("setting", "task", {"name": "x"})
    connection = sqlite3.connect(database.folder() / "speedkit.sqlite")
    with connection:
        connection.execute("UPDATE entries SET value = '{bad' WHERE id = 1")
    connection.close()


def test_what_can_not_be_read_is_a_line_below_what_can(shell):
    broken_row()
    for line in ("history", "history kept"):
        shown = shell.run(f"%speedkit {line}")
        assert "result 1 can't be read and is left out: it is no JSON" in shown
    assert "plan 4 can't be read" in " ".join(shell.run("%speedkit tuned").split())
    assert "Forgot 1" in shell.run("%speedkit tuned forget 4")
    shown = shell.run("%%speedbench -n1 -r1 --save kept\n1")
    assert "result 1 can't be read" in shown
    assert "Deleted 3 results" in shell.run("%speedkit history kept --forget")


def test_long_and_unprintable_words_are_cut_and_escaped(shell):
    error = shell.fails(f"%speedkit apply {'a' * 9000}")
    assert len(str(error)) < 700
    with pytest.raises(UsageError) as raised:
        shell.ip.run_line_magic("speedkit", "apply \ud800\x1b[31m")
    assert "\x1b" not in str(raised.value)
    str(raised.value).encode()
