"""Which models and optimizers a step uses: called or stepped in the thread that measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks, patched
from speedkit_jupyter.measure.undo.busy_threads import others_at_work
from speedkit_jupyter.measure.undo.isolation import State


@contextmanager
def used(state: State) -> Iterator[None]:
    """Note in the state what the block uses, where another thread may be using the rest."""
    if not others_at_work():
        yield
        return
    from torch.nn import Module

    seen: set[int] = set()

    def make(call: Any) -> Callable[..., Any]:
        def noted(module: Any, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in seen:
                seen.update(map(id, (module, *module.parameters())))
            return call(module, *args, **kwargs)

        return noted

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.add(id(optimizer))

    with patched(Module, "__call__", make), optimizer_hooks(stepped):
        yield
    state.meanwhile.used = seen
