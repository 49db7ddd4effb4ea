"""%speedkit compile: what torch.compile did."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.notebook import options
from speedkit_jupyter.notebook.options import Names
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.notebook.watch import history
from speedkit_jupyter.report.compile_report import history_report


@options.command("what torch.compile did in this session: seconds, graph breaks, recompiles")
def compile(names: Names, session: Session, arguments: Namespace) -> None:
    """Show the history; nothing that is compiled is reset by it."""
    history().collect()
    display(history_report(history()))
