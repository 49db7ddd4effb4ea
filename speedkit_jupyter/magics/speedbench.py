"""%%speedbench: parse the line and the cell, run the engine, display."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.codegen.training_loop import Words
from speedkit_jupyter.magics.cell import Cell
from speedkit_jupyter.magics.cell_output import streams_kept
from speedkit_jupyter.magics.cell_step import again, profiler, step_of_cell
from speedkit_jupyter.magics.line import split_setup, without_comment
from speedkit_jupyter.magics.namespace import (
    check_result_name,
    chosen_by,
    inside_others,
    models,
    words_for,
)
from speedkit_jupyter.magics.options import ACCURACY, accuracy_of, speedbench_parser
from speedkit_jupyter.magics.progress import measured
from speedkit_jupyter.measure.results.timing import Timing
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.benchmark import Benchmark
from speedkit_jupyter.measure.rounds.timeit_run import Loop, Timer, device_of
from speedkit_jupyter.measure.subject.environment import environment
from speedkit_jupyter.measure.subject.variants import check_free, parse, variant_names
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.report.history_report import since
from speedkit_jupyter.report.plan_report import applied_report
from speedkit_jupyter.session import MeasuredCell, Session
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.support.exceptions import is_text
from speedkit_jupyter.support.interrupts import in_windows
from speedkit_jupyter.support.tracebacks import lets_go
from speedkit_jupyter.support.words import count
from speedkit_jupyter.tuning.search import Search

TIMEIT_OPTIONS = ("n", "r", "p", "t", "c")
OF_A_SEARCH = ("objective", "within", "steps", "apply", "fresh", "keep")
OF_A_COMPARISON = ("compare", "check", "throughput", "save")
DIGITS = 3


@lets_go
@in_windows
def run(shell: Any, session: Session, line: str, source: str) -> Any:
    """Run one `%%speedbench` cell. Ctrl-C shows the results so far and then stops the notebook."""
    __tracebackhide__ = True
    begun_s = clock.now()
    if not is_text(line + source):
        raise UsageError("%%speedbench: half a character (as \\ud800) is no code")
    line = without_comment(line)
    typed, setup = split_setup(speedbench_parser(), line)
    arguments = speedbench_parser().parse_line(typed)
    check_result_name("%%speedbench", arguments.v, shell.user_ns)
    cell = Cell(shell, source, line)
    command = f"%%speedbench {line.strip()}\n{source.rstrip()}"
    work, title = _work(shell, cell, arguments, setup, command)
    work.begun_s = begun_s
    session.measured = MeasuredCell(
        next((row.strip() for row in source.splitlines() if row.strip()), ""),
        partial(again, step_of_cell, shell, cell, arguments, True),
        partial(again, profiler, shell, cell, arguments, command),
    )
    skipped: list[str] = []
    earlier = database.saved(arguments.save, skipped)[-1:] if arguments.save else []
    applied = _Applied(shell, session, work if arguments.apply else None)
    with streams_kept(), applied:
        result = _measured(work, title, shell, arguments)
        applied.settle()
    if arguments.save:
        database.save(arguments.save, result.to_dict())
        for text in [*_since(earlier, result, arguments), *skipped]:
            messages.note(text)
    return result if arguments.o else None


def _measured(work: Any, title: str, shell: Any, arguments: Any) -> Any:
    """Run the engine; with -o the cell's own output shows the result."""
    __tracebackhide__ = True
    tried = [variant.name for variant in work.variants] if isinstance(work, Benchmark) else []
    is_quiet, draws = arguments.q or arguments.o, isinstance(work, Benchmark | Search)
    return measured(
        work, title, shell.user_ns, arguments.v, tried=tried, is_quiet=is_quiet, draws=draws
    )


def _since(earlier: Sequence[database.Saved], result: Any, arguments: Any) -> list[str]:
    """How the result compares with the one that was saved before."""
    if arguments.q:
        return []
    return ["\n".join(since(kept, result.to_dict())) for kept in earlier]


