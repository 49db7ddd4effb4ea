"""Run cells on workers: %speedkit processes, %%speedkit launch, %%speedbench --processes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display

from speedkit_jupyter.notebook.options import Names, Option, action, command, whole_number
from speedkit_jupyter.notebook.plugins import Mode, Plugin
from speedkit_jupyter.notebook.progress import LiveOutput
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.elements import BLANK, CodeBlock, Section, Table
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.budget import DEFAULT_BUDGET_S
from speedkit_jupyter.rounds.statistics import INTERVAL
from speedkit_jupyter.support.units import between, count, ratio, share, size

WITHOUT = "write %%speedkit launch, and the code for the workers below"
HOW = (
    "Throughput counts the batches of all processes. State is a rank's memory for the model, "
    "gradients and optimizer state. Every rank had the same batch: the losses must be equal."
)
COLUMNS = ("", "throughput", INTERVAL, "efficiency", "state", "loss")


@command(
    "workers for %%speedkit launch: start, stop",
    action("start", "stop"),
    Option("number", "NUMBER", "for start (the running ones, or 2)", nargs="?", type=whole_number),
)
def processes(names: Names, session: Session, arguments: Namespace) -> None:
    from speedkit_jupyter.extras.processes import workers

    if arguments.action == "stop":
        workers.stop()
        display(Document("No workers run"))
        return
    with LiveOutput(Document("Starting")) as shown:
        running = workers.started(arguments.number, shown.say)
        shown.show(Document(f"{count(running.size, 'worker')} connected by {running.backend}"))


@command(
    "run the cell on all workers; named objects are sent along, rank 0's results return",
    Option("-n", "NUMBER", "how many workers (the running ones, or 2)", type=whole_number),
)
def launch(names: Names, session: Session, arguments: Namespace) -> None:
    raise UsageError(WITHOUT)


def launch_cell(names: Names, session: Session, arguments: Namespace, source: str) -> None:
    """Run a cell on workers; show each rank's output as it arrives, then store rank 0's results."""
    from speedkit_jupyter.extras.processes.launching import Launch

    shell: Any = get_ipython()
    code = shell.transform_cell(source)
    if not code.strip():
        raise UsageError(WITHOUT)
    compile(code, "<cell>", "exec")  # a SyntaxError is raised here, not in the workers
    run = Launch(code, names, arguments.n)
    with LiveOutput(Document("Launching")) as shown:
        printed: Mapping[int, str] = {}
        verb = "Stopped"
        try:
            with closing(run.run(shown.say)) as states:
                for printed in states:
                    shown.show(_of_output(f"Running on {run.size} workers", printed, {}))
            verb = "Ran"
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the notebook's objects are as before") from None
        finally:
            title = f"{verb} on {count(run.size or 0, 'worker')}" if printed else "Nothing ran"
            shown.show(_of_output(title, printed, run.stays))


def compared_on_workers(shell: Any, session: Any, cell: Any, arguments: Any, command: str) -> Any:
    """Run `%%speedbench --processes … --compare …`. `-v` stores the rows, `-o` returns them."""
    from speedkit_jupyter.extras.processes import strategy_race
    from speedkit_jupyter.extras.processes.launching import Launch
    from speedkit_jupyter.notebook.cell import step_of_cell

    names: Names = shell.user_ns
    words = [*dict.fromkeys((strategy_race.SINGLE, *(arguments.compare or "").split(",")))]
    if len(words) < 2 or not {*words} <= {*strategy_race.WORDS}:
        raise UsageError(f"--processes belongs to --compare {','.join(strategy_race.WORDS)}")
    step = step_of_cell(shell, cell, arguments)
    if len(step.models) != 1:
        raise UsageError(f"--processes takes one model; the cell uses {len(step.models)}")
    source = shell.transform_cell(cell.source)
    given = source, *step.models, [*step.optimizers], words, arguments.budget or DEFAULT_BUDGET_S
    run = Launch(source, names, arguments.processes, strategy_race.race, (given, {}))
    with LiveOutput(Document("Launching")) as shown:
        with closing(run.run(shown.say)) as states:
            for _ in states:
                shown.show(Document(f"Comparing {', '.join(words)} on {run.size} workers"))
        shown.show(_of_race(run.result))
    if arguments.v:
        names[arguments.v] = run.result
    return run.result if arguments.o else None


# --- reports ---


def _of_output(title: str, printed: Mapping[int, str], stays: Mapping[str, str]) -> Document:
    """Return a report of the ranks' output and of the objects that are not returned.

    Only the last 50,000 characters of a rank are shown, because the report is redrawn repeatedly.
    """
    sections = [
        Section(CodeBlock(text[-50_000:]), f"rank {rank}", folded=len(printed) > 1 and rank > 0)
        for rank, text in printed.items()
        if text
    ]
    kept = "; ".join(f"`{name}` ({reason})" for name, reason in stays.items())
    return Document(title, [*sections, f"Does not come back: {kept}" if stays else ""])


def _of_race(found: Sequence[Any]) -> Document:
    """Return a report with a table of strategies, one process first; the headline gives advice."""
    best = max(found[1:], key=lambda row: row.efficiency.low)
    times = [(row.efficiency.low, row.efficiency.median, row.efficiency.high) for row in found]
    gains = [[row.ranks * one for one in three] for row, three in zip(found, times, strict=True)]
    low, middle, high = gains[found.index(best)]
    headline = f"{best.ranks} processes ({best.strategy}) are {ratio(middle)}, {between(low, high)}"
    if low <= 1 or best.is_equal is False:
        headline = f"Stay with one process: {best.ranks} are not proven faster"
    rows = [
        (
            row.strategy,
            ratio(middle),
            BLANK if row.strategy == "single" else between(low, high),
            share(row.efficiency.median),
            size(row.memory_bytes),
            BLANK if row.loss is None else f"{row.loss:.5g}{' (other)' * (row.is_equal is False)}",
        )
        for row, (low, middle, high) in zip(found, gains, strict=True)
    ]
    return Document(headline, [Table(COLUMNS, rows), HOW])


OPTION = Option("--processes", "NUMBER", "compare single,ddp,fsdp2 on workers", type=whole_number)
PLUGIN = Plugin(
    [processes, launch],
    {"launch": launch_cell},
    [Mode(OPTION, run=compared_on_workers, also=("compare",))],
)
