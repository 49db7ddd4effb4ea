"""Print the lines that only an accelerator reaches, and that no test has reached.

    RUN="python -m coverage run -p --source speedkit_jupyter -m pytest -n 0"
    PYTHONPATH=tests/device $RUN -p sim tests/device tests/extras/kernels/test_graphs.py; $RUN
    python -m coverage combine && python tests/accelerator_lines.py [DATA]

Such a line names `torch.cuda` or a similar module, or is in a branch whose condition tests the type
of a device. The exit status is 1 if there are any. DATA is the data file of `coverage` (PyPI).
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from coverage import CoverageData

PACKAGE = Path(__file__).parents[1] / "speedkit_jupyter"
# Code that names an accelerator's module; conditions true only on an accelerator or on a CPU.
NAMED = re.compile(r"torch\.(cuda|mps|xpu|accelerator)\.|get_device_module|\bkind\.module\b")
ON_DEVICE = re.compile(
    r"(type|device|kind|backend)\w* (!= 'cpu'|== '(cuda|mps|xpu)'|not in \('cpu')"
    r"|torch\.(cuda|accelerator)\.is_\w+\(\)|^events is not None|^gpu is not None"
)
ON_CPU = re.compile(
    r"(type|device|kind)\w* == 'cpu'|^on_cpu$|^self\.on_cpu$|^events is None|^gpu is None"
)


def candidates(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield statements that only an accelerator reaches or that name an accelerator's module."""
    for node in ast.walk(tree):
        bodies = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
        for body in filter(lambda found: isinstance(found, list), bodies):
            for at, one in enumerate(body):
                if not isinstance(one, ast.If):
                    continue
                condition = ast.unparse(one.test)
                if ON_DEVICE.search(condition):
                    yield from one.body
                elif ON_CPU.search(condition):
                    leaves = isinstance(one.body[-1], ast.Return | ast.Raise | ast.Continue)
                    yield from one.orelse or (body[at + 1 :] if leaves else [])
        if isinstance(node, ast.Expr | ast.Assign | ast.Return | ast.AugAssign | ast.AnnAssign):
            is_text = isinstance(getattr(node, "value", None), ast.Constant)
            if not is_text and NAMED.search(ast.unparse(node)):
                yield node


def unreached(file: Path, reached: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each candidate line whose number is not in `reached`."""
    source = file.read_text()
    lines, found = source.splitlines(), set[int]()
    for one in candidates(ast.parse(source)):
        for inner in ast.walk(one):
            if isinstance(inner, ast.stmt) and not _is_docstring(inner):
                found.add(inner.lineno)
    for number in sorted(found - reached):
        yield number, lines[number - 1].strip()


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def main() -> int:
    data, total = CoverageData(*sys.argv[1:2]), 0
    data.read()
    for file in sorted(PACKAGE.rglob("*.py")):
        for number, text in unreached(file, set(data.lines(str(file)) or ())):
            total += 1
            print(f"{file.relative_to(PACKAGE.parent)}:{number}: {text}")
    print(f"{total} lines that only an accelerator reaches were not reached")
    return bool(total)


if __name__ == "__main__":
    sys.exit(main())
