"""%%speedbench: parse the line and the cell, run the engine, display."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.extras.check.api import check
from speedkit_jupyter.extras.check.result import Check
from speedkit_jupyter.extras.processes.plugin import compared_on_workers
from speedkit_jupyter.extras.profile.profiler import Profiler
from speedkit_jupyter.notebook import namespace, options
from speedkit_jupyter.notebook.cell import Cell, again, step_of_cell
from speedkit_jupyter.notebook.commands.plans import show_applied
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import MeasuredCell, Session
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.rounds.timeit_run import Timer, device_of
from speedkit_jupyter.rounds.timing import Timing
from speedkit_jupyter.search.api import going_on
from speedkit_jupyter.search.search import Search
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import parse
from speedkit_jupyter.support import database
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.interrupts import interruptible

TIMING, COMPARE, TUNE, PROFILE = "timing", "--compare", "--tune", "--profile"
MORE, AGAINST = "--more", "--against"
LAST_VALUE = "end the cell with the expression that the function returns"
# The work that an option belongs to; some belong to two.
BELONGS = {
    **dict.fromkeys(("n", "r", "p"), TIMING),
    **dict.fromkeys(
        ("processes", "check", "throughput", "accuracy", "allowed", "better", "compare"), COMPARE
    ),
    "against": AGAINST,
    **dict.fromkeys(("objective", "within", "steps", "fresh", "keep"), TUNE),
    **dict.fromkeys(("apply", "tune", "more"), f"{TUNE} and {MORE}"),
}


@interruptible
def run(shell: Any, session: Session, line: str, source: str) -> Any:
    """Run one `%%speedbench` cell. Ctrl-C shows the results so far and then stops the notebook."""
    begun_s = clock.now()
    line = options.without_comment(line)
    typed, setup = options.split_setup(options.speedbench_parser(), line)
    arguments = options.speedbench_parser().parse_line(typed)
    _check_options(arguments, setup)
    cell = Cell(shell, source, line)
    if arguments.processes:
        return compared_on_workers(shell, session, cell, arguments)
    command = f"%%speedbench {line.strip()}\n{source.rstrip()}"
    work, title = _work(shell, session, cell, arguments, setup, command)
    work.begun_s = begun_s
    session.measured = MeasuredCell(
        next((row.strip() for row in source.splitlines() if row.strip()), ""),
        command,
        partial(again, shell, cell, arguments),
    )
    is_quiet = arguments.q or arguments.o  # with -o the cell's own output shows the result
    result = measured(work, title, shell.user_ns, arguments.v, is_quiet=is_quiet)
    in_force = result.put_in_force() if arguments.apply and result.helped else ()
    for number, context in enumerate(in_force, 1):
        name = session.name_of(context.model, f"model_{number}")
        optimizers = namespace.words_for(shell.user_ns, context.target.optimizers)
        show_applied(shell.user_ns, session, name, context, optimizers)
    if arguments.save:
        database.save(arguments.save, result.to_dict())
    return result if arguments.o else None


def _mode(arguments: Any) -> str:
    compared = COMPARE if arguments.compare is not None else TIMING
    compared = AGAINST if arguments.against is not None else compared
    tuned = MORE if arguments.more else TUNE if arguments.tune else compared
    return PROFILE if arguments.profile else tuned


def _check_options(arguments: Any, setup: str) -> None:
    """Raise UsageError for what does not go together."""
    mode = _mode(arguments)
    for name, of in {**BELONGS, "save": f"{TIMING} and {COMPARE}"}.items():
        if getattr(arguments, name) not in (None, False) and mode not in of:
            option = f"-{name}" if len(name) == 1 else f"--{name}"
            belongs = f": it belongs to {of}" if of != option else ""
            raise UsageError(f"{option} does not go with {mode}{belongs}")
    if setup and mode == COMPARE and arguments.compare.endswith(","):
        raise UsageError(f"--compare takes commas without spaces (before {setup!r})")
    if setup and mode != TIMING:
        hint = f"; -v {setup} keeps the result" if setup.isidentifier() else ""
        raise UsageError(
            f"{setup!r}: set-up code belongs to {TIMING}; put it into an earlier cell{hint}"
        )


def _work(
    shell: Any, session: Session, cell: Cell, arguments: Any, setup: str, command: str
) -> tuple[Any, str]:
    mode, names = _mode(arguments), shell.user_ns
    if mode == PROFILE:
        called = namespace.names_of_models(names)
        step = step_of_cell(shell, cell, arguments)
        return Profiler(step, arguments.budget, command, called), "profiling"
    if mode == AGAINST:
        return Against(shell, cell, arguments.against, arguments.budget), "checking"
    loop = cell.loop(setup) if mode == TIMING else None
    step = step_of_cell(shell, cell, arguments)
    if loop is not None:
        device, digits = device_of(step), 3 if arguments.p is None else arguments.p
        timing = Timing(precision=digits, environment=environment(device), command=command)
        loops, runs = arguments.n or None, arguments.r
        return Timer(step, loop, device, timing, loops, runs, arguments.budget), TIMING
    if mode == COMPARE:
        variants = parse(arguments.compare)
        accuracy, check = options.accuracy_of(names, arguments), arguments.check or ()
        more: Any = {"throughput": arguments.throughput, "check": check, "command": command}
        benchmark = Benchmark(step, variants, arguments.budget, accuracy=accuracy, **more)
        return benchmark, count(len(variants), "variant")
    search = _search(session, step, arguments)
    found = {session.name_of(model, "") for model in search.result().models}
    in_order = [word for word in namespace.words_of_models(names) if word in found]
    search.result().named = () if "" in found else tuple(in_order)
    return search, "tuning"


def _search(session: Session, step: Step, arguments: Any) -> Search:
    """Return a new search, or one that goes on with what the last one knows."""
    if arguments.more:
        if (last := session.search) is None or last.source != step.source:
            raise UsageError(f"{MORE}: the last search was not for this cell; {TUNE} begins one")
        return going_on(step, last, arguments.budget)
    objective, keep = arguments.objective or "time", arguments.keep or ()
    asked = (arguments.steps, objective, arguments.fresh, keep, arguments.within)
    return Search(step, arguments.budget, *asked)


class Against:
    """Checks the cell's last value against the function's, with new numbers for its parameters.

    These are names of the notebook: `def reference(q, k)` gets what is like `q` and `k` there. The
    cell runs in a copy of the namespace, so that it binds nothing.
    """

    def __init__(self, shell: Any, cell: Cell, name: str, budget_s: float | None) -> None:
        self._cell, self._names, self._budget_s = cell, shell.user_ns, budget_s
        self._reference = namespace.find_function(shell.user_ns, name)
        self._found: Check | None = None
        if not cell.has_value:
            raise UsageError(f"--against {name}: {LAST_VALUE}")
        needed = list(inspect.signature(self._reference).parameters)
        for one in needed:
            if one not in shell.user_ns:
                raise UsageError(
                    f"--against {name}: its parameter {one} is no name of the notebook"
                )
        self._inputs = {one: shell.user_ns[one] for one in needed}

    def run(self) -> Iterator[Progress]:
        """Check; there is no progress in between."""

        def cell(**given: Any) -> Any:
            return self._cell.within({**self._names, **given}).run()

        yield Progress(0.0, "comparing and timing")
        with self._cell.quiet():
            self._found = check(cell, self._reference, self._inputs, budget_s=self._budget_s)

    def has_results(self) -> bool:
        return self._found is not None

    def result(self) -> Check:
        assert self._found is not None
        return self._found
