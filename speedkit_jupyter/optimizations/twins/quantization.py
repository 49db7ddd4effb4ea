"""What the optimizations have in common that quantize linear layers by torchao."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins import quantizing
from speedkit_jupyter.optimizations.twins.compression import Compression

FUSED = "`compile` fuses the casts, without which it may be slower"


class Quantization(Compression):
    """Twins of fewer bits, by torchao."""

    library = "torchao"
    variable = None

    def obstacle(self, hardware: Hardware, facts: Facts) -> str:
        """It needs the library, too."""
        return quantizing.obstacle(hardware, facts)


def true_is(word: str) -> BeforeValidator:
    """`true`, as a shell may spell it, stands for this word."""

    def meant(value: Any) -> Any:
        return word if value in (True, "true", "on", "yes") else value

    return BeforeValidator(meant)
