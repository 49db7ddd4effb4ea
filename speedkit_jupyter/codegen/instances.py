"""The user's own Accelerator or Fabric: generated code goes on with it, or makes another one under
its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# Packages that have it, and its class.
CLASSES: dict[str, tuple[tuple[str, ...], str]] = {
    "accelerate": (("accelerate",), "Accelerator"),
    "fabric": (("lightning", "lightning_fabric"), "Fabric"),
}
# What snippets call it.
WORDS = {"accelerate": "accelerator", "fabric": "fabric"}


@dataclass(frozen=True)
class Instance:
    """One that the notebook has; `word` is the user's for it."""

    form: str
    word: str
    value: Any

    @property
    def renamed(self) -> tuple[str, str]:
        """What snippets call it, and the user's own word."""
        return WORDS[self.form], self.word

    @property
    def accumulation_steps(self) -> int:
        """Of how many backward passes an optimizer's step is the sum: Accelerate counts them."""
        return int(getattr(self.value, "gradient_accumulation_steps", 1))

    def suits(self, arguments: Mapping[str, str], device: str) -> bool:
        """Whether it is what these arguments would make, for a model on this device."""
        wanted = {key: value.strip('"') for key, value in arguments.items()}
        with suppress(AttributeError):  # its state is gone, or is called otherwise by now
            if not _is_on(self.value.device, device):
                return False
            if self.form == "fabric":
                precision = str(self.value._strategy.precision.precision)
                return bool(precision == wanted.get("precision", "32-true"))
            compiles = any(name.startswith("dynamo") for name in wanted)
            backend = self.value.state.dynamo_plugin.backend.value
            same = self.value.mixed_precision == wanted.get("mixed_precision", "no")
            return bool(same and not compiles and backend == "NO")
        return False


def instance_in(names: Mapping[str, Any], form: str) -> Instance | None:
    """The newest that has a name of its own in the notebook."""
    if form not in CLASSES:
        return None
    packages, name = CLASSES[form]
    instance = None
    for word, value in list(names.items()):
        homes = [
            str(base.__module__).partition(".")[0]
            for base in type(value).__mro__
            if base.__name__ == name
        ]
        if word.isidentifier() and word[:1] != "_" and not {*packages}.isdisjoint(homes):
            instance = Instance(form, word, value)
    return instance


def _is_on(own: Any, device: str) -> bool:
    kind, _, index = device.partition(":")
    return bool(own.type == kind and (own.index or 0) == int(index or 0))
