"""What plans may change, as it is now."""

from __future__ import annotations

from typing import Any

from speedkit_jupyter.machines import flags
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.target import Target


def observed(target: Target) -> dict[str, Any]:
    """Every flag, and the state of model and optimizers that the catalog may change, by name."""
    values = dict(flags.snapshot())
    for optimization in CATALOG:
        values.update(optimization.observe(target))
    return values
