"""torchao, as far as it is called here: which versions fit, and how a weight is made by it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins.compressing import unfit
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch

# The first whose int8 products stay right on CPUs that would overflow, and the torch that it needs.
SINCE, FITTING_TORCH = (0, 18), (2, 11)
# Its own, and what torch says of how it registers its classes: nothing that a user could mend.
LOUD = ("torchao", "torch.utils._pytree")


def obstacle(hardware: Hardware, facts: Facts) -> str:
    """Why the linear layers of this model can't be quantized here; empty where they can."""
    return unfit(facts) or unfit_here(hardware)


def unfit_here(hardware: Hardware) -> str:
    """Why torchao is of no use in this environment; empty where it is."""
    installed = hardware.libraries.get("torchao")
    if installed is None:
        return "needs torchao: pip install torchao"
    if _version(installed) < SINCE:
        return f"needs torchao {_dotted(SINCE)}; this is {installed}: pip install -U torchao"
    if _version(hardware.torch) < FITTING_TORCH:
        return f"torchao {installed} needs torch {_dotted(FITTING_TORCH)}; this is {hardware.torch}"
    return ""


def imported(module: str = "quantization") -> Any:
    """`torchao.quantization`, or another, without its remarks on kernels for other machines.

    Raises SpeedKitError where it can't be imported.
    """
    try:
        with _quiet():
            return import_module(f"torchao.{module}")
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise SpeedKitError(f"torchao can't be imported: {type(error).__name__}: {first}") from None


def by_torchao(config: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight as `torchao.quantization.quantize_` makes it, of a layer that is nobody's."""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    imported().quantize_(layer, config)
    return layer.weight


@contextmanager
def _quiet() -> Iterator[None]:
    def refuse(record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(name) for name in LOUD]
    for logger in loggers:
        logger.addFilter(refuse)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(refuse)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
