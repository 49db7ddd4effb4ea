"""What an optimization decides, and what goes before that: this torch does not have what it stands
on, or nobody asked for another model.
"""

from __future__ import annotations

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.support.torch_private import moved

BY_REQUEST = "changes what the model computes, so it is there on request only"


def decided(
    optimization: Optimization, request: Request, hardware: Hardware, facts: Facts
) -> Decision:
    """Return its decision; declined where torch has moved one of its switches, or what it asks.

    No rule turns on, or offers, what changes the model's arithmetic.
    """
    try:
        optimization.switches()
        decision = optimization.decide(request, hardware, facts)
    except (AttributeError, ImportError) as error:
        missing = moved(error)
        if not missing:
            raise
    else:
        is_rules = decision.active or decision.worth_measuring is not None
        if optimization.effect is Effect.CHANGES_MODEL and is_rules and not request.explicit:
            return request.leave(optimization.as_is(facts), BY_REQUEST)
        return decision
    rule = f"torch {hardware.torch} has no {missing}, which this stands on"
    return request.decline(optimization.as_is(facts), rule, hint="a newer SpeedKit may know it")
