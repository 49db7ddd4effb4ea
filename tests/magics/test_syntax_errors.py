"""A SyntaxError in a measured cell looks as IPython shows that of a plain cell."""

from __future__ import annotations

import re

import pytest
from IPython.core.error import UsageError
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


@pytest.mark.parametrize("setup", ["return", "yield", "break", "a = 1; return 5"])
def test_set_up_code_is_refused_as_a_cell_is(shell, setup):
    error, _ = shown(shell, f"%%speedbench -n 1 {setup}\nmodel(x)")
    assert isinstance(error, SyntaxError)


@pytest.mark.parametrize(
    "cell",
    [
        "await x",
        "a = [b async for b in x]",
        "async with x: pass",
        "async for a in x: pass",
        "{await a: 1 for a in x}",
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_top_level_await_is_refused_in_one_line(shell, way, cell):
    error, _ = shown(shell, f"{way}\n{cell}")
    assert isinstance(error, UsageError)
    assert "top-level await" in str(error)


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


@pytest.mark.parametrize("cell", ["x = 'a\x00b'", "(" * 5000 + ")" * 5000])
def test_what_cant_be_compiled_at_all_shows_none_of_our_insides(shell, cell):
    error, ours = shown(shell, f"%%speedbench\n{cell}")
    assert error is not None
    assert "speedkit_jupyter" not in ours


@pytest.mark.kernel
@pytest.mark.slow
def test_it_looks_so_in_a_real_kernel(kernel):
    kernel("%load_ext speedkit_jupyter")
    named = re.compile(r'Cell In\[\d+\]|"[^"]*(ipython-input|ipykernel)[^"]*"')
    for kind in KINDS:
        plain = kernel(f"# {WAYS[0]}\n{kind}")
        ours = kernel(f"{WAYS[0]}\n{kind}")
        assert ours["ename"] == plain["ename"]
        assert named.sub("CELL", ours["traceback"]) == named.sub("CELL", plain["traceback"])
    kernel("%unload_ext speedkit_jupyter")
