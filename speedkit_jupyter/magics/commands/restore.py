"""%speedkit restore: put everything back."""

from __future__ import annotations

from argparse import Namespace

from IPython.display import display

from speedkit_jupyter.magics.command import Command, Names
from speedkit_jupyter.plans.context import restore_all
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section
from speedkit_jupyter.session import Session
from speedkit_jupyter.support.words import count


def run(names: Names, session: Session, arguments: Namespace) -> None:
    """Of all models; flags that the user changed meanwhile stay, and are named."""
    applied = session.applied(names)
    number = restore_all()
    kept = [flag for _, context in applied for flag in context.kept]
    restored = ", ".join(f"`{name}`" for name, _ in applied) or count(number, "model")
    lines = [f"{flag}: you changed it meanwhile, so it was left alone" for flag in kept]
    headline = f"Restored {restored}" if number else "Nothing was applied, so nothing is to restore"
    display(Document(headline, tuple(Section(line) for line in lines), {"restored": number}))


COMMAND = Command("restore", "put everything back", run)
