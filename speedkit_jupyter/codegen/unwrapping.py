"""What generated code begins with where the user's own names stand for wrapped objects.

Fabric sets nothing up twice, and Accelerate's state belongs to the process: the code starts from
the model and the optimizers as they were before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.codegen.instances import Instance
from speedkit_jupyter.optimizations.base.snippet import Form
from speedkit_jupyter.support.wrappers import is_wrapper, layers

Block = list[str]
# `Accelerator(mixed_precision=...)` puts its own forward in the model's place, and keeps the first.
PATCHED = "_original_forward"
UNPATCHING = "from accelerate.utils import extract_model_from_parallel"
# What an Accelerator has prepared none prepares again, be it for another precision.
PREPARED = "_is_accelerate_prepared"


@dataclass(frozen=True)
class Given:
    """`suffix` follows the user's word for the model, `patched` says that Accelerate replaced its
    forward, `prepared` that it takes the model for done, `wrapped` are the optimizers' names that
    stand for wrappers.

    `own` are the names of optimizers that the code takes as they are, `words` how the user writes
    those that are no plain variables; `instance` is the user's own Accelerator or Fabric.
    """

    suffix: str = ""
    patched: bool = False
    prepared: bool = False
    wrapped: frozenset[str] = frozenset()
    own: frozenset[str] = frozenset()
    words: Mapping[str, str] = field(default_factory=dict)
    instance: Instance | None = None

    def beginning(self, optimizer: str) -> Block:
        """The line by which an optimizer is the torch one, under a name of its own."""
        word = self.words.get(optimizer, optimizer) if optimizer in self.own else optimizer
        if optimizer in self.wrapped:
            return [f'{optimizer} = getattr({word}, "optimizer", {word})']
        return [f"{optimizer} = {word}"] if word != optimizer else []


def of_model(model: Any, form: Form) -> str:
    """What follows the user's word for the model: `.module` for each wrapper that is taken off.

    Fabric's in every form; torch's parallel ones, which are a choice of the user's own, where a
    framework will wrap the model by itself.
    """
    suffix = ""
    for outer in [] if model is None else layers(model)[:-1]:
        is_fabrics = "_original_module" in outer.__dict__.get("_modules", {})
        is_parallel = type(outer).__name__ in ("DataParallel", "DistributedDataParallel")
        if not is_fabrics and not (is_parallel and form != "torch"):
            break
        suffix += ".module"
    return suffix


def is_patched(model: Any) -> bool:
    """Whether Accelerate has put a forward of its own into the model."""
    return model is not None and PATCHED in getattr(layers(model)[-1], "__dict__", {})


def is_prepared(model: Any) -> bool:
    """Whether an Accelerator would pass it on as it is."""
    return model is not None and PREPARED in getattr(layers(model)[-1], "__dict__", {})


def precision_of(model: Any) -> str:
    """What a framework's wrapper computes in by itself: `bf16`, `fp16`, or nothing to speak of.

    Where the wrapper is taken off, the plan has to say it.
    """
    if model is None:
        return ""
    if is_patched(model):
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        precision = str(getattr(state, "_shared_state", {}).get("_mixed_precision", ""))
        return precision if precision in ("bf16", "fp16") else ""
    strategy = getattr(model, "__dict__", {}).get("_strategy")
    of_fabric = getattr(getattr(strategy, "precision", None), "precision", "")
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(of_fabric), "")


def wrapped(optimizers: Iterable[tuple[str, Any]]) -> frozenset[str]:
    """The names that stand for a framework's wrapper."""
    return frozenset(
        name for name, optimizer in optimizers if optimizer is not None and is_wrapper(optimizer)
    )


def new_state() -> tuple[Block, list[str]]:
    """The lines, and their imports, that make room for another `Accelerator` in this process."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.AcceleratorState._shared_state:
        return [], []
    lines = [
        "# In place of the Accelerator that was there: its settings are the whole process's.",
        "AcceleratorState._reset_state(reset_partial_state=True)",
    ]
    return lines, ["from accelerate.state import AcceleratorState"]
