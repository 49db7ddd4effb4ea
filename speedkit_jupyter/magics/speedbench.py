"""%%speedbench: parse the line and the cell, drain the engine, display."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.magics import accuracy, speedbench_options
from speedkit_jupyter.magics.applied import Applied
from speedkit_jupyter.magics.cell import Cell
from speedkit_jupyter.magics.cell_output import streams_kept
from speedkit_jupyter.magics.cell_profile import profiler, profiler_again
from speedkit_jupyter.magics.cell_step import step_again, step_of_cell
from speedkit_jupyter.magics.errors import STOPPED
from speedkit_jupyter.magics.line import split_setup, without_comment
from speedkit_jupyter.magics.namespace import (
    check_result_name,
    chosen_by,
)
from speedkit_jupyter.magics.progress import ProgressLine
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.timing import Timing
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.rounds.timeit_run import Loop, Timer, device_of
from speedkit_jupyter.measure.subject.environment import environment
from speedkit_jupyter.measure.subject.variants import check_free, parse, variant_names
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.profiler import Profiler
from speedkit_jupyter.report.history_report import since
from speedkit_jupyter.report.tuning_report import found_by, is_settled
from speedkit_jupyter.session import MeasuredCell, Session
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import is_text
from speedkit_jupyter.support.interrupts import in_windows
from speedkit_jupyter.support.tracebacks import lets_go
from speedkit_jupyter.support.words import count
from speedkit_jupyter.tuning.outcome import Tuning
from speedkit_jupyter.tuning.search import Search

TIMEIT_OPTIONS = ("n", "r", "p", "t", "c")
# What --profile has nothing to do with.
NOT_OF_A_PROFILE = (
    *TIMEIT_OPTIONS,
    *("compare", "tune", "check", "throughput", "save", "objective", "steps", "apply", "fresh"),
    *("within", "keep", *accuracy.OPTIONS),
)
DIGITS = 3


@lets_go
@in_windows
def run(
    shell: Any, session: Session, line: str, source: str
) -> Comparison | Profile | Timing | Tuning | None:
    """One `%%speedbench` cell. Ctrl-C shows the results so far and then stops the notebook."""
    __tracebackhide__ = True
    begun_s = clock.now()
    if not is_text(line + source):
        raise UsageError("%%speedbench: half a character (as \\ud800) is no code")
    line = without_comment(line)
    typed, setup = split_setup(speedbench_options.parser(), line)
    arguments = speedbench_options.parser().parse_line(typed)
    check_result_name("%%speedbench", arguments.v, shell.user_ns)
    cell = Cell(shell, source, line)
    command = f"%%speedbench {line.strip()}\n{source.rstrip()}"
    work = _work(shell, cell, arguments, setup, command)
    work.begun_s = begun_s
    title = next((row for row in source.splitlines() if row.strip()), "")
    session.measured = MeasuredCell(
        title.strip(),
        partial(step_again, shell, cell, arguments),
        partial(profiler_again, shell, cell, arguments, command),
    )
    skipped: list[str] = []
    earlier = database.saved(arguments.save, skipped)[-1:] if arguments.save else []
    given = work if arguments.apply else None
    with streams_kept(), Applied(shell, session, given) as applied:
        result = _drain(work, arguments, earlier, shell.user_ns)
        applied.settle()
    if isinstance(result, Tuning) and is_settled(result):
        session.tuned(result.models, found_by(result))
    if arguments.save:
        database.save(arguments.save, result.to_dict())
        for note in skipped:
            print(note)
    return result if arguments.o else None


def _work(shell: Any, cell: Cell, arguments: Any, setup: str, command: str) -> Any:
    """What the options ask for; raises UsageError where they don't fit together."""
    if arguments.profile:
        _refuse(arguments, NOT_OF_A_PROFILE, "to timing, comparing and tuning, not to --profile")
        _refuse_setup(setup)
        return profiler(shell, cell, arguments, command, arguments.budget)
    if arguments.tune:
        return _search(shell, cell, arguments, setup)
    _refuse(arguments, ("objective", "within", "steps", "apply", "fresh", "keep"), "to --tune")
    if arguments.save is not None:
        check_free(arguments.save)
    if arguments.compare is None:
        return _timer(shell, cell, arguments, setup, command)
    return _benchmark(shell, cell, arguments, setup, command)


def _benchmark(shell: Any, cell: Cell, arguments: Any, setup: str, command: str) -> Benchmark:
    _refuse(arguments, TIMEIT_OPTIONS, "to timing without --compare")
    if setup and arguments.compare.endswith(","):
        raise UsageError(f"%%speedbench: --compare takes commas without spaces (before {setup!r})")
    _refuse_setup(setup)
    return Benchmark(
        step_of_cell(shell, cell, arguments),
        parse(arguments.compare),
        arguments.budget,
        throughput=arguments.throughput,
        check=arguments.check or (),
        command=command,
        accuracy=accuracy.named(shell.user_ns, arguments, "%%speedbench"),
    )


