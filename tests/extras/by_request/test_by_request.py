"""Entries that act by request alone: their decisions and their code."""

from __future__ import annotations

from typing import Any

import pytest
from decisions import (
    SMALL,
    check_code,
    check_declined,
    check_obeyed,
    check_rule,
    cpu,
    cuda,
    trained,
)

from speedkit_jupyter import Facts

AO = "torchao=0.18.0"
WHOLE = {"compile": {"enabled": True, "scope": "model"}}

DECLINED: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"activation_checkpointing": True}, "cpu", cpu(), "two or more blocks"),
    ({"activation_checkpointing": True}, "cpu", cpu(blocks=4, compiled="in place"), "compiled"),
    ({"activation_checkpointing": True}, "cpu", cpu(blocks=4, own_checkpointing="on"), "own grad"),
    (WHOLE | {"activation_checkpointing": True}, "t4", cuda(blocks=4), "passes by activ"),
    ({"int8": "dynamic"}, "cpu", cpu(linears=4), "pip install torchao"),
    ({"int8": "dynamic"}, "cpu torchao=0.17.0", cpu(linears=4), "torchao 0.18; this is 0.17.0"),
    ({"int8": "dynamic"}, f"h200 {AO}", trained("AdamW"), "AdamW trains this model"),
    ({"int8": "dynamic"}, f"cpu {AO}", cpu(linears=4, dtypes=("float64",)), "are float64"),
    ({"int8": "dynamic"}, f"cpu {AO}", cpu(linears=4, compiled="script"), "TorchScript"),
    ({"int8": "dynamic"}, f"v100 {AO}", SMALL, "Tesla V100-SXM2-16GB has 7.0"),
    ({"int8": "dynamic"}, f"mi300x {AO}", SMALL, "int8: weights"),
    ({"int4": True}, f"t4 {AO}", SMALL, "need compute capability 8.0; Tesla T4 has 7.5"),
    ({"int4": True}, f"mi300x {AO}", SMALL, "this is AMD Instinct MI300X"),
    ({"int4": True}, f"cpu {AO}", cpu(linears=4), "this is cpu"),
    ({"int4": True}, f"h200 {AO}", cuda(convolutions=1), "no linear layer"),
    ({"int4": True}, f"h200 {AO}", trained("SGD"), "SGD trains this model"),
    ({"int4": True, "int8": "weights"}, f"h200 {AO}", SMALL, "int8 has taken the weights' place"),
    ({"float8": True, "int8": "weights"}, f"h200 {AO}", SMALL, "int8 has taken the weights' place"),
    ({"float8": True}, f"a100 {AO}", SMALL, "8.9; NVIDIA A100-SXM4-40GB has 8.0"),
    ({"float8": True}, f"cpu {AO}", cpu(linears=4), "this is cpu"),
]


@pytest.mark.parametrize(("asked", "words", "facts", "why"), DECLINED)
def test_what_can_not_be_done_is_declined_with_the_reason(asked, words, facts, why):
    check_declined(asked, words, facts, why)


BY_RULE: list[tuple[str, str, Facts, Any, Any]] = [
    *(("int8", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "apple_m2_mps")),
    *(("int4", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "mi300x")),
    *(("float8", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "t4")),
    ("activation_checkpointing", "cpu", cpu(blocks=4), False, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "facts", "value", "offered"), BY_RULE)
def test_what_the_rule_takes_and_what_it_offers_to_measure(name, words, facts, value, offered):
    check_rule(name, words, facts, value, offered)


REQUESTED: list[tuple[dict[str, Any], str, Facts, Any]] = [
    *(({"int8": word}, f"cpu {AO}", cpu(linears=4), "dynamic") for word in (True, "on", "dynamic")),
    *(({"int4": True}, f"{one} {AO}", SMALL, True) for one in ("a100", "rtx4050_laptop_windows")),
    ({"float8": True}, f"h200 {AO}", SMALL, True),
    ({"float8": True}, f"h200 {AO}", trained("AdamW"), True),
]


@pytest.mark.parametrize(("asked", "words", "facts", "value"), REQUESTED)
def test_what_is_asked_for_is_done(asked, words, facts, value):
    check_obeyed(asked, words, facts, value)


CODES: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"int8": "dynamic"}, f"h200 {AO}", SMALL, "Int8DynamicActivationInt8WeightConfig("),
    ({"int4": True}, f"a100 {AO}", SMALL, "quantize_("),
    ({"float8": True}, f"h200 {AO}", SMALL, "convert_to_float8_training("),
]


@pytest.mark.parametrize("form", ["torch", "transformers"])
@pytest.mark.parametrize(("asked", "words", "facts", "call"), CODES)
def test_the_code_to_take_along_is_the_librarys_own_call(form, asked, words, facts, call):
    check_code(form, asked, words, facts, call)
