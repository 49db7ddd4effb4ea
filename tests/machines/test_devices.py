"""Each entry in the table of device kinds can be asked for, detected and planned for."""

from types import SimpleNamespace

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


# Answers of torch.mps and torch.xpu; test_recorded_answers.py has those of torch.cuda.
ANSWERS = {
    "mps": {"recommended_max_memory": 2**34},
    "xpu": {
        "device_count": 1,
        "is_bf16_supported": True,
        "get_device_properties": SimpleNamespace(name="Arc", total_memory=2**34),
    },
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_machine_is_detected_from_the_answers_of_torchs_module(kind, here, monkeypatch):
    for name, answer in {"is_available": True, **ANSWERS[kind]}.items():
        monkeypatch.setattr(getattr(torch, kind), name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: True)
    (found,) = Hardware.detect().accelerators
    assert (found.kind, found.memory_bytes, found.bf16) == (kind, 2**34, True)
    assert not found.tf32
