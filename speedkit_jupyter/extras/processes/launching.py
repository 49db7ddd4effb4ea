"""A cell or a function on all workers: what it names goes along, what rank 0 made of it returns."""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.extras.processes import packing, workers
from speedkit_jupyter.extras.processes.packing import pack, refused, unpack
from speedkit_jupyter.extras.processes.workers import Printed, RankLost
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, in_a_line
from speedkit_jupyter.support.lookup import notebook

FUNCTION, GIVEN, RETURNED = "_launched_function", "_launched_arguments", "_launched_result"
CALL = f"{RETURNED} = {FUNCTION}(*{GIVEN}[0], **{GIVEN}[1])"  # by what `called` sends
# IPython's own, which each worker has of its own.
OWN = {"In", "Out", "get_ipython", "exit", "quit", "open", "display", *dir(builtins)}


@dataclass
class Launch:
    """One run of `source` on the workers: `names` is the notebook's namespace."""

    source: str
    names: MutableMapping[str, Any]
    size: int | None = None
    rank: int | None = None
    restarts: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    step: str = ""  # code that is measured: its names go along, and nothing but the result returns
    stays: Sequence[str] = ()
    returned: dict[str, Any] = field(default_factory=dict)

    def run(self, say: Callable[[str], object]) -> Generator[Printed, None, None]:
        """Run it; yield what each rank prints, then put rank 0's results into the notebook.

        A killed rank starts all anew as often as `restarts` says.
        """
        for left in reversed(range(self.restarts + 1)):
            try:
                yield from self._once(say)
                return
            except RankLost as error:
                if not left:
                    raise
                messages.important(f"{error.args[0].partition(';')[0]}: starting again")

    def _once(self, say: Callable[[str], object]) -> Generator[Printed, None, None]:
        running = workers.started(self.size, say)
        self.size = running.size
        if self.rank is not None and not 0 <= self.rank < running.size:
            last = running.size - 1
            raise SpeedKitError(f"there is no rank {self.rank}: ranks are 0 to {last}")
        read, bound = names_of(self.source)
        read += names_of(self.step)[0]
        sent = {name: self.names[name] for name in read if is_sent(name, self.names)} | self.extra
        for name in [name for name in sent if running.is_own(name, sent[name])]:
            del sent[name]
        parcel = packed(sent, self.names, running.is_here, bound)
        ranks = range(running.size) if self.rank is None else [self.rank]
        try:
            with closing(running.run(ranks, parcel, self.source, sorted(bound))) as states:
                for printed, ended in states:
                    outcomes = ended
                    yield printed
        finally:
            parcel.close()
        first = outcomes[0]
        self.stays = [name for name in first.stays if name[:1] != "_"]
        if first.results is not None:
            self._take(unpack(first.results, self.names))
            running.own |= {name: self.names.get(name) for name in bound}

    def _take(self, results: dict[str, Any]) -> None:
        for name, value in results.items():
            if name in self.extra or name == RETURNED:
                self.returned[name] = value
            elif self.step:
                continue
            elif name in self.names:
                self.names[name] = packing.put(self.names[name], value)
            elif not isinstance(value, packing.State):
                self.names[name] = value


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what CALL reads."""
    return {FUNCTION: function, GIVEN: (args, kwargs)}


def names_of(source: str) -> tuple[list[str], set[str]]:
    """Return the global names that code reads, in order, and those that it binds."""
    table = symtable.symtable(source, "<cell>", "exec")
    read, bound = dict[str, None](), set[str]()
    waiting = [table]
    while waiting:
        scope = waiting.pop(0)
        waiting += scope.get_children()
        for symbol in scope.get_symbols():
            is_top = scope is table
            if symbol.is_referenced() and (is_top or symbol.is_global()):
                read[symbol.get_name()] = None
            is_bound = symbol.is_assigned() or symbol.is_imported()
            if is_bound and (is_top or symbol.is_declared_global()):
                bound.add(symbol.get_name())
    changed = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AugAssign))
    read |= {node.target.id: None for node in changed if isinstance(node.target, ast.Name)}
    return list(read), bound


def is_sent(name: str, names: MutableMapping[str, Any]) -> bool:
    """Return whether a name goes along; a plan in force is of the notebook's process."""
    is_history = name[:1] == "_" and name[1:].isdecimal()
    known = name in names and name not in OWN and not is_history
    return known and not isinstance(names[name], SpeedContext)


def packed(sent: dict[str, Any], names: MutableMapping[str, Any], is_here: bool, bound: Any) -> Any:
    """Return the parcel, without what can't be sent where the cell binds that name itself.

    Raises SpeedKitError that names anything else that can't be sent.
    """
    try:
        return pack(sent, names, is_here)
    except Exception as error:  # whatever an object's own pickling raises
        found = refused(sent, names)
        if found and found.keys() <= bound:
            rest = {name: value for name, value in sent.items() if name not in found}
            return packed(rest, names, is_here, bound)
        name = next((name for name in found if name not in bound), "")
        reason = in_a_line(found.get(name, error))
    what = f"`{name}`" if name else "what the cell names, together,"
    raise SpeedKitError(f"{what} can't be sent to the workers ({reason}); make it inside the cell")


def launch(function: Callable[..., Any], *args: Any, n: int | None = None, **kwargs: Any) -> Any:
    """Call a function on every worker; return what it returned on rank 0.

    `n` workers are started where they do not run yet (those that run, or 2). Models and optimizers
    that the function is passed or reads by name change here as on rank 0.
    Raises RankError with a rank's own error.
    """
    if not callable(function):
        raise ArgumentError(f"launch needs a function, not {arguments.shown(function)}")
    if n is not None and arguments.whole("n", n) < 1:
        raise ArgumentError(f"n must be 1 or more, not {n}")
    names = notebook()
    extra = called(function, *args, **kwargs)
    around = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    given = (*args, *kwargs.values(), *around.values())
    own = {f"_launched_{number}": value for number, value in enumerate(given)}
    stateful = {key: value for key, value in own.items() if packing.has_state(value)}
    space = getattr(function, "__globals__", {}) if names is None else names
    run = Launch(CALL, space, n, extra=extra | stateful)
    for printed in run.run(messages.note):
        last = printed
    for rank, text in last.items():
        for line in text.splitlines():
            messages.important(f"rank {rank}: {line}")
    for key, value in stateful.items():
        packing.put(value, run.returned[key])
    return run.returned.get(RETURNED)
