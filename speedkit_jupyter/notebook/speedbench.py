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
from speedkit_jupyter.rounds.timing import Timer, Timing, device_of
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import parse
from speedkit_jupyter.support import database
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.interrupts import interruptible

TIMING, COMPARE, TUNE = "timing", "--compare", "--tune"
# The work that an option belongs to.
BELONGS = {
    **dict.fromkeys(("n", "r"), TIMING),
    **dict.fromkeys(("accuracy", "allowed", "better", "compare"), COMPARE),
    **dict.fromkeys(("fresh", "keep", "apply", "tune"), TUNE),
}


@interruptible
def run(shell: Any, session: Session, line: str, source: str) -> Any:
    """Run one `%%speedbench` cell. Ctrl-C shows the results so far and then stops the notebook."""
    begun_s = clock.now()
    line = options.without_comment(line)
    arguments = parser().parse_line(line)
    _check_options(arguments)
    cell = Cell(shell, source, line)
    command = f"%%speedbench {line.strip()}\n{source.rstrip()}"
    if (extra := _extra(arguments)) and extra.run:
        return extra.run(shell, session, cell, arguments, command)
    work, title = _work(shell, session, cell, arguments, command)
    work.begun_s = begun_s
    first_line = next((row.strip() for row in source.splitlines() if row.strip()), "")
    session.remember(MeasuredCell(first_line, command, partial(again, shell, cell, arguments)))
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
    return TUNE if arguments.tune else compared


@cache
def parser() -> options.Parser:
    """Return the parser of `%%speedbench` lines."""
    return options.Parser(
        "%%speedbench", [*options.SPEEDBENCH, *(mode.option for mode in plugins.modes())]
    )


def _extra(arguments: Any) -> plugins.Mode | None:
    return next((mode for mode in plugins.modes() if mode.is_asked(arguments)), None)


def _check_options(arguments: Any) -> None:
    """Raise UsageError for options that do not go together."""
    mode, extra = _mode(arguments), _extra(arguments)
    for name, of in {**BELONGS, "save": f"{TIMING} and {COMPARE}"}.items():
        if getattr(arguments, name) not in (None, False) and not (
            mode in of or (extra and name in extra.also)
        ):
            option = f"-{name}" if len(name) == 1 else f"--{name}"
            belongs = f": it belongs to {of}" if of != option else ""
            raise UsageError(f"{option} does not go with {mode}{belongs}")


def _work(
    shell: Any, session: Session, cell: Cell, arguments: Any, command: str
) -> tuple[Any, str]:
    mode, names = _mode(arguments), shell.user_ns
    if (extra := _extra(arguments)) and extra.begin:
        return extra.begin(shell, session, cell, arguments, command)
    step = step_of_cell(shell, cell, arguments)
    if mode == TIMING:
        device = device_of(step)
        timing = Timing(environment=environment(device), command=command)
        loops, runs = arguments.n or None, arguments.r
        return Timer(step, cell.loop(), device, timing, loops, runs, arguments.budget), TIMING
    if mode == COMPARE:
        variants = parse(arguments.compare)
        accuracy = options.accuracy_of(names, arguments)
        given = (step, variants, arguments.budget)
        benchmark = Benchmark(*given, accuracy=accuracy, command=command)
        return benchmark, count(len(variants), "variant")
    return _search(names, step, arguments), "tuning"


def _search(names: options.Names, step: Step, arguments: Any) -> PlanSearch:
    found = {name_of(names, model, "") for model in step.models}
    in_order = [word for word in namespace.words_of_models(names) if word in found]
    named = () if "" in found else tuple(in_order)
    asked = (arguments.fresh, arguments.keep or ())
    return PlanSearch(step, arguments.budget, *asked, named=named, to_apply=arguments.apply)
