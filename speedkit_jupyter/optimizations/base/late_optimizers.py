"""Optimizers that a plan could not know: made after `apply`, which is the usual order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.base.target import Target

if TYPE_CHECKING:
    import torch


@contextmanager
def newcomers(
    target: Target,
    known: Iterable[torch.optim.Optimizer],
    welcome: Callable[[torch.optim.Optimizer], None],
) -> Iterator[None]:
    """`welcome` each optimizer of the model that is not `known`, just before its first step.

    torch's hook is for the whole process: other models' optimizers cost one look at a set. It
    must not keep the model alive, so neither may `welcome`. A benchmark knows all that it steps,
    but those that its step makes: these are met in its own thread.
    """
    if not target.search and not target.made:
        yield
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    here = target.only_in
    reference = weakref.ref(target)
    members = weakref.WeakSet(known)
    strangers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if here not in (None, threading.get_ident()):
            return
        count = len(optimizer.param_groups)
        if optimizer in members or strangers.get(optimizer) == count:
            return
        target = reference()
        if target is None or not target.is_stepped_by(optimizer):
            strangers[optimizer] = count  # looked at again if it takes more parameters
            return
        members.add(optimizer)
        welcome(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
