"""Show the plan for a small CNN on this machine, and every flag that the plan changes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.applying import apply_speedups, preview
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.report.plan_report import plan_report, state_report
from speedkit_jupyter.support.exceptions import SpeedKitError

NAME = "a small CNN"


def main() -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m speedkit_jupyter.report",
        description=__doc__,
        epilog="Exit status: 0; 1 if --restore leaves a change; 2 for arguments that are wrong.",
    )
    parser.add_argument("--apply", action="store_true", help="apply, and show before and after")
    parser.add_argument("--restore", action="store_true", help="apply, restore, show changes left")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", metavar="FILE", help="a YAML file (default: all options auto)")
    given = parser.parse_args()
    try:
        config = SpeedConfig.from_yaml(given.config) if given.config else SpeedConfig()
        texts, data = _reports(config, given.apply, given.restore)
    except SpeedKitError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(data, indent=2, default=str) if given.json else "\n\n".join(texts))
    return 1 if data["left"] else 0


def _reports(config: SpeedConfig, apply: bool, restore: bool) -> tuple[list[str], dict[str, Any]]:
    """Apply the plan, restore it unless only `apply` is set; return reports and plain values."""
    layers = torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32 * 16 * 16, 10))
    optimizer, found = torch.optim.AdamW(model.parameters()), flags.snapshot()
    view = preview(model, config, [optimizer])
    _, context = apply_speedups(model, config, optimizer=optimizer)
    changes, left = context.changes(), tuple[flags.Change, ...]()
    texts = [plan_report(context, NAME) if apply else state_report(view, NAME)]
    if restore or not apply:
        context.restore()
        left = context.changes()
    if restore:
        texts = [*texts * apply, plan_report(context, NAME)]
    return [one.to_text() for one in texts], {
        "plan": view.plan.to_dict(),
        "flags": dict(found),
        "changes": [one._asdict() for one in changes],
        "left": [one._asdict() for one in left],
    }


if __name__ == "__main__":
    sys.exit(main())
