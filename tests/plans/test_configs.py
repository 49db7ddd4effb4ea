"""The configs of the project: each loads, says why, and is planned as it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from speedkit_jupyter import Facts, SpeedConfig, machines, plan
from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.plans.sources import ALONE

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
FACTS = Facts(
    parameters=11_000_000, convolutions=20, linears=1, blocks=8, optimizers=(OptimizerFacts(),)
)
each = pytest.mark.parametrize("name", NAMES)


def loaded(name: str) -> SpeedConfig:
    return SpeedConfig.from_yaml(CONFIGS / f"{name}.yaml")


@each
def test_each_says_what_it_is_for_and_is_planned_on_every_machine(hardware, name):
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    config = loaded(name)
    for machine in machines.names():
        assert all(decision.reason for decision in plan(config, hardware(machine), FACTS))


@each
def test_each_names_options_of_the_catalog_by_their_own_names(name):
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert set(values) <= {ALONE, *(entry.name for entry in CATALOG)}


def _line(name: str, value: object, words: str) -> str:
    shown = yaml.safe_dump(value).splitlines()[0]
    return f"{f'{name}: {shown}':<34}# {words}"


def auto() -> str:
    """What auto.yaml is: every option of the catalog as it is without a word, and its words."""
    lines = [
        "# Everything that SpeedKit decides by itself. `%speedkit report` has each reason.",
        _line(ALONE, False, "true: what is auto is left as it is"),
    ]
    for entry in CATALOG:
        if not entry.fields:
            words = SpeedConfig.model_fields[entry.name].description
            lines.append(_line(entry.name, entry.default, str(words)))
            continue
        lines.append(f"{entry.name}:")
        for name, info in entry.fields.items():
            lines.append(_line(f"  {name}", info.default, str(info.description)))
    return "\n".join(lines) + "\n"


def test_auto_has_every_option_with_its_words(request):
    """`--regenerate-plans` writes it anew."""
    if request.config.getoption("--regenerate-plans"):
        (CONFIGS / "auto.yaml").write_text(auto(), encoding="utf-8")
    assert (CONFIGS / "auto.yaml").read_text(encoding="utf-8") == auto()


def test_auto_is_what_is_decided_without_a_config(hardware):
    for machine in machines.names():
        plans = [
            plan(config, hardware(machine), FACTS) for config in (SpeedConfig(), loaded("auto"))
        ]
        one, other = ([(d.name, d.value, d.active) for d in decided] for decided in plans)
        assert one == other


def test_exact_turns_on_nothing_that_rounds_anywhere(hardware):
    for machine in machines.names():
        for decision in plan(loaded("exact"), hardware(machine), FACTS):
            assert not decision.active or named(decision.name).effect is Effect.EXACT


MEANT_FOR = {
    "colab_t4": "t4", "kaggle_t4x2": "t4", "training_max": "a100", "inference_max": "a100",
    "low_memory": "t4", "exact": "a100",
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT_FOR)
def test_where_it_is_meant_for_nothing_is_declined(hardware, name):
    facts = FACTS if name != "exact" else FACTS.moved("cuda:0")
    if name == "inference_max":
        facts = replace(facts, optimizers=(), training=False)
    found = plan(loaded(name), hardware(MEANT_FOR[name]), facts)
    assert [decision.name for decision in found if decision.declined] == []


def test_on_a_plain_cpu_training_max_says_what_it_can_not_have(hardware):
    found = plan(loaded("training_max"), hardware("cpu"), FACTS)
    assert {d.name for d in found if d.declined} == {"tf32", "cudnn_benchmark"}
    assert {d.name for d in found if d.active} == {"channels_last", "fused_optimizer", "compile"}
