"""What a step leaves the models set to: which parts are training, what gets gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.checks.observing.observation import Observation


def of(models: Sequence[torch.nn.Module], unread: Collection[int] = ()) -> dict[str, bool]:
    """Of each module and parameter, by a name that says what is set; but for parameters whose
    gradients are `unread`, by their ids.
    """
    modes: dict[str, bool] = {}
    for number, model in enumerate(models, 1):
        which = f"{type(model).__name__} {number}" if len(models) > 1 else type(model).__name__
        for name, part in model.named_modules():
            modes[".".join(filter(None, (which, name))) + ".training"] = part.training
        for name, parameter in model.named_parameters():
            if id(parameter) not in unread:
                modes[f"{which}.{name}.requires_grad"] = parameter.requires_grad
    return modes


def missed(observation: Observation, baseline: Observation, controls: Sequence[Observation]) -> str:
    """What is set otherwise than the baseline leaves it; empty where nothing is.

    Rounding sets nothing, unless it does in a control: where a step goes by what it computes.
    """
    for name, value in baseline.modes.items():
        modes = [control.modes.get(name, value) for control in controls]
        if observation.modes.get(name, value) != value and all(mode == value for mode in modes):
            return f"{name} is left {not value}, where the baseline leaves it {value}"
    return ""
