"""%%speedbench: parse the line and the cell, run the engine, display."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.notebook import namespace, options, plugins
from speedkit_jupyter.notebook.cell import Cell, again, step_of_cell
from speedkit_jupyter.notebook.commands.plans import show_applied
from speedkit_jupyter.notebook.progress import measured
from speedkit_jupyter.notebook.session import MeasuredCell, Session
from speedkit_jupyter.plans.naming import name_of
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.record import environment
from speedkit_jupyter.rounds.timeit_run import Timer, device_of
from speedkit_jupyter.rounds.timing import Timing
from speedkit_jupyter.search.outcome import MEMORY
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import parse
from speedkit_jupyter.support import database
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.interrupts import interruptible

TIMING, COMPARE, TUNE, MORE = "timing", "--compare", "--tune", "--more"
# The work that an option belongs to; some belong to two.
BELONGS = {
    **dict.fromkeys(("n", "r", "p"), TIMING),
    **dict.fromkeys(("check", "throughput", "accuracy", "allowed", "better", "compare"), COMPARE),
    **dict.fromkeys(("objective", "within", "steps", "fresh", "keep"), TUNE),
    **dict.fromkeys(("apply", "tune", "more"), f"{TUNE} and {MORE}"),
}


@interruptible
def run(shell: Any, session: Session, line: str, source: str) -> Any:
    """Run one `%%speedbench` cell. Ctrl-C shows the results so far and then stops the notebook."""
    begun_s = clock.now()
    line = options.without_comment(line)
    typed, setup = options.split_setup(parser(), line)
    arguments = parser().parse_line(typed)
    _check_options(arguments, setup)
    cell = Cell(shell, source, line)
    command = f"%%speedbench {line.strip()}\n{source.rstrip()}"
    if (extra := _extra(arguments)) and extra.run:
        return extra.run(shell, session, cell, arguments, command)
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
        name = name_of(session.names, context.model, f"model_{number}")
        optimizers = namespace.words_for(shell.user_ns, context.target.optimizers)
        show_applied(shell.user_ns, session, name, context, optimizers)
    if arguments.save:
        database.save(arguments.save, result.to_dict())
    return result if arguments.o else None


def _mode(arguments: Any) -> str:
    if (extra := _extra(arguments)) is not None:
        return extra.name
    compared = COMPARE if arguments.compare is not None else TIMING
    return MORE if arguments.more else TUNE if arguments.tune else compared


@cache
def parser() -> options.Parser:
    """Return the parser of `%%speedbench` lines."""
    return options.Parser(
        "%%speedbench", [*options.SPEEDBENCH, *(mode.option for mode in plugins.modes())]
    )


def _extra(arguments: Any) -> plugins.Mode | None:
    return next((mode for mode in plugins.modes() if mode.is_asked(arguments)), None)


def _check_options(arguments: Any, setup: str) -> None:
    """Raise UsageError for options that do not go together."""
    mode, extra = _mode(arguments), _extra(arguments)
    for name, of in {**BELONGS, "save": f"{TIMING} and {COMPARE}"}.items():
        if getattr(arguments, name) not in (None, False) and not (
            mode in of or (extra and name in extra.also)
        ):
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
    if (extra := _extra(arguments)) and extra.begin:
        return extra.begin(shell, session, cell, arguments, command)
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
    return _search(names, step, arguments), "tuning"


def _search(names: options.Names, step: Step, arguments: Any) -> PlanSearch:
    """Return a new search, or one that goes on with all that the last one knows."""
    found = {name_of(names, model, "") for model in step.models}
    in_order = [word for word in namespace.words_of_models(names) if word in found]
    named = () if "" in found else tuple(in_order)
    if arguments.more:
        if (last := MEMORY.last) is None or last.source != step.source:
            raise UsageError(f"{MORE}: the last search was not for this cell; {TUNE} begins one")
        return PlanSearch.going_on(step, last, arguments.budget, named)
    objective, keep = arguments.objective or "time", arguments.keep or ()
    asked = (arguments.steps, objective, arguments.fresh, keep, arguments.within)
    return PlanSearch(step, arguments.budget, *asked, named=named)
