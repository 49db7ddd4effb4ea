"""Plans are pinned in decisions.yaml, which `pytest tests/plans --regenerate-plans` writes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from speedkit_jupyter import Decision, Facts, Hardware, Plan, SpeedConfig, machines, plan
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.report.plan_report import plan_report

PINNED = Path(__file__).with_name("decisions.yaml")
MACHINES = machines.names()
FACTS = Facts(
    parameters=11_000_000, convolutions=20, linears=1, optimizers=(OptimizerFacts("AdamW"),)
)


def decided(machine: Hardware, facts: Facts = FACTS, **wishes: Any) -> Plan:
    return plan(SpeedConfig(**wishes), machine, facts)


def decisions(name: str, hardware) -> list[dict[str, Any]]:
    """Return the decisions about one optimization, each with the machines that get it."""
    groups: list[dict[str, Any]] = []
    for machine in MACHINES:
        said = decided(hardware(machine)).to_dict()[name]
        found = {key: value for key, value in said.items() if value not in (None, False)}
        alike = next((one for one in groups if one["decision"] == found), None)
        if alike is None:
            groups.append({"machines": [machine], "decision": found})
        else:
            alike["machines"].append(machine)
    return groups


def test_the_auto_plans_are_the_pinned_ones(hardware, request: pytest.FixtureRequest) -> None:
    table = {entry.name: decisions(entry.name, hardware) for entry in CATALOG}
    if request.config.getoption("--regenerate-plans"):
        text = yaml.safe_dump(table, sort_keys=False, width=1000, default_flow_style=None)
        PINNED.write_text(text, encoding="utf-8")
    assert table == yaml.safe_load(PINNED.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("machine", "offered"), [("cpu", {"channels_last": True}),
    ("cpu_avx512_bf16", {"precision": "bf16", "channels_last": True}),
    ("mi300x", {"precision": "bf16", "cudnn_benchmark": True}),
    ("t4", {"channels_last": True, "cudnn_benchmark": True})],
)  # fmt: skip
def test_what_may_be_a_loss_waits_for_measuring_and_is_offered(hardware, machine, offered) -> None:
    found = decided(hardware(machine))
    assert found.worth_measuring == offered
    assert not any(found[name].active for name in offered)
    text = " ".join(plan_report(found).to_text().split())
    words = [name if value is True else f"{name} {value}" for name, value in offered.items()]
    assert text.count(f"Worth measuring here: {', '.join(words)}: `%%speedbench --tune`") == 1


def test_what_was_asked_for_or_is_left_by_a_config_alone_is_not_offered(hardware) -> None:
    machine = hardware("cpu_avx512_bf16")
    asked = decided(machine, precision="bf16", channels_last=False)
    assert asked.worth_measuring == {}
    assert asked["precision"].active
    assert plan(SpeedConfig(fused_optimizer=True).alone(), machine, FACTS).worth_measuring == {}


@pytest.mark.parametrize(
    ("machine", "wish", "value", "active", "reason"),
    [
        ("t4", {"precision": "bf16"}, "fp16", True, "the nearest that works is fp16"),
        ("t4", {"sdpa": "flash"}, "efficient", True, "needs compute capability 8.0"),
        ("t4", {"device": "cuda:1"}, "cpu", False, "this machine has no cuda:1 (found: Tesla T4)"),
        ("rtx4050_laptop_windows", {"compile": True}, False, False, "pip install triton-windows"),
    ],
)
def test_what_a_machine_lacks_has_a_reason(hardware, machine, wish, value, active, reason) -> None:
    (name,) = wish
    decision = decided(hardware(machine), **wish)[name]
    assert (decision.value, decision.active, decision.declined) == (value, active, True)
    assert decision.source == "user"
    assert reason in decision.reason


wishes = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
        "tf32": st.sampled_from(["highest", "high", "medium"]),
        "sdpa": st.sampled_from(["flash", "efficient", "cudnn", "math"]),
        "fused_optimizer": st.booleans() | st.just({"enabled": True}),
        "compile": st.booleans() | st.just({"enabled": True, "mode": "max-autotune"}),
        "threads": st.integers(1, 64),
        "device": st.sampled_from(["cpu", "cuda", "mps"]),
    },
)


def outcome(decision: Decision) -> tuple[Any, ...]:
    return decision.name, decision.value, decision.active, dict(decision.details)


@examples(60)
@given(machine=st.sampled_from(MACHINES), wish=wishes)
def test_a_plan_as_config_gives_the_same_plan_again(machine: str, wish: dict[str, Any]) -> None:
    hardware = Hardware.from_json(machine)
    first = decided(hardware, **wish)
    again = plan(first.to_config(), hardware, FACTS)
    assert list(map(outcome, again)) == list(map(outcome, first))


@pytest.mark.parametrize("name", MACHINES)
def test_a_saved_plan_loads_as_config_with_its_reasons_beside(hardware, tmp_path, name):
    found = decided(hardware(name), compile={"enabled": True, "mode": "max-autotune"})
    path = tmp_path / "plan.yaml"
    text = found.to_yaml()
    path.write_text(text, encoding="utf-8")
    assert SpeedConfig.from_yaml(path) == found.to_config()
    for decision in found:
        assert f"# {decision.name}: {decision.reason}" in text
