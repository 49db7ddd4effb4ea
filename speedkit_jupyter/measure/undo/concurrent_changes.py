"""Refuse to measure what another thread trains at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from time import sleep
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.undo.handlers.origin import INNER_MODULES, is_installed
from speedkit_jupyter.support.exceptions import StepError

if TYPE_CHECKING:
    import torch

# Parts of torch that only hand on what others have made.
IDLE = (*INNER_MODULES, "torch.utils.data", "torch._utils")
# A loop that trains in another thread makes a step in this time, or is waiting for something.
LOOK_S = 0.1


def others_at_work() -> bool:
    """Return whether another thread runs code of the user's, or torch's."""
    here = threading.get_ident()
    stacks = [frame for number, frame in sys._current_frames().items() if number != here]
    return any(map(_is_work, stacks))


def _is_work(frame: Any) -> bool:
    while frame is not None:
        home = str(frame.f_globals.get("__name__"))
        root = home.partition(".")[0]
        if not is_installed(root) or (root == "torch" and not home.startswith(IDLE)):
            return True
        frame = frame.f_back
    return False


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
