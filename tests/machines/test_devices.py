"""The table of kinds of device: what follows from an entry."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter import Facts, Hardware, SpeedConfig, machines, plan
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.machines import devices

every = pytest.mark.parametrize("kind", devices.KINDS.values(), ids=lambda one: one.name)


@every
def test_a_kind_can_be_asked_for_by_its_word_and_a_number(kind):
    assert SpeedConfig(device=kind.name).device == kind.name
    assert kind.name in devices.WORDS
    if kind.is_numbered:
        assert SpeedConfig(device=f"{kind.name}:3").device == f"{kind.name}:3"
    else:
        with pytest.raises(ValueError, match="not allowed"):
            SpeedConfig(device=f"{kind.name}:3")


@every
def test_a_machine_with_such_a_device_ships_and_is_planned_for(kind):
    shipped = [Hardware.from_json(name) for name in machines.names()]
    here = [one for one in shipped if one.accelerator(kind.name)]
    assert here
    facts = Facts(parameters=10, optimizers=(OptimizerFacts(),))
    for machine in here:
        found = plan(SpeedConfig(device=kind.name), machine, facts)
        assert found["device"].active
        assert found.facts_after.device.partition(":")[0] == kind.name
        assert found["fused_optimizer"].active


def test_a_cpu_is_no_kind_of_accelerator_and_never_awaited():
    assert devices.kind_of("cpu") is None
    devices.synchronize(torch.device("cpu"))