def _search(shell: Any, cell: Cell, arguments: Any, setup: str) -> Search:
    """With --tune: the fastest safe plan for this cell."""
    _refuse(arguments, ("compare", "check", "throughput", "save"), "to a comparison, not to --tune")
    _refuse(arguments, TIMEIT_OPTIONS, "to timing without --tune")
    _refuse_setup(setup)
    step = step_of_cell(shell, cell, arguments)
    objective = arguments.objective or "time"
    keep = arguments.keep or ()
    named = accuracy.named(shell.user_ns, arguments, "%%speedbench")
    fresh = arguments.fresh
    within = arguments.within
    return Search(step, arguments.budget, arguments.steps, objective, fresh, keep, named, within)


def _refuse(arguments: Any, options: Sequence[str], where: str) -> None:
    for option in options:
        if getattr(arguments, option) is not None and getattr(arguments, option) is not False:
            dashes = "-" if len(option) == 1 else "--"
            raise UsageError(f"%%speedbench: {dashes}{option} belongs {where}")


def _refuse_setup(setup: str) -> None:
    if setup:
        named = f"; -v {setup} keeps the result" if setup.isidentifier() else ""
        raise UsageError(
            f"%%speedbench: {setup!r}: set-up code belongs to timing without --compare and --tune; "
            f"put it into an earlier cell{named}"
        )


def _timer(shell: Any, cell: Cell, arguments: Any, setup: str, command: str) -> Timer:
    """Without --compare: the cell as it stands, with a plan in force if there is one."""
    of_a_comparison = ("check", "throughput", *accuracy.OPTIONS)
    _refuse(arguments, of_a_comparison, "to a comparison: add --compare")
    if setup and variant_names(setup) and not any(n in shell.user_ns for n in setup.split(",")):
        raise UsageError(f"%%speedbench: did you mean --compare {setup}?")
    loop, compile_s = _loop(cell, setup)
    step = step_of_cell(shell, cell, arguments)
    where = environment(device_of(step))
    digits = DIGITS if arguments.p is None else arguments.p
    timing = Timing(compile_time=compile_s, precision=digits, environment=where, command=command)
    timer = _cpu_seconds if arguments.c else time.time if arguments.t else time.perf_counter
    return Timer(
        step,
        loop,
        device_of(step),
        timing,
        arguments.n or None,
        arguments.r,
        arguments.budget,
        timer,
    )


def _loop(cell: Cell, setup: str) -> tuple[Loop, float]:
    """The cell's loop; an option that was typed too late is no syntax error."""
    try:
        cell.begin_with(setup)
        return cell.loop()
    except SyntaxError:
        options = speedbench_options.parser()._option_string_actions
        late = next((word for word in setup.split() if word.partition("=")[0] in options), None)
        if late is None:
            raise
        begin = setup.partition(late)[0].strip() or setup
        raise UsageError(
            f"%%speedbench: {late} stands behind {begin!r}, which is read as set-up code: "
            "options come first"
        ) from None


def _cpu_seconds() -> float:
    """What `%timeit -c` counts: IPython's own clock of CPU time."""
    from IPython.utils.timing import clock

    return float(clock())


def _drain(
    work: Benchmark | Profiler | Timer | Search,
    arguments: Any,
    earlier: list[database.Saved],
    names: dict[str, Any],
) -> Any:
    """Run to the end; the result takes the place of the progress line, and the name of -v."""
    __tracebackhide__ = True
    title = count(len(work.variants), "variant") if isinstance(work, Benchmark) else "timing"
    title = "tuning" if isinstance(work, Search) else title
    title = "profiling" if isinstance(work, Profiler) else title
    quiet = arguments.q or arguments.o  # with -o the cell's own output shows it
    tried = [variant.name for variant in work.variants] if isinstance(work, Benchmark) else []
    draws = not quiet and not isinstance(work, Timer | Profiler)
    with ProgressLine(title, tried, draws) as progress:
        steps: Generator[Progress, None, None] = work.run()
        try:
            with closing(steps):
                for state in steps:
                    progress.show(state)
        except KeyboardInterrupt:
            if work.has_results():
                result = work.result()
                if arguments.v:
                    names[arguments.v] = result
                progress.replace(result)
            raise KeyboardInterrupt(STOPPED) from None
        result = work.result()
        if isinstance(result, Tuning):
            result.named = chosen_by(names, list(result.models))
        if arguments.v:
            names[arguments.v] = result
        if not quiet:
            progress.replace(result)
    for kept in earlier if not arguments.q else ():
        print("\n".join(since(kept, result.to_dict())))
    return result
