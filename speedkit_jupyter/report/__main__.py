"""`python -m speedkit_jupyter.report`: the plan for this machine, shown with a small model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from speedkit_jupyter import SpeedConfig, SpeedKitError, apply_speedups
from speedkit_jupyter.facts import Facts
from speedkit_jupyter.planning import plan
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.plans import context_report, plan_report

NAME = "a demonstration model"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser("python -m speedkit_jupyter.report", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="a YAML file in place of all-auto")
    parser.add_argument("--apply", action="store_true", help="apply the plan; show what changed")
    parser.add_argument("--restore", action="store_true", help="apply, restore, show what is left")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    try:
        config = SpeedConfig.from_yaml(options.config) if options.config else SpeedConfig()
        documents = _reports(config, options.apply, options.restore)
    except SpeedKitError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(one.to_json() if options.json else one.to_text() for one in documents))
    return 0


def _reports(config: SpeedConfig, apply: bool, restore: bool) -> list[Document]:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 16 * 16, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    if not (apply or restore):
        return [plan_report(plan(config, facts=Facts.read(model, [optimizer])), NAME)]
    _, context = apply_speedups(model, config, optimizer=optimizer)
    if not restore:
        return [context_report(context, NAME)]
    documents = [context_report(context, NAME)] if apply else []
    context.restore()
    return [*documents, context_report(context, NAME)]


if __name__ == "__main__":
    sys.exit(main())
