"""What one shell remembers between magics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.config import SpeedConfig
from speedkit_jupyter.context import SpeedContext
from speedkit_jupyter.exceptions import SpeedKitError
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.tuning import learning


@dataclass
class Session:
    """The config that apply starts from, the contexts that were applied, by model name, and how
    to make a step of the last `%%speedbench` cell.
    """

    config: SpeedConfig = field(default_factory=SpeedConfig)
    contexts: dict[str, SpeedContext] = field(default_factory=dict)
    last_step: Callable[[], Step] | None = None

    def applied(self, names: Mapping[str, Any]) -> list[tuple[str, SpeedContext]]:
        """The contexts that are not restored, by the name of their model.

        A name that means another object by now is marked.
        """
        self.contexts = {n: one for n, one in self.contexts.items() if not one.restored}
        return [
            (n if "." in n or names.get(n) is one.model else f"{n} (an earlier model)", one)
            for n, one in self.contexts.items()
        ]


def or_learned(config: SpeedConfig, model: Any, optimizers: list[Any]) -> SpeedConfig:
    """Where nothing definite is asked for, the plan that tuning has learned for this model."""
    if not config.is_auto:
        return config
    try:
        return learning.tuned(model, optimizers) or config
    except SpeedKitError as error:  # then by rules, as without a store
        print(error)
        return config
