"""Names of variants."""

from __future__ import annotations

import pytest

from speedkit_jupyter import SpeedConfig, StepError
from speedkit_jupyter.measure.variants import parse, variant, words


def test_every_word_of_the_catalog_is_a_config():
    for word in words():
        assert variant(word).config is not None


def test_words_are_joined_by_plus():
    config = variant("bf16+compile:max-autotune+threads:1").config
    assert config.precision == "bf16"
    assert config.compile.mode == "max-autotune"
    assert config.threads == 1


def test_a_named_variant_changes_nothing_else():
    config = variant("bf16").config
    assert config.channels_last is False
    assert config.fused_optimizer.enabled is False
    assert config.compile.enabled is False


def test_auto_is_the_plain_config_and_baseline_has_none():
    assert [one.config for one in parse("auto,baseline,current")] == [SpeedConfig(), None, None]


def test_a_yaml_file_is_a_variant(tmp_path):
    (tmp_path / "mine.yaml").write_text("precision: bf16\n")
    found = variant(str(tmp_path / "mine.yaml"))
    assert found.name == "mine"
    assert found.config.precision == "bf16"


@pytest.mark.parametrize(
    ("text", "hint"), [("bf17", "'bf16'"), ("compil", "'compile'"), ("sdpa:flsh", "'sdpa:flash'")]
)
def test_an_unknown_word_gets_the_nearest(text, hint):
    with pytest.raises(StepError, match=hint):
        parse(f"baseline,{text}")
