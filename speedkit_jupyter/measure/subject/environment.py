"""Where and when something was measured."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.planning import describe
from speedkit_jupyter.support.version import __version__

if TYPE_CHECKING:
    import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Return the device, versions and the time of a result, of the machine that it ran on.

    `planned_for` names the other machine that its plans were made for, where there is one.
    """
    hardware, planned_for = Hardware.detect(), Hardware.current().pinned
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "device": describe(hardware, str(device)),
        "torch": hardware.torch,
        "python": hardware.python,
        "system": hardware.system,
        "speedkit": __version__,
        "measured_at": now.isoformat(timespec="seconds"),
        **({"planned_for": planned_for} if planned_for else {}),
    }
