"""Parse variants from words of the catalog and YAML files, and plan only the named changes."""

from dataclasses import replace

import pytest

from speedkit_jupyter import Facts, SpeedConfig, StepError, plan
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.step.variants import variant, words


def test_every_word_of_the_catalog_is_a_config_auto_the_plain_one_and_baseline_none():
    assert {"bf16", "compile", "channels_last"} <= words().keys()
    for word in words():
        assert variant(word).config is not None
    assert variant("auto").config == SpeedConfig()
    assert variant("baseline").config is variant("current").config is None


@pytest.mark.parametrize("machine", ["cpu", "t4", "h200"])
@pytest.mark.parametrize("name", ["fp16", "channels_last+fused_optimizer"])
def test_a_named_variant_changes_what_it_names_and_nothing_else(hardware, machine, name):
    """Check that no rule adds tf32, another device or cudnn_benchmark."""
    facts = Facts(device="cpu", parameters=100, convolutions=3, optimizers=(OptimizerFacts(),))
    facts = facts if machine == "cpu" else replace(facts, device="cuda:0")
    found = plan(variant(name).config, hardware(machine), facts)
    changes = {"precision", "grad_scaler"} if name == "fp16" else {*name.split("+")}
    assert {one.name for one in found if one.active} == changes
    assert all(one.reason for one in found)


def test_a_yaml_file_is_a_variant(tmp_path):
    (tmp_path / "mine.yaml").write_text("precision: bf16\n")
    found = variant(str(tmp_path / "mine.yaml"))
    assert found.name == "mine"
    assert found.config.precision == "bf16"


@pytest.mark.parametrize(
    ("text", "told"),
    [("bf17", "'bf16'"), ("compil", "'compile'"), ("sdpa:flsh", "'sdpa:flash'"),
     ("bf16+fp16", "precision twice")],
)  # fmt: skip
def test_an_unknown_word_gets_the_nearest_and_one_switch_twice_is_an_error(text, told):
    with pytest.raises(StepError, match=told):
        variant(text)
