"""Show the plan for this machine and a small CNN."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from speedkit_jupyter.plans.applying import preview
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.report.plan_report import state_report
from speedkit_jupyter.support.exceptions import SpeedKitError


def main() -> int:
    """Print the report and return the exit status: 2 for a config that can't be read."""
    parser = argparse.ArgumentParser("python -m speedkit_jupyter.report", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", metavar="FILE", help="a YAML file (default: all is auto)")
    given = parser.parse_args()
    layers = torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32 * 16 * 16, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        config = SpeedConfig.from_yaml(given.config) if given.config else SpeedConfig()
        found = preview(model, config, [optimizer])
    except SpeedKitError as error:
        print(error, file=sys.stderr)
        return 2
    report = state_report(found, "a small CNN").to_text()
    data = {"plan": found.plan.to_dict()}
    print(json.dumps(data, indent=2, default=str) if given.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
