"""Print results as Markdown, and turn broken promises into an exit status."""

from collections.abc import Callable, Sequence
from typing import Any

from _program import Row


def markdown(*lines: Sequence[object]) -> str:
    """Return a Markdown table, with the first line as its head."""
    head, *rows = lines
    every = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(map(str, one))} |" for one in every)


def table(
    rows: Sequence[Row], head: Sequence[object], cells: Callable[[Row], Sequence[object]]
) -> str:
    """Return a Markdown table of the rows, below the machine and the state of the code."""
    if not rows:
        return "nothing measured yet"
    return f"{rows[0]['machine']}, {rows[0]['state']}\n\n{markdown(head, *map(cells, rows))}"


def interval(found: Sequence[float | None] | None, missing: str = "–") -> str:
    """Return a ratio and its interval as `1.23× [1.20, 1.26]`, or `missing` without a ratio."""
    if not found or found[0] is None:
        return missing
    middle, low, high = found
    if not low or high in (None, float("inf")):
        return f"{middle:.2f}×, too few rounds"
    return f"{middle:.2f}× [{low:.2f}, {high:.2f}]"


def reported(
    rows: Sequence[Row], head: Sequence[object], cells: Callable[[Row], Sequence[object]],
    promises: Callable[[Row], dict[str, Any]] = lambda row: {}, *broken: str,
) -> int:  # fmt: skip
    """Print the table and the broken promises of each row; return the program's exit status."""
    print(table(rows, head, cells))
    kept = {f"{cells(row)[0]}: {text}": it for row in rows for text, it in promises(row).items()}
    return exit_code([*(text for text, holds in kept.items() if not holds), *broken])


def exit_code(broken: Sequence[str]) -> int:
    """Print which promises are broken, and return the program's exit status."""
    print("\n".join(["", *broken] if broken else ["", "every promise holds"]))
    return 1 if broken else 0
