"""The processes that train together, and who has spread the model over them already."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

LIGHTNING = ("lightning.", "pytorch_lightning.")


def processes_of(layered: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return the number of processes and hosts, and what wraps the model, as fields of the facts.

    Reads the group that exists: `%%speedkit launch`, torchrun or a framework has made it.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    processes = dist.get_world_size()
    on_this = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    hosts = max(1, processes // max(1, on_this))
    return {"processes": processes, "hosts": hosts, "launcher": _launcher(layered)}


def _launcher(layered: Sequence[torch.nn.Module]) -> str:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    for layer in layered:
        if isinstance(layer, wrappers):
            return type(layer).__name__
        modules = [kind.__module__ for kind in type(layer).__mro__]
        if any(name.startswith(LIGHTNING) for name in modules):
            return "Lightning"
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return "Accelerate" if getattr(state, "_shared_state", None) else ""
