"""`python -m speedkit_jupyter.report`: the plan for this machine, for a small model or for yours.

Without --apply nothing is changed; the flags are shown as they are and as they would be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups
from speedkit_jupyter.codegen.given_models import given
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.preview import preview
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table
from speedkit_jupyter.report.panel_report import changes
from speedkit_jupyter.report.plan_report import context_report, plan_report
from speedkit_jupyter.report.units import word

NAME = "a demonstration model"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser("python -m speedkit_jupyter.report", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a YAML file in place of all-auto")
    made = "a function in a Python file that makes the model, or (model, optimizer)"
    parser.add_argument("--model", metavar="FILE:NAME", help=made)
    parser.add_argument("--apply", action="store_true", help="apply the plan; show what changed")
    parser.add_argument("--restore", action="store_true", help="apply, restore, show what is left")
    parser.add_argument("--json", action="store_true", help="as one JSON document")
    options = parser.parse_args(arguments)
    try:
        documents = _reports(options)
    except SpeedKitError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.json:
        print("\n\n".join(document.to_text() for document in documents.values()))
    elif len(documents) == 1:
        print(next(iter(documents.values())).to_json())
    else:
        every = {name: document.to_dict() for name, document in documents.items()}
        print(Document("", (), every).to_json())
    return 0


def _reports(options: argparse.Namespace) -> dict[str, Document]:
    """By what each is about: `planned`, or `applied` and `restored`."""
    config = SpeedConfig.from_yaml(options.config) if options.config else SpeedConfig()
    model, optimizers = given(options.model) if options.model else _demonstration()
    name = f"`{options.model}`" if options.model else NAME
    if not (options.apply or options.restore):
        return {"planned": _planned(model, optimizers, config, name)}
    _, context = apply_speedups(model, config, optimizer=optimizers)
    documents = {"applied": context_report(context, name)} if options.apply else {}
    if options.restore:
        context.restore()
        documents["restored"] = context_report(context, name)
    return documents


def _planned(model: Any, optimizers: Sequence[Any], config: SpeedConfig, name: str) -> Document:
    """The plan, what applying it would change, and every flag as it is."""
    view = preview(model, config, optimizers)
    document, now = plan_report(view.plan, name), flags.snapshot()
    every = tuple(Row((flag, word(value))) for flag, value in sorted(now.items()))
    sections = (
        *document.sections,
        Section(changes(view), "What --apply would change"),
        Section(Table(("flag", "now"), every), "Every flag, as it is"),
    )
    would = [{"name": flag, "before": row[0], "after": row[-1]} for flag, *row in view.rows()]
    data = {**document.data, "would_change": would, "flags": dict(now)}
    return Document(document.headline, sections, data)


def _demonstration() -> tuple[Any, list[Any]]:
    from torch import nn, optim

    convolution, linear = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32 * 16 * 16, 10)
    model = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), linear)
    return model, [optim.AdamW(model.parameters())]


if __name__ == "__main__":
    sys.exit(main())
