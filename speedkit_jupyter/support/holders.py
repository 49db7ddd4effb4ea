"""Objects that hold models: pipelines, trainers, dicts and dataclasses of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.lookup import attributes_of, is_a, parts_of
from speedkit_jupyter.support.wrappers import unwrapped

if TYPE_CHECKING:
    import torch

# A property that holds a model where no attribute does: of Lightning's Trainer, for one.
PROPERTY = "model"
# The list of the models that Accelerate's Accelerator has prepared.
PREPARED = "_models"


def models_in(holder: Any) -> dict[str, torch.nn.Module]:
    """Return the whole models that an object holds, in order, by the words `.unet` or `['lm']`.

    A part of another model, a wrapper of an earlier one and a module without parameters are left
    out. Attributes that begin with an underscore, such as caches, are not read.
    """
    import torch

    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for word, value in (*parts_of(holder), *_property_of(holder)):
        if is_a(value, torch.nn.Module) and next(value.parameters(), None) is not None:
            found.setdefault(id(unwrapped(value)), (word, value))
    inner = {id(part) for _, model in found.values() for part in list(model.modules())[1:]}
    return {word: model for word, model in found.values() if id(model) not in inner}


def _property_of(holder: Any) -> Iterator[tuple[str, Any]]:
    prepared = attributes_of(holder).get(PREPARED)
    for number, model in enumerate(prepared if type(prepared) is list else ()):
        yield f".{PREPARED}[{number}]", model
    if isinstance(getattr(type(holder), PROPERTY, None), property):
        with suppress(Exception):  # a library's object may have no model yet
            yield f".{PROPERTY}", getattr(holder, PROPERTY)
