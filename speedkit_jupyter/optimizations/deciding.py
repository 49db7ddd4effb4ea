"""What an optimization decides, or that this torch does not have what it stands on."""

from __future__ import annotations

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base import Decision, Optimization, Request
from speedkit_jupyter.optimizations.facts import Facts
from speedkit_jupyter.support.moved import moved


def decided(
    optimization: Optimization, request: Request, hardware: Hardware, facts: Facts
) -> Decision:
    """Its decision; declined where torch has moved one of its switches, or what it asks."""
    try:
        optimization.switches()
        return optimization.decide(request, hardware, facts)
    except (AttributeError, ImportError) as error:
        missing = moved(error)
        if not missing:
            raise
    rule = f"torch {hardware.torch} has no {missing}, which this stands on"
    return request.decline(optimization.as_is(facts), rule, hint="a newer SpeedKit may know it")
