"""A cell or a function on all workers: what it names goes along, what rank 0 made of it returns."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.extras.processes import workers
from speedkit_jupyter.extras.processes.packing import Pickler, read_by, steps_of
from speedkit_jupyter.extras.processes.returning import taken
from speedkit_jupyter.extras.processes.workers import Printed, RankLost, Workers
from speedkit_jupyter.plans.context import SpeedContext
from speedkit_jupyter.support import arguments, messages
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, in_a_line
from speedkit_jupyter.support.lookup import notebook
from speedkit_jupyter.support.tracebacks import hide_internal_frames

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
    stays: Sequence[str] = ()  # what did not return
    result: Any = None  # of a function

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
        if running.stays & {*read}:  # which may hold any of those that came or went
            read += running.names
        sent = {name: self.names[name] for name in read if self._goes(name, running)} | self.extra
        pickler = self._packed(sent, running, bound)
        parcel, ours = pickler.sealed(running.is_here), pickler.known()
        if pickler.moving:
            kinds = ", ".join(pickler.moving)
            messages.important(f"stays as it is here, whatever the cell draws from it: {kinds}")
        ranks = range(running.size) if self.rank is None else [self.rank]
        names = sorted(bound), [RETURNED] if self.step else None
        try:
            with closing(running.run(ranks, parcel, self.source, *names)) as states:
                for printed, ended in states:
                    outcomes = ended
                    yield printed
        finally:
            parcel.close()
        self.stays = outcomes[0].stays
        running.stays |= {*self.stays}
        running.names |= dict.fromkeys(sent)
        if (results := outcomes[0].results) is not None:
            made, failed = taken(results, ours, self.names, running.keys, running.launches)
            self.stays = [*self.stays, *failed]
            self.result = made.pop(RETURNED, None)
            self.names.update(made)
            running.own |= made
            running.names |= dict.fromkeys(made)

    def _goes(self, name: str, running: Workers) -> bool:
        """Return whether a name goes along; a plan in force is of the notebook's process."""
        is_history = name[:1] == "_" and name[1:].isdecimal()
        if name not in self.names or name in OWN or is_history:
            return False
        value = self.names[name]
        return not isinstance(value, SpeedContext) and not running.is_own(name, value)

    def _packed(self, sent: dict[str, Any], running: Workers, bound: set[str]) -> Pickler:
        """Return what was written, without what the cell binds itself and can't be sent.

        Raises SpeedKitError that names anything else that can't be sent.
        """
        running.keys.forget_dead()
        left_out: set[str] = set()
        while True:
            pickler = Pickler(self.names, running.keys, lambda name: self._goes(name, running))
            failed = pickler.write([name for name in sent if name not in left_out], sent.get)
            for name, error in failed.items():
                if name not in bound:
                    what = "what the function is given" if name in self.extra else f"`{name}`"
                    reason = f"can't be sent to the workers ({in_a_line(error)})"
                    raise SpeedKitError(f"{what} {reason}; make it inside the cell")
            if not failed:
                return pickler
            left_out.update(failed)


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what CALL reads."""
    return {FUNCTION: function, GIVEN: (args, kwargs)}


def names_of(source: str) -> tuple[list[str], set[str]]:
    """Return the global names that code reads, in order, and those that it binds.

    Each word of a magic's line counts as one that is read.
    """
    whole = compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    read = read_by(whole)
    bound = {
        step.argval
        for code, step in steps_of(whole)
        if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_NAME" and code is whole)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython()."):
            texts = [one.value for one in node.args if isinstance(one, ast.Constant)]
            read |= dict.fromkeys(re.findall(r"[^\W\d]\w*", " ".join(map(str, texts))))
    return list(read), bound


@hide_internal_frames
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
    space = getattr(function, "__globals__", {}) if names is None else names
    run = Launch(CALL, space, n, extra=called(function, *args, **kwargs))
    for printed in run.run(messages.note):
        last = printed
    for rank, text in last.items():
        for line in text.splitlines():
            messages.important(f"rank {rank}: {line}")
    if run.stays:
        shown = ["its result" if one == RETURNED else one for one in run.stays]
        messages.important(f"stays in the workers: {', '.join(shown)}")
    return run.result
