"""Run %%speedbench: parse its line and cell, measure, and show the result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.notebook import namespace, options, plugins
from speedkit_jupyter.notebook.cell import Cell, again, step_of_cell
from speedkit_jupyter.notebook.commands.plans import show_applied
from speedkit_jupyter.notebook.options import Option, budget, listed, switch
from speedkit_jupyter.notebook.progress import run_and_show
from speedkit_jupyter.notebook.session import MeasuredCell, Session
from speedkit_jupyter.plans.naming import name_of
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.benchmark import Benchmark, named_accuracy
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.rounds.comparison import environment
from speedkit_jupyter.rounds.timing import RUNS, Timer, Timing, device_of
from speedkit_jupyter.search.search import PlanSearch
from speedkit_jupyter.step.variants import variant
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.lookup import canonical
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue.interrupts import interruptible_in_users_code

_loops = options.number(int, "must be 1 or more, or 0 to choose the number", 0)
# The options of `%%timeit`, of a comparison and of a search.
OPTIONS = (
    Option("--compare", "NAMES", "plans: bf16+compile, auto, current, YAML files", options.plans),
    budget(f"for all but compiling ({DEFAULT_BUDGET_S:g}, or more if a step is long)"),
    listed("--model", "the models to plan for (default: all that the cell uses)", namespace.models),
    listed("--optimizer", "their optimizers (default: the cell's)", namespace.optimizers),
    options.ACCURACY,
    switch("--tune", "search the fastest safe plan for this cell"),
    Option(
        "--at-most", "TIME", "no winner's 99th percentile is above this: 20ms", type=options.time_of
    ),
    switch("--apply", "with --tune: apply the plan that was found"),
    switch("--fresh", "with --tune: search although a plan is known"),
    switch("-q", "show nothing"),
    switch("-o", "return the result"),
    listed("--keep", "with --tune: options that stay unchanged (precision,tf32)", options.catalog),
    Option("-n", "LOOPS", "timing: loops in a run (until it takes 0.2 s)", type=_loops),
    Option("-r", "RUNS", f"timing: how many runs ({RUNS})", type=options.whole_number),
    options.RESULT,
)
TIMING, COMPARE, TUNE = "timing", "--compare", "--tune"
# The modes that accept an option. Every mode accepts the options that are not listed here.
BELONGS = {
    **dict.fromkeys(("n", "r"), TIMING),
    **dict.fromkeys(("accuracy", "compare"), COMPARE),
    "at_most": f"{COMPARE} and {TUNE}",
    **dict.fromkeys(("fresh", "keep", "apply", "tune"), TUNE),
}


@interruptible_in_users_code
def run(shell: Any, session: Session, line: str, source: str) -> Any:
    """Run `%%speedbench`, and return the result if the line has -o."""
    begun_s = clock.now()
    line = options.without_comment(line)
    arguments = parser().parse_line(line)
    extra = next((mode for mode in plugins.modes() if mode.is_asked(arguments)), None)
    core = TUNE if arguments.tune else TIMING if arguments.compare is None else COMPARE
    _check_options(arguments, extra.name if extra else core, extra.also if extra else ())
    cell = Cell(shell, source, line)
    command = f"%%speedbench {line.strip()}\n{source.rstrip()}"
    given = (shell, session, cell, arguments, command)
    if extra and extra.run:
        return extra.run(*given)
    work, title = extra.begin(*given) if extra and extra.begin else _begin(core, *given)
    work.begun_s = begun_s
    first_line = next((row.strip() for row in source.splitlines() if row.strip()), "")
    step_cell = MeasuredCell(first_line, command, partial(again, shell, cell, arguments))
    is_quiet = arguments.q or arguments.o  # with -o the returned object shows the result
    try:
        result = run_and_show(work, title, shell.user_ns, arguments.v, is_quiet=is_quiet)
    except KeyboardInterrupt:
        session.remember(step_cell)
        raise
    session.remember(step_cell)  # not for failed cells: other magics run the last cell again
    in_force = result.put_in_force() if arguments.apply and result.helped else ()
    for number, context in enumerate(in_force, 1):
        name = name_of(session.names, context.model, f"model_{number}")
        show_applied(shell.user_ns, session, name, context)
    return result if arguments.o else None


@cache
def parser() -> options.Parser:
    """Return the parser of `%%speedbench` lines."""
    return options.Parser("%%speedbench", [*OPTIONS, *(mode.option for mode in plugins.modes())])


def _check_options(arguments: Any, mode: str, also: Sequence[str]) -> None:
    """Raise UsageError for an option that neither belongs to `mode` nor is in `also`."""
    for name, of in BELONGS.items():
        value = getattr(arguments, name)
        if value is None or value is False or mode in of.split() or name in also:
            continue
        option = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        belongs = f": it belongs to {of}" if of != option else ""
        raise UsageError(f"{option} does not go with {mode}{belongs}")


def _begin(
    mode: str, shell: Any, session: Session, cell: Cell, arguments: Any, command: str
) -> tuple[Any, str]:
    """Return an engine (a Timer, Benchmark or PlanSearch) and its title. Raises UsageError."""
    step = step_of_cell(shell, cell, arguments)
    if mode == TIMING:
        device = device_of(step)
        timing = Timing(environment=environment(device), command=command)
        loops, runs = arguments.n or None, arguments.r
        return Timer(step, cell.loop(), device, timing, loops, runs, arguments.budget), TIMING
    if mode == COMPARE:
        names = [name.strip() for name in options.comma_list(arguments.compare) if name.strip()]
        if not names:
            raise UsageError("--compare needs names, as in --compare baseline,auto")
        given = step, [variant(name) for name in names], arguments.budget
        text, at_most_s = arguments.accuracy, arguments.at_most
        find = partial(namespace.find_function, shell.user_ns)
        try:
            accuracy = named_accuracy(None if text is None else find(canonical(text)), text or "")
        except SpeedKitError as error:
            raise UsageError(f"--accuracy: {error}") from None
        work = Benchmark(*given, accuracy=accuracy, command=command, at_most_s=at_most_s)
        return work, count(len(names), "variant")
    fresh, keep, at_most_s = arguments.fresh, arguments.keep or (), arguments.at_most
    return PlanSearch(step, arguments.budget, fresh, keep, at_most_s=at_most_s), "tuning"


def with_statement(line: str) -> tuple[str, str]:
    """Return the options of a `%speedbench` line, and the statement that follows."""
    taking = {name for name, one in parser()._option_string_actions.items() if one.nargs != 0}
    typed, rest = "", line.lstrip()
    while rest.startswith("-"):
        for _ in range(1 + (rest.split()[0] in taking)):
            word, _, rest = rest.partition(" ")
            typed, rest = f"{typed} {word}", rest.lstrip()
    return typed, rest
