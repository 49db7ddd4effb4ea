"""What apply starts from where the user asks for nothing definite."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.config import SpeedConfig
from speedkit_jupyter.exceptions import SpeedKitError
from speedkit_jupyter.tuning import learning


def or_learned(config: SpeedConfig, model: Any, optimizers: list[Any]) -> SpeedConfig:
    """Where nothing definite is asked for, the plan that tuning has learned for this model."""
    if not config.is_auto:
        return config
    try:
        return learning.tuned(model, optimizers) or config
    except SpeedKitError as error:  # then by rules, as without a store
        print(error)
        return config
