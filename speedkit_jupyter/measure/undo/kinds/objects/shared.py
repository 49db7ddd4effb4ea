"""Objects whose state lies partly in another thread or process.

To put back the part that lies here would part the two: a loader that counts what it has sent, and
is set back to a smaller number, waits for an answer that came long ago.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

from speedkit_jupyter.measure.undo.kinds.objects.locks import others_run
from speedkit_jupyter.support.lookup import is_a

CHANNELS = ("multiprocessing.queues", "multiprocessing.connection", "multiprocessing.managers")
WAITED_FOR = (threading.Condition, threading.Semaphore, threading.Barrier)
# Of a list of workers the first ones tell what it is.
MOST_LOOKED_AT = 8


def is_elsewhere_too(instance: Any, attributes: dict[str, Any]) -> bool:
    """Whether it can't go back alone: its workers or the channels to them are among its attributes.

    What threads of this process wait for is such an object only while others of them run.
    """
    values = [part for value in list(attributes.values()) for part in _parts(value)]
    if any(_works(part) for part in values):
        return True
    shared = is_a(instance, queue.Queue) or any(is_a(v, WAITED_FOR) for v in values)
    return shared and others_run()


def parts_of_its_own(attributes: dict[str, Any]) -> list[Any]:
    """The models and optimizers that it holds: those are not in the other thread's hands."""
    import torch

    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return [value for value in list(attributes.values()) if issubclass(type(value), kinds)]


def _works(part: Any) -> bool:
    cls = type(part)
    return issubclass(cls, threading.Thread | BaseProcess) or str(cls.__module__).startswith(
        CHANNELS
    )


def _parts(value: Any) -> list[Any]:
    cls = type(value)
    if cls in (list, tuple, deque):
        return [value, *islice(value, MOST_LOOKED_AT)]
    return [value, *islice(value.values(), MOST_LOOKED_AT)] if cls is dict else [value]
