"""Run a notebook and print the output of its magics: `python notebooks/run.py FILE`.

--in-place saves the outputs in the notebook file.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--in-place", action="store_true")
    options = parser.parse_args()
    notebook = nbformat.read(options.file, as_version=4)
    start = time.perf_counter()
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(options.file.parent)}},
    )
    client.execute()
    seconds = time.perf_counter() - start
    if options.in_place:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times, which change in every run
        nbformat.write(notebook, options.file)
    for cell in notebook.cells:
        if cell.cell_type == "code" and "speed" in cell.source:
            _show(cell)
    print(f"({options.file.name} ran from top to bottom in {seconds:.0f} s)")


def _show(cell: nbformat.NotebookNode) -> None:
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    ]
    shown = "\n".join(text.strip() for text in texts if text.strip())
    magic = next((line for line in cell.source.splitlines() if line.startswith("%")), None)
    if shown and magic:
        print(f"In:  {magic}\n\n{shown}\n\n{'═' * 78}\n")


if __name__ == "__main__":
    main()
