"""Compare baseline, `auto` and a plan that `auto` only suggests, on the quickstart's model.

Exits 1 if `auto` is below 0.98×, or the suggested plan below 1.3× on a CPU with bf16 units and
0.98× on others.
"""

import sys
from pathlib import Path

import nbformat
from _program import machine, plain_parser
from _tables import exit_code

from speedkit_jupyter import Hardware, benchmark
from speedkit_jupyter.report.comparison_report import comparison_report

BF16 = Hardware.detect().cpu.bf16
WAITS = f"{'bf16+' if BF16 else ''}channels_last+fused_optimizer"
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"


def notebook_names() -> dict:
    """Run the notebook's own cells for data and model, and return their names."""
    names: dict = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code" and ("load_digits" in cell.source or "class " in cell.source):
            exec(cell.source, names)
    return names


def main() -> int:
    parser = plain_parser(__doc__, budget=20.0, compare=f"baseline,auto,{WAITS}")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = notebook_names()
    model, optimizer, loss_fn = names["model"], names["optimizer"], names["loss_fn"]
    x, y = names["images"][names["train"][:64]], names["labels"][names["train"][:64]]

    def step(ctx) -> None:
        with ctx.autocast():
            loss = loss_fn(model(x.to(ctx.device)), y.to(ctx.device))
        ctx.grad_scaler.scale(loss).backward()
        ctx.grad_scaler.step(optimizer)
        ctx.grad_scaler.update()
        optimizer.zero_grad()

    comparison = benchmark(
        step, options.compare, model=model, optimizer=optimizer, budget_s=options.budget
    )
    print(machine())
    print(comparison_report(comparison))
    if options.json:
        options.json.write_text(comparison.to_json())
    speedups = {row["name"]: row["speedup"] for row in comparison.to_dict()["variants"]}
    promises = {"auto": 0.98, WAITS: 1.3 if BF16 else 0.98}
    found = {name: speedups[name] or 0.0 for name in promises if name in speedups}
    broken = [name for name, speedup in found.items() if speedup < promises[name]]
    return exit_code([f"{one}: {found[one]:.2f}×, promised {promises[one]}" for one in broken])


if __name__ == "__main__":
    sys.exit(main())
