"""Time cells with %%speedbench, which without --compare does all that %%timeit does."""

import pytest

from speedkit_jupyter.notebook.speedbench import with_statement
from speedkit_jupyter.rounds.busy_machine import Interruptions
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.rounds.timing import RUNS, Timing

pytestmark = pytest.mark.real_time


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Report no delay by other processes, unless a test sets one."""
    monkeypatch.setattr(Interruptions, "seconds", lambda self, wall_s: 0.0)


def timed(shell, line: str, cell: str) -> Timing:
    """Time a cell without showing the result; return the object that `-v` stores."""
    shell.run(f"%%speedbench -q -v timing {line}\n{cell}")
    return shell.names.pop("timing")


@pytest.mark.smoke
def test_a_cell_without_any_model_is_timed_as_by_timeit(shell, made_time):
    shell.names["sleep"] = made_time.sleep
    shown = shell.run("%%speedbench\nsleep(0.21)")  # one loop is enough
    assert f"per loop, {INTERVAL}" in shown
    assert "mean ± std. dev." in shown
    assert f"{RUNS} runs, " in shown


def test_the_object_has_what_timeits_object_has(shell):
    theirs = shell.ip.run_cell_magic("timeit", "-q -o -n 50 -r 4", "sum(range(100))")
    ours = timed(shell, "-n 50 -r 4", "sum(range(100))")
    public = [name for name in dir(theirs) if not name.startswith("_")]
    for name in public:
        assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    assert (ours.loops, ours.repeat, len(ours.all_runs)) == (50, 4, 4)
    assert ours.best == min(ours.all_runs) / 50
    assert ours.worst == max(ours.all_runs) / 50
    assert ours.best <= ours.median_s <= ours.worst


@pytest.mark.smoke
def test_o_returns_the_object_v_names_it_and_a_line_times_its_statement(shell):
    assert isinstance(shell.ip.run_cell_magic("speedbench", "-o -q -n 1 -r 1", "1 + 1"), Timing)
    assert shell.ip.run_cell_magic("speedbench", "-q -n1 -r1 -v kept", "1 + 1") is None
    assert isinstance(shell.names["kept"], Timing)
    assert "per loop" in shell.run("%speedbench -n 1 -r 2 model(x)")


def test_a_budget_asks_for_more_runs(shell, made_time):
    began = made_time.now_s()
    assert timed(shell, "-n 1 --budget 0.5", "1").repeat > 7
    assert made_time.now_s() - began >= 0.5


@pytest.mark.smoke
def test_the_step_runs_and_prints_as_often_as_by_timeit(shell, seen):
    shown = shell.run("%%speedbench -q -n 3 -r 2\nprint('hello'); seen.put(1)")
    assert shown.count("hello") == len(seen()) == 6


def test_a_cell_that_others_hold_up_says_so_first_and_has_an_interval(shell, monkeypatch):
    monkeypatch.setattr(Interruptions, "seconds", lambda self, wall_s: wall_s / 2)
    shown = shell.run("%%speedbench -n 10 -r 8 -v timing\nloss_fn(model(x), y).backward()")
    found = shell.names.pop("timing")
    low, high = found.interval_s or (found.best, found.worst)
    assert found.best <= low <= high <= found.worst
    assert shown.lstrip().startswith("The machine was busy: other programs delayed 8 of 8 runs")


@pytest.mark.parametrize(
    ("line", "parts"),
    [("-n 3 -r2 -q f(x, -1)", ("-n 3 -r2 -q", "f(x, -1)")), (" f('a  b')", ("", "f('a  b')"))],
)
def test_a_line_holds_options_and_a_statement(line, parts):
    options, statement = with_statement(line)
    assert (options.strip(), statement) == parts
