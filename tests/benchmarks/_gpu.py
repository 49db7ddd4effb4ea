"""Print a table of gpu.sh's parts, or how busy two models keep the device.

    python tests/benchmarks/_gpu.py table FOLDER
    python tests/benchmarks/_gpu.py busy

`busy` profiles forward and backward passes of two models, and prints the time share of kernels.
"""

import re
from pathlib import Path

import torch
from _program import machine, plain_parser
from _tables import markdown
from torch import nn

from speedkit_jupyter import profile

# Matches the lines that report a result, in the output of any part.
RESULT = re.compile(r"passed|failed|^tuned:|over the plain|median|\d×|of the best plan|busy|share")
CODES = {0: "done", 124: "limit reached", 137: "limit reached"}


def table(folder: Path) -> str:
    """Return a table of parts: how each ended, its seconds, and its last line with a result."""
    rows = []
    for line in (folder / "parts.tsv").read_text().splitlines():
        name, code, seconds, limit = line.split("\t")
        printed = (folder / f"{name}.txt").read_text(errors="replace").splitlines()
        found = [one.strip() for one in printed if RESULT.search(one)] or printed[-1:] or [""]
        ended = CODES.get(int(code), f"exit code {code}")
        rows.append((name, ended, f"{seconds} of {limit} s", found[-1].strip("| ")[:120]))
    return markdown(("part", "ended", "took", "last result"), *rows)


def busy(device: torch.device) -> None:
    """Print the busy share of a small, launch-bound model and of a large, product-bound model."""
    print(machine())
    for width, batch in ((64, 8), (4096, 4096)):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
        x = torch.rand(batch, width, device=device)
        found = profile(lambda: model(x).square().mean().backward(), model=model, budget_s=4)  # noqa: B023
        share = None if found.costs is None else found.costs.busy
        step = f"{found.step_s * 1e3:.2f} ms a step"
        print(f"{width} wide, batch {batch}: busy share {share}, {step}")


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("what", choices=("table", "busy"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gpu_results"))
    options = parser.parse_args()
    if options.what == "table":
        print(table(options.folder))
    else:
        busy(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))


if __name__ == "__main__":
    main()
