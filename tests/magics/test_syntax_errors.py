"""A SyntaxError in a measured cell looks as IPython shows that of a plain cell."""

from __future__ import annotations

import re

import pytest
from IPython.utils.capture import capture_output

COLOURS = re.compile(r"\x1b\[[\d;]*m")
# A cell, as an IPython of today and of then calls it.
CELL = re.compile(r'Cell In\[\d+\]|"<ipython-input-\d+-[0-9a-f]+>"')
KINDS = (
    "x = (",
    "x = [1,\n2",
    "x = 1)",
    "x = (1]",
    "return 5",
    "a = 1\nreturn",
    "yield 5",
    "x = yield",
    "break",
    "if True:\n    continue",
    "nonlocal x",
    "def f():\n1",
    "a = 1\n  b = 2",
    "if True:\n        a = 1\n    b = 2",
    "x = “a”",
    "x = 1 +",
    "1 = x",
    "f(a=1, a=1)",
    "def f(a, a): pass",
    "x = 'a",
    "x = '''a\nb",
    "del f()",
    "x = 1\ndef f():\n    x = 2\n    global x",
    "from __future__ import nothing",
    "async def f():\n    yield from x",
    "print 1",
    "x = 0777",
    "\n\n\nx = (",
    "# one\n\n# two\nx = $",
    "class A:\n    return 1",
    "lambda: (yield",
    "f'{'",
)
WAYS = (
    "%%speedbench",
    "%%speedbench -n 1 -v kept a = 1",
    "%%speedbench --compare baseline,bf16 --budget 0.1",
    "%%speedbench --tune --budget 0.1",
)


def shown(shell, cell):
    with capture_output() as captured:
        result = shell.ip.run_cell(cell, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    return error, CELL.sub("CELL", COLOURS.sub("", captured.stdout)).rstrip()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_looks_as_in_a_plain_cell(shell, kind, way):
    plain, looks = shown(shell, f"# {way}\n{kind}")
    error, ours = shown(shell, f"{way}\n{kind}")
    assert type(error) is type(plain)
    assert isinstance(error, SyntaxError)
    assert ours == looks
    assert "showsyntaxerror" not in vars(shell.ip)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["x = (", "return 5", "def f():\n1", "x = “a”"])
def test_it_does_so_under_any_ipython(shell, kind):
    test_it_looks_as_in_a_plain_cell(shell, kind, WAYS[0])


def test_one_that_the_users_code_has_raised_shows_the_users_frames(shell):
    error, ours = shown(shell, "%%speedbench\nmodel(x)\nexec('1 +')")
    assert isinstance(error, SyntaxError)
    lines = [line for line in ours.splitlines() if line.lstrip().startswith(("File", "CELL"))]
    assert len(lines) == 2  # the cell, and what it ran
    assert "line 3" in ours
    assert ours.endswith("(%%speedbench has put back what the step changed.)")


def test_one_in_set_up_code_points_to_where_that_stands(shell):
    _, ours = shown(shell, "%%speedbench -n 1 a = (\nmodel(x)")
    line, caret = ours.splitlines()[1:3]
    assert line.strip() == "# %%speedbench -n 1 a = ("
    assert caret.index("^") >= line.index("(")


def test_one_that_the_user_catches_leaves_later_ones_as_they_are(shell):
    code = (
        "try:\n    get_ipython().run_cell_magic('speedbench', '', 'x = (')\n"
        "except SyntaxError as error:\n    print('caught', error.lineno)"
    )
    for _ in range(2):
        assert shell.run(code) == "caught 2\n"
    _, looks = shown(shell, "a = 1\nx = (")
    assert "line 2" in looks
    assert "showsyntaxerror" not in vars(shell.ip)
