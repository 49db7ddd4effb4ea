"""Run a cell or function on all workers: send named objects, and return rank 0's results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from speedkit_jupyter.extras.processes import workers
from speedkit_jupyter.extras.processes.packing import OWN, Pickler, taken, written
from speedkit_jupyter.state.handlers.names import global_names
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, in_a_line
from speedkit_jupyter.support.lookup import notebook
from speedkit_jupyter.support.tracebacks import hide_internal_frames

FUNCTION, GIVEN, RETURNED = "_launched_function", "_launched_arguments", "_launched_result"
CALL = f"{RETURNED} = {FUNCTION}(*{GIVEN}[0], **{GIVEN}[1])"
# Numbers and strings of rank 0 that differ on other ranks, by name. Later launches reject them.
_OF_RANK_0: dict[str, Any] = {}


@dataclass
class Launch:
    """One run of a cell's `source`, or of a `function`, on the workers."""

    source: str
    names: MutableMapping[str, Any]  # the notebook's variables
    size: int | None = None
    function: Callable[..., Any] | None = None
    given: tuple[Any, ...] = ((), {})  # the function's positional and keyword arguments
    stays: dict[str, str] = field(default_factory=dict)  # reasons why variables are not returned
    result: Any = None  # the function's result on rank 0

    def run(self, say: Callable[[str], object]) -> Generator[Mapping[int, str], None, None]:
        """Run the code on workers and yield each rank's output; then store rank 0's results."""
        running = workers.started(self.size, say)
        self.size = running.size
        read, bound = names_of(self.source)
        pickler = self._packed(read, bound)
        cell = (CALL, {RETURNED}) if self.function else (self.source, bound)
        with tempfile.TemporaryDirectory(dir=running.folder, ignore_cleanup_errors=True) as path:
            folder = Path(path)
            pickler.save(folder / "sent")
            seed = int(torch.empty((), dtype=torch.int64).random_())  # as in a DataLoader
            with closing(running.run(folder, *cell, seed)) as states:
                for printed, ended in states:
                    outcomes = ended
                    yield printed
            try:
                made, self.stays = taken(folder / "reply", pickler.objects(), self.names)
            except Exception as error:  # the notebook may lack a class
                raise SpeedKitError(f"can't read the results: {in_a_line(error)}") from None
        self.stays |= outcomes[0].stays
        self.result = made.pop(RETURNED, None)
        self.names.update(made)
        for name in made:
            differs = len({one.values.get(name) for one in outcomes}) > 1
            _OF_RANK_0.update({name: made[name]}) if differs else _OF_RANK_0.pop(name, None)

    def _packed(self, read: set[str], bound: set[str]) -> Pickler:
        for name in sorted(read - bound):
            if self._differs(name):
                raise SpeedKitError(f"`{name}` differs by rank: assign it in this cell, too")
        sent = {name: self.names[name] for name in sorted(read) if self._goes(name)}
        if self.function:
            sent |= {FUNCTION: self.function, GIVEN: self.given}
        pickler, failed = written(
            lambda: Pickler(self.names, self._goes), lambda _: list(sent), sent.get
        )
        for name in failed.keys() - bound:
            shown = "the function" if name in (FUNCTION, GIVEN) else f"`{name}`"
            raise SpeedKitError(f"{shown} can't be sent ({failed[name]}): make it inside the cell")
        return pickler

    def _goes(self, name: str) -> bool:
        return name in self.names and name not in OWN and not self._differs(name)

    def _differs(self, name: str) -> bool:
        return name in _OF_RANK_0 and self.names.get(name) is _OF_RANK_0[name]


def names_of(source: str) -> tuple[set[str], set[str]]:
    """Return the global names that code may use, and the names that it binds."""
    found = global_names(compile(source, "<cell>", "exec"))
    return {*found.read, *found.bound, *(found.texts or ())}, {*found.bound}


@hide_internal_frames
def launch(function: Callable[..., Any], *args: Any, n: int | None = None, **kwargs: Any) -> Any:
    """Call a function on every worker; return rank 0's result.

    Changes by rank 0 to arguments, or to globals that the function reads, are copied back.

    Args:
        function: the function to run on each rank of a process group.
        *args: arguments of the function; each worker gets a copy.
        n: the number of workers (default: as many as run, or 2); another number restarts them.
        **kwargs: keyword arguments of the function; each worker gets a copy.

    Returns:
        The function's result on rank 0; None, with a message, if it can't be sent back.

    Raises:
        RankError: the function raised an error on a rank.
        ArgumentError: `function` is not callable, or `n` is below 1.
        SpeedKitError: an object can't be sent, `n` is no integer, or a worker fails or is killed.

    Example::

        losses = launch(train_epoch, model, n=2)
    """
    if not callable(function):
        raise ArgumentError(f"launch needs a function, not {arguments.shown(function)}")
    if n is not None:
        arguments.count("n", n)
    names = notebook()
    space = getattr(function, "__globals__", {}) if names is None else names
    run = Launch("", space, n, function, (args, kwargs))
    for printed in run.run(messages.note):
        last = printed
    for rank, text in last.items():
        for line in text.splitlines():
            messages.important(f"rank {rank}: {line}")
    for name, reason in run.stays.items():
        messages.important(f"{name.replace(RETURNED, 'its result')} does not come back: {reason}")
    return run.result
