"""With SPEEDKIT_HARDWARE, plans are made as for another machine, and reports say so."""

from pathlib import Path

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups, code, machines, plan
from speedkit_jupyter.plans.applying import preview
from speedkit_jupyter.report.plan_report import plan_report, status_report
from speedkit_jupyter.rounds.comparison import environment
from speedkit_jupyter.support.exceptions import ConfigError, SpeedKitError

ROOT = Path(__file__).parents[2]
SHIPPED = machines.names()
SAYS_SO = "as for {}, by SPEEDKIT_HARDWARE"


def small():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_name_a_file_name_and_a_path_choose_the_same_machine(name, monkeypatch, hardware):
    path = ROOT / "configs" / "hardware" / f"{name}.json"
    for word in (name, f"{name}.json", str(path), f" {name} "):
        monkeypatch.setenv("SPEEDKIT_HARDWARE", word)
        found = Hardware.current()
        assert found.model_dump() == hardware(name).model_dump()
        assert found.pinned == name
        assert not hardware(name).pinned


def test_without_it_plans_are_for_this_machine(here, monkeypatch):
    assert Hardware.current() == Hardware.detect() == plan().hardware
    monkeypatch.setenv("SPEEDKIT_HARDWARE", " ")
    assert Hardware.current() == Hardware.detect()
    assert not Hardware.current().pinned


@pytest.mark.parametrize(
    ("word", "message"), [("h201", "Did you mean 'h200'?"), ("T4", "Did you mean 't4'?"),
    ("typo.json", "typo.json: sytem: Extra inputs are not permitted")],
)  # fmt: skip
def test_what_is_no_machine_is_a_line_that_names_the_variable(tmp_path, monkeypatch, word, message):
    (tmp_path / "typo.json").write_text('{"sytem": "Linux"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEEDKIT_HARDWARE", word)
    model, optimizer = small()
    for attempt in (
        Hardware.current,
        plan,
        lambda: apply_speedups(model, optimizer=optimizer),
        lambda: preview(model, SpeedConfig(), [optimizer]),
        lambda: environment(torch.device("cpu")),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert message in str(caught.value)
        assert str(caught.value).startswith("SPEEDKIT_HARDWARE: ")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a100", "t4", "cpu", "apple_m2_mps"])
def test_every_plan_is_as_for_that_machine(machine, hardware, name):
    machine(name)
    model, optimizer = small()
    facts = Facts.read(model, [optimizer])
    expected = plan(SpeedConfig(), hardware(name), facts).to_dict()
    assert plan(facts=facts).to_dict() == expected
    found = preview(model, SpeedConfig(), [optimizer])
    assert found.plan.to_dict() == expected
    said = SAYS_SO.format(name)
    assert said in plan_report(found.plan).headline
    assert said in status_report(Hardware.current(), []).headline
    assert said in found.plan.to_yaml()
    assert said in code(found.plan, optimizers=[optimizer]).replace("\n# ", " ")


def test_a_device_that_is_not_here_is_named_in_one_line(here, machine):
    name, device = ("t4", "cuda") if torch.mps.is_available() else ("apple_m2_mps", "mps")
    machine(name)
    model, optimizer = small()
    with pytest.raises(SpeedKitError) as caught:
        apply_speedups(model, optimizer=optimizer)
    for word in (SAYS_SO.format(name), device, "device: cpu"):
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    with apply_speedups(model, SpeedConfig(device="cpu"), optimizer=optimizer)[1] as context:
        assert SAYS_SO.format(name) in plan_report(context).headline


def test_it_is_a_known_variable(monkeypatch, recwarn):
    monkeypatch.setenv("SPEEDKIT_HARDWARE", "t4")
    SpeedConfig()
    assert not [one for one in recwarn if "SPEEDKIT_HARDWARE" in str(one.message)]
    monkeypatch.setenv("SPEEDKIT_HARDWRE", "t4")
    with pytest.warns(UserWarning, match="Did you mean 'SPEEDKIT_HARDWARE'"):
        SpeedConfig()
