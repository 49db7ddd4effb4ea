"""%%speedbench --against."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from IPython.core.error import UsageError

from speedkit_jupyter.extras.check.api import check
from speedkit_jupyter.extras.check.result import Check
from speedkit_jupyter.notebook import namespace
from speedkit_jupyter.notebook.cell import Cell, step_of_cell
from speedkit_jupyter.notebook.options import Option
from speedkit_jupyter.notebook.plugins import Mode, Plugin
from speedkit_jupyter.notebook.session import Session
from speedkit_jupyter.rounds.sampler import Progress
from speedkit_jupyter.step.step import Step

LAST_VALUE = "end the cell with the expression that the function returns"


def begin(
    shell: Any, session: Session, cell: Cell, arguments: Any, command: str
) -> tuple[Against, str]:
    """Return the check of a cell against the function that the line names."""
    step = step_of_cell(shell, cell, arguments)
    return Against(shell, cell, step, arguments.against, arguments.budget), "checking"


class Against:
    """Checks the cell's last value against the function's, with new numbers for its parameters.

    These are names of the notebook: `def reference(q, k)` gets what is like `q` and `k` there. The
    cell runs in a copy of the namespace, so that it binds nothing.
    """

    def __init__(
        self, shell: Any, cell: Cell, step: Step, name: str, budget_s: float | None
    ) -> None:
        self._cell, self._names, self._budget_s = cell, shell.user_ns, budget_s
        self._reference = namespace.find_function(shell.user_ns, name)
        self._found: Check | None = None
        if not cell.has_value:
            raise UsageError(f"--against {name}: {LAST_VALUE}")
        needed = list(inspect.signature(self._reference).parameters)
        for one in needed:
            if one not in shell.user_ns:
                raise UsageError(
                    f"--against {name}: its parameter {one} is no name of the notebook"
                )
        self._inputs = {one: shell.user_ns[one] for one in needed}
        self._step = step.with_others(self._reference, self._inputs)

    def run(self) -> Iterator[Progress]:
        """Check; there is no progress in between."""

        def cell(**given: Any) -> Any:
            return self._cell.within({**self._names, **given}).run()

        yield Progress(0.0, "comparing and timing")
        with self._step.guarded(), self._cell.quiet():
            self._found = check(cell, self._reference, self._inputs, budget_s=self._budget_s)

    def has_results(self) -> bool:
        return self._found is not None

    def result(self) -> Check:
        assert self._found is not None
        return self._found


OPTION = Option(
    "--against", "FUNCTION", "is the cell's last value the function's?", namespace.functions
)
PLUGIN = Plugin(modes=[Mode(OPTION, begin)])
