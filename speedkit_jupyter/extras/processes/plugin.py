"""%speedkit processes and %%speedkit launch: workers that stay, and cells that all of them run."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import display
from IPython.paths import get_ipython_dir

from speedkit_jupyter.extras.processes.report import printed_report, race_report, workers_report
from speedkit_jupyter.notebook.options import Names, Option, action, command, whole_number
from speedkit_jupyter.notebook.plugins import Mode, Plugin
from speedkit_jupyter.notebook.progress import Updated
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.rounds.budget import DEFAULT_S
from speedkit_jupyter.support.units import count

STOPPED = (
    "stopped; the notebook's objects are as before, those of the workers as the cell left them"
)
NO_PROFILE = "there is no profile {0!r}: `ipython profile create --parallel {0}` makes one"
WITHOUT = "`%%speedkit launch` runs a cell: write %%speedkit launch, and the code below"


@command(
    "workers for %%speedkit launch: start, status, stop",
    action("status", "start", "stop"),
    Option("number", "NUMBER", "for start: how many (2)", nargs="?", type=whole_number),
    Option("--profile", "NAME", "ipyparallel's profile that starts them: slurm, ssh, mpi"),
)
def processes(names: Names, session: Session, arguments: Namespace) -> None:
    from speedkit_jupyter.extras.processes import workers

    if arguments.action != "start" and (arguments.number or arguments.profile):
        raise UsageError(f"{arguments.action}: NUMBER and --profile belong to start")
    if arguments.action == "stop":
        stopped = workers.stop()
        display(Document(f"Stopped {count(stopped, 'worker')}" if stopped else "No workers run"))
        return
    profile = arguments.profile
    if profile and not os.path.isdir(os.path.join(get_ipython_dir(), f"profile_{profile}")):
        raise UsageError(NO_PROFILE.format(profile))  # ipyparallel would make one
    running = workers.current()
    if arguments.action == "status":
        display(workers_report(running))
        return
    with Updated(workers_report(running)) as shown:
        if running and running.dead():
            workers.stop()
        running = workers.started(arguments.number, shown.say, arguments.profile)
        shown.show(workers_report(running))


@command(
    "run the cell below on all workers; what it names goes along, rank 0's results return",
    Option(
        "-n", "NUMBER", "how many workers; starts them (those that run, or 2)", type=whole_number
    ),
    Option("--rank", "RANK", "only this one; nothing returns", type=int),
    Option("--checkpoint", "DIR", "gives the cell `checkpoint`, with save() and load()"),
    Option(
        "--restarts", "NUMBER", "how often a killed rank starts all anew (0)", type=whole_number
    ),
)
def launch(names: Names, session: Session, arguments: Namespace) -> None:
    raise UsageError(WITHOUT)


def launch_cell(names: Names, session: Session, arguments: Namespace, source: str) -> None:
    """Run a cell on the workers, and show what each prints while it runs."""
    from speedkit_jupyter.codegen.torchrun import Checkpoint
    from speedkit_jupyter.extras.processes.launching import Launch

    shell: Any = get_ipython()
    code = shell.transform_cell(source)
    if not code.strip():
        raise UsageError("the cell is empty: write what the workers run")
    shell.compile.ast_parse(code)  # raises SyntaxError here, not in each worker
    extra = {}
    if arguments.checkpoint:
        extra["checkpoint"] = Checkpoint(os.path.abspath(arguments.checkpoint))
    run = Launch(code, names, arguments.n, arguments.rank, arguments.restarts or 0, extra)
    with Updated(Document("Launching")) as shown:
        printed: Mapping[int, str] = {}
        verb = "Stopped"
        try:
            with closing(run.run(shown.say)) as states:
                for printed in states:
                    shown.show(printed_report(_title(run, "Running"), printed))
            verb = "Ran"
        except KeyboardInterrupt:
            raise KeyboardInterrupt(STOPPED) from None
        finally:
            title = _title(run, verb) if printed else "Nothing ran"
            shown.show(printed_report(title, printed, run.stays))


def _title(run: Any, verb: str) -> str:
    where = f"rank {run.rank}" if run.rank is not None else count(run.size or 0, "worker")
    return f"{verb} on {where}"


def compared_on_workers(
    shell: Any, session: Session, cell: Any, arguments: Namespace, command: str
) -> Any:
    """Run `%%speedbench --processes 2 --compare single,ddp`; return the rows where `-o` asks."""
    from speedkit_jupyter.extras.processes import race
    from speedkit_jupyter.extras.processes.launching import CALL, Launch, called
    from speedkit_jupyter.notebook.cell import step_of_cell

    names: Names = shell.user_ns
    if arguments.compare is None:
        raise UsageError(f"--processes belongs to --compare {','.join(race.WORDS)}")
    words = [*dict.fromkeys((race.SINGLE, *arguments.compare.split(",")))]
    if len(words) < 2 or not {*words} <= {*race.WORDS}:
        raise UsageError(f"--processes compares {','.join(race.WORDS)}, not {arguments.compare}")
    step = step_of_cell(shell, cell, arguments)
    if len(step.models) != 1:
        raise UsageError(f"--processes is about one model; the cell uses {len(step.models)}")
    model, *optimizers = (_name_of(names, one) for one in (*step.models, *step.optimizers))
    source = shell.transform_cell(cell.source)
    given = (source, model, optimizers, words, arguments.budget or DEFAULT_S)
    run = Launch(CALL, names, arguments.processes, extra=called(race.race, *given), step=source)
    with Updated(Document("Launching")) as shown:
        with closing(run.run(shown.say)) as states:
            for _ in states:
                shown.show(Document(f"Comparing {', '.join(words)} on {run.size} workers"))
        found = [*race.rows(run.result, words, run.size or 1)]
        shown.show(race_report(found))
    if arguments.v:
        names[arguments.v] = found
    return found if arguments.o else None


def _name_of(names: Names, value: Any) -> str:
    for name, one in list(names.items()):
        if one is value and name[:1] != "_":
            return name
    raise UsageError(f"give the {type(value).__name__} of the cell a name of the notebook")


OPTION = Option(
    "--processes", "NUMBER", "compare single,ddp,fsdp2,hybrid on workers", type=whole_number
)
PLUGIN = Plugin(
    [processes, launch],
    {"launch": launch_cell},
    [Mode(OPTION, run=compared_on_workers, also=("compare",))],
)
