"""Refuse to measure what another thread trains at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import process_time, sleep, thread_time
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch

# A thread at work uses this much CPU time while ours sleeps for `GLANCE_S`: threads that wait use
# some microseconds, one that adds a number each millisecond 200.
GLANCE_S, AT_WORK_S = 0.01, 5e-5
# A loop that trains in another thread makes a step in this time, or is waiting for something.
LOOK_S = 0.1


def others_at_work() -> bool:
    """Return whether other threads of this process compute at the moment.

    Their frames are not looked at: reading those of a running thread can crash Python.
    """
    if threading.active_count() == 1:
        return False
    begun_s = process_time() - thread_time()
    sleep(GLANCE_S)
    return process_time() - thread_time() - begun_s > AT_WORK_S


def refuse_trained_elsewhere(
    tensors: Sequence[torch.Tensor], name: Callable[[torch.Tensor], str]
) -> None:
    """Raise StepError if another thread writes to one of these tensors at the moment."""
    if not tensors or not others_at_work():
        return
    versions = [tensor._version for tensor in tensors]
    sleep(LOOK_S)
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise _refusal(name(tensor))


def refuse_changed_elsewhere(
    overwritten: Callable[[], Sequence[Any]], name: Callable[[Any], str]
) -> None:
    """Raise StepError if values that were just copied are overwritten: no step has run since."""
    if others_at_work():
        sleep(LOOK_S)
        for instance in overwritten():
            raise _refusal(name(instance))


def _refusal(name: str) -> StepError:
    return StepError(
        f"another thread changes {name}, which the step reaches: measure when it has ended"
    )
