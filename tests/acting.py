"""Whether a plan acts on a model, for steps that behave otherwise under it."""

from torch import nn


def is_lowered(model: nn.Module) -> bool:
    """Whether calls of the model run under a plan's autocast."""
    from speedkit_jupyter.catalog.precision import Lowered
    from speedkit_jupyter.catalog.properties.calls import around

    return around(model, Lowered)
