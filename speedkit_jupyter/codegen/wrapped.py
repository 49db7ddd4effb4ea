"""The user's own names in generated code: models and optimizers behind wrappers, a framework's
instance.

Fabric sets nothing up twice, and Accelerate's state belongs to the process: the code starts from
the model and the optimizers as they were before they were wrapped.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.optimizations.base.snippet import Form
from speedkit_jupyter.support.wrappers import is_wrapper, layers

Block = list[str]
# `Accelerator(mixed_precision=...)` puts its own forward in the model's place, and keeps the first.
PATCHED = "_original_forward"
UNPATCHING = "from accelerate.utils import extract_model_from_parallel"
# What an Accelerator has prepared none prepares again, be it for another precision.
PREPARED = "_is_accelerate_prepared"
# By form: the packages that have the class, the class, and what snippets call an instance.
CLASSES = {
    "accelerate": (("accelerate",), "Accelerator", "accelerator"),
    "fabric": (("lightning", "lightning_fabric"), "Fabric", "fabric"),
}


@dataclass(frozen=True)
class Instance:
    """The user's own Accelerator or Fabric; `word` is the notebook's for it."""

    form: str
    word: str
    value: Any

    @property
    def renamed(self) -> tuple[str, str]:
        """What snippets call it, and the user's own word."""
        return CLASSES[self.form][2], self.word

    @property
    def accumulation_steps(self) -> int:
        """Of how many backward passes an optimizer's step is the sum: Accelerate counts them."""
        return int(getattr(self.value, "gradient_accumulation_steps", 1))

    def suits(self, arguments: Mapping[str, str], device: str) -> bool:
        """Return whether it is what these arguments would make, for a model on this device."""
        wanted = {key: value.strip('"') for key, value in arguments.items()}
        with suppress(AttributeError):  # its state is gone, or is called otherwise by now
            kind, _, index = device.partition(":")
            own = self.value.device
            if own.type != kind or (own.index or 0) != int(index or 0):
                return False
            if self.form == "fabric":
                precision = str(self.value._strategy.precision.precision)
                return precision == wanted.get("precision", "32-true")
            compiles = any(name.startswith("dynamo") for name in wanted)
            backend = self.value.state.dynamo_plugin.backend.value
            same = self.value.mixed_precision == wanted.get("mixed_precision", "no")
            return bool(same and not compiles and backend == "NO")
        return False


def instance_in(names: Mapping[str, Any], form: str) -> Instance | None:
    """Return the newest that has a name of its own in the notebook."""
    packages, kind, _ = CLASSES.get(form, ((), "", ""))
    instance = None
    for word, value in list(names.items()):
        classes = [base for base in type(value).__mro__ if base.__name__ == kind]
        homes = {str(base.__module__).partition(".")[0] for base in classes}
        if word.isidentifier() and word[:1] != "_" and homes & {*packages}:
            instance = Instance(form, word, value)
    return instance


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
        """Return the line by which an optimizer is the torch one, under a name of its own."""
        word = self.words.get(optimizer, optimizer) if optimizer in self.own else optimizer
        if optimizer in self.wrapped:
            return [f'{optimizer} = getattr({word}, "optimizer", {word})']
        return [f"{optimizer} = {word}"] if word != optimizer else []


def given(
    model: Any, form: Form, optimizers: Mapping[str, Any], words: Mapping[str, str],
    names: Mapping[str, Any],
) -> Given:  # fmt: skip
    """Return what of the user's names stands for wrapped objects, in this form of code."""
    inner = {} if model is None else getattr(layers(model)[-1], "__dict__", {})
    return Given(
        _suffix(model, form),
        PATCHED in inner,
        PREPARED in inner and form in ("accelerate", "transformers"),
        frozenset(name for name, one in optimizers.items() if one is not None and is_wrapper(one)),
        words=words,
        instance=instance_in(names, form),
    )


def _suffix(model: Any, form: Form) -> str:
    """Return `.module` for each wrapper that is taken off.

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


def precision_of(model: Any) -> str:
    """Return what a framework's wrapper computes in by itself: `bf16`, `fp16`, or nothing.

    Where the wrapper is taken off, the plan has to say it.
    """
    if model is None:
        return ""
    if PATCHED in getattr(layers(model)[-1], "__dict__", {}):
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        precision = str(getattr(state, "_shared_state", {}).get("_mixed_precision", ""))
        return precision if precision in ("bf16", "fp16") else ""
    strategy = getattr(model, "__dict__", {}).get("_strategy")
    of_fabric = getattr(getattr(strategy, "precision", None), "precision", "")
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(of_fabric), "")


def new_state() -> tuple[Block, list[str]]:
    """Return the lines, and imports, that make room for another `Accelerator` in this process."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.AcceleratorState._shared_state:
        return [], []
    lines = [
        "# In place of the Accelerator that was there: its settings are the whole process's.",
        "AcceleratorState._reset_state(reset_partial_state=True)",
    ]
    return lines, ["from accelerate.state import AcceleratorState"]
