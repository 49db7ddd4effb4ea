"""What apply starts from where the user asks for nothing definite."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.config import SpeedConfig
from speedkit_jupyter.exceptions import ConfigError, SpeedKitError
from speedkit_jupyter.tuning import learning


def or_learned(config: SpeedConfig, model: Any, optimizers: list[Any]) -> SpeedConfig:
    """As `learning.or_learned`; a store that can't be read is said, and no more.

    Raises ConfigError where SPEEDKIT_HARDWARE names no machine.
    """
    try:
        return learning.or_learned(config, model, optimizers)
    except ConfigError:  # no plan can be made
        raise
    except SpeedKitError as error:  # then by rules, as without a store
        print(error)
        return config
