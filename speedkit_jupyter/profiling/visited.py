"""What is tried once a step was profiled, while it is isolated still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Visited:
    """A step that is isolated: `call` makes it once, `settle` puts it back to where it began.

    `affords` says whether there is time for so many seconds.
    """

    call: Callable[[], object]
    settle: Callable[[], object]
    affords: Callable[[float], bool]
    device: torch.device
