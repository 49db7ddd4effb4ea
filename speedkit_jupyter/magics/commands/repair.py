"""%speedkit repair: make torch's two TF32 APIs agree."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.machines import flags
from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.session import Session


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """On what is in force."""
    mixed = flags.repair()
    text = "The two agree again; TF32 stays on where it was on" if mixed else "Nothing to repair"
    display(Document(f"torch's TF32 settings: {text}", (), {"repaired": mixed}))


COMMAND = Command("repair", "make torch's two TF32 APIs agree again after they were mixed", run)