def _work(shell: Any, cell: Cell, arguments: Any, setup: str, command: str) -> tuple[Any, str]:
    """What the options ask for, and its title; raises UsageError where they don't fit together."""
    if arguments.profile:
        refused = (*TIMEIT_OPTIONS, *OF_A_COMPARISON, *OF_A_SEARCH, "tune", *ACCURACY)
        _refuse(arguments, refused, "to timing, comparing and tuning, not to --profile")
        _refuse_setup(setup)
        return profiler(shell, cell, arguments, command, arguments.budget), "profiling"
    if arguments.tune:
        return _search(shell, cell, arguments, setup), "tuning"
    _refuse(arguments, OF_A_SEARCH, "to --tune")
    if arguments.save is not None:
        check_free(arguments.save)
    if arguments.compare is None:
        return _timer(shell, cell, arguments, setup, command), "timing"
    benchmark = _benchmark(shell, cell, arguments, setup, command)
    return benchmark, count(len(benchmark.variants), "variant")


def _benchmark(shell: Any, cell: Cell, arguments: Any, setup: str, command: str) -> Benchmark:
    """With --compare: plans for this cell."""
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
        accuracy=accuracy_of(shell.user_ns, arguments, "%%speedbench"),
    )


def _search(shell: Any, cell: Cell, arguments: Any, setup: str) -> Search:
    """With --tune: the fastest safe plan for this cell."""
    _refuse(arguments, OF_A_COMPARISON, "to a comparison, not to --tune")
    _refuse(arguments, TIMEIT_OPTIONS, "to timing without --tune")
    _refuse_setup(setup)
    search = Search(
        step_of_cell(shell, cell, arguments),
        arguments.budget,
        arguments.steps,
        arguments.objective or "time",
        arguments.fresh,
        arguments.keep or (),
        accuracy_of(shell.user_ns, arguments, "%%speedbench"),
        arguments.within,
    )
    search.result().named = chosen_by(shell.user_ns, list(search.result().models))
    return search


def _timer(shell: Any, cell: Cell, arguments: Any, setup: str, command: str) -> Timer:
    """Without --compare: the cell as it stands, with a plan in force if there is one."""
    _refuse(arguments, ("check", "throughput", *ACCURACY), "to a comparison: add --compare")
    if setup and variant_names(setup) and not any(n in shell.user_ns for n in setup.split(",")):
        raise UsageError(f"%%speedbench: did you mean --compare {setup}?")
    loop, compile_s = _loop(cell, setup)
    step = step_of_cell(shell, cell, arguments)
    device = device_of(step)
    digits = DIGITS if arguments.p is None else arguments.p
    timing = Timing(
        compile_time=compile_s, precision=digits, environment=environment(device), command=command
    )
    timer = _cpu_seconds if arguments.c else time.time if arguments.t else time.perf_counter
    loops, runs = arguments.n or None, arguments.r
    return Timer(step, loop, device, timing, loops, runs, arguments.budget, timer)


def _loop(cell: Cell, setup: str) -> tuple[Loop, float]:
    """The cell's loop; an option that was typed too late is no syntax error."""
    try:
        cell.begin_with(setup)
        return cell.loop()
    except SyntaxError:
        known = speedbench_parser()._option_string_actions
        late = next((word for word in setup.split() if word.partition("=")[0] in known), None)
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


class _Applied:
    """--apply, around a search: a plan that is known is in force at once.

    `settle()` at its end keeps what holds; whatever is raised, nothing stays. Without a search it
    does nothing.
    """

    def __init__(self, shell: Any, session: Session, search: Search | None) -> None:
        self._names, self._session, self._search = shell.user_ns, session, search
        self._contexts: list[SpeedContext] = []
        self._settled = False

    def __enter__(self) -> None:
        __tracebackhide__ = True
        if self._search is not None and self._search.recall().helped:
            self._apply()

    def __exit__(self, *exception: object) -> None:
        if not self._settled:
            self._restore()

    def settle(self) -> None:
        """Apply what was found; the learned plan stays in force where it held."""
        self._settled = True
        if self._search is None:
            return
        tuning = self._search.result()
        if self._contexts and tuning.learned is not None and tuning.confirmed:
            return
        self._restore()
        if tuning.helped:
            self._apply()

    def _apply(self) -> None:
        assert self._search is not None
        self._contexts = self._search.result().put_in_force()
        every = models(self._names) | inside_others(self._names)
        words = {id(model): name for name, model in every.items()}
        for number, context in enumerate(self._contexts, 1):
            name = words.get(id(context.model), f"model_{number}")
            optimizers = words_for(self._names, context.target.optimizers)
            variable = self._session.keep(name, context)
            display(applied_report(context, Words(name, optimizers, variable, self._names)))

    def _restore(self) -> None:
        for context in self._contexts:
            context.restore()
        self._contexts = []
