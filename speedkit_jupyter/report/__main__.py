"""`python -m speedkit_jupyter.report`: the plan for this machine, for a small model or for yours.

Without --apply nothing is changed; the flags are shown as they are and as they would be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups
from speedkit_jupyter.codegen.given_models import given
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.preview import preview
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Row, Section, Table
from speedkit_jupyter.report.panel_report import changes
from speedkit_jupyter.report.plan_report import context_report, plan_report
from speedkit_jupyter.report.units import word

if TYPE_CHECKING:
    import torch

NAME = "a demonstration model"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m speedkit_jupyter.report", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a YAML file in place of all-auto")
    parser.add_argument(
        "--model",
        metavar="FILE:NAME",
        help="a function in a Python file that makes the model, or (model, optimizer)",
    )
    parser.add_argument("--apply", action="store_true", help="apply the plan; show what changed")
    parser.add_argument("--restore", action="store_true", help="apply, restore, show what is left")
    parser.add_argument("--json", action="store_true", help="as one JSON document")
    options = parser.parse_args(arguments)
    try:
        config = SpeedConfig.from_yaml(options.config) if options.config else SpeedConfig()
        documents = _reports(config, options)
    except SpeedKitError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(_as_one(documents).to_json())
    else:
        print("\n\n".join(document.to_text() for document in documents.values()))
    return 0


def _as_one(documents: Mapping[str, Document]) -> Document:
    if len(documents) == 1:
        return next(iter(documents.values()))
    return Document("", (), {name: document.to_dict() for name, document in documents.items()})


def _reports(config: SpeedConfig, options: argparse.Namespace) -> dict[str, Document]:
    """By what each is about: `planned`, or `applied` and `restored`."""
    model, optimizers = given(options.model) if options.model else _demonstration()
    name = f"`{options.model}`" if options.model else NAME
    if not (options.apply or options.restore):
        return {"planned": _planned(model, optimizers, config, name)}
    _, context = apply_speedups(model, config, optimizer=optimizers)
    documents = {"applied": context_report(context, name)}
    if options.restore:
        context.restore()
        documents["restored"] = context_report(context, name)
        if not options.apply:
            del documents["applied"]
    return documents


def _planned(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: SpeedConfig,
    name: str,
) -> Document:
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


def _demonstration() -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16 * 16, 10),
    )
    return model, [torch.optim.AdamW(model.parameters())]


if __name__ == "__main__":
    sys.exit(main())
