"""The configs of the project: each loads, says why, and is planned as it says."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from speedkit_jupyter import Facts, SpeedConfig, machines, plan
from speedkit_jupyter.catalog import CATALOG, named
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.plans.config import ALONE

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
    assert set(yaml.safe_load(text)) <= {ALONE, *(entry.name for entry in CATALOG)}
    config = loaded(name)
    for machine in machines.names():
        assert all(decision.reason for decision in plan(config, hardware(machine), FACTS))


def _line(name: str, value: object, words: str) -> str:
    shown = yaml.safe_dump(value).splitlines()[0]
    return f"{f'{name}: {shown}':<34}# {words}"


def auto() -> str:
    """Return the text of auto.yaml: every option of the catalog with its default and its words."""
    lines = [
        "# Every option, all decided by SpeedKit. `%speedkit report` shows the reasons.",
        _line(ALONE, False, "true: auto options stay unchanged"),
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
