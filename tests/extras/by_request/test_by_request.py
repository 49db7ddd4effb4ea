"""Test the decisions and the code of catalog entries that act only on request."""

from typing import Any

from decisions import SMALL, cpu, cuda, each_row, trained

from speedkit_jupyter import Facts

AO = "torchao=0.18.0"
WHOLE = {"compile": {"enabled": True, "scope": "model"}}

DECLINED: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"activation_checkpointing": True}, "cpu", cpu(), "two or more blocks"),
    ({"activation_checkpointing": True}, "cpu", cpu(blocks=4, compiled="in place"), "compiled"),
    ({"activation_checkpointing": True}, "cpu", cpu(blocks=4, own_checkpointing="on"), "own grad"),
    (WHOLE | {"activation_checkpointing": True}, "t4", cuda(blocks=4), "bypasses activ"),
    ({"int8": "dynamic"}, "cpu", cpu(linears=4), "pip install torchao"),
    ({"int8": "dynamic"}, "cpu torchao=0.17.0", cpu(linears=4), "torchao 0.18; this is 0.17.0"),
    ({"int8": "weights"}, "cpu torchao=0.9.0", cpu(linears=4), "torchao 0.10; this is 0.9.0"),
    ({"int4": True}, "a100 torchao=0.10.0", SMALL, "torchao 0.18; this is 0.10.0"),
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
    ({"int4": True, "int8": "weights"}, f"h200 {AO}", SMALL, "int8 has replaced the weights"),
    ({"float8": True, "int8": "weights"}, f"h200 {AO}", SMALL, "int8 has replaced the weights"),
    ({"float8": True}, f"a100 {AO}", SMALL, "8.9; NVIDIA A100-SXM4-40GB has 8.0"),
    ({"float8": True}, f"cpu {AO}", cpu(linears=4), "this is cpu"),
]

BY_RULE: list[tuple[str, str, Facts, Any, Any]] = [
    *(("int8", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "apple_m2_mps")),
    *(("int4", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "mi300x")),
    *(("float8", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "t4")),
    ("activation_checkpointing", "cpu", cpu(blocks=4), False, None),
]  # fmt: skip

REQUESTED: list[tuple[dict[str, Any], str, Facts, Any]] = [
    *(({"int8": word}, f"cpu {AO}", cpu(linears=4), "dynamic") for word in (True, "on", "dynamic")),
    *(({"int4": True}, f"{one} {AO}", SMALL, True) for one in ("a100", "rtx4050_laptop_windows")),
    ({"float8": True}, f"h200 {AO}", SMALL, True),
    ({"float8": True}, f"h200 {AO}", trained("AdamW"), True),
]

CODES: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"int8": "dynamic"}, f"h200 {AO}", SMALL, "Int8DynamicActivationInt8WeightConfig("),
    ({"int4": True}, f"a100 {AO}", SMALL, "quantize_("),
    ({"float8": True}, f"h200 {AO}", SMALL, "convert_to_float8_training("),
]


@each_row(DECLINED, BY_RULE, REQUESTED, CODES)
def test_each_entry_decides_as_its_table_says(check, case):
    check(*case)
