"""The decisions of each entry, by tables: declined, by rule, by request, and as code."""

from __future__ import annotations

from typing import Any

import pytest

from speedkit_jupyter import Facts, Hardware, SpeedConfig, code, plan
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.facts.model import OptimizerFacts

AO = "torchao=0.18.0"


def on(device: str, **more: Any) -> Facts:
    return Facts(device=device, devices=(device,), parameters=100, **more)


def cpu(**more: Any) -> Facts:
    return on("cpu", **more)


def cuda(**more: Any) -> Facts:
    return on("cuda:0", **more)


def trained(name: str) -> Facts:
    return cuda(linears=4, optimizers=(OptimizerFacts(name),))


SMALL = cuda(linears=4, dtypes=("bfloat16",))
WHOLE = {"compile": {"enabled": True, "scope": "model"}}


def machine(words: str) -> Hardware:
    """`h200 torchao=0.18.0`: one that ships, with these libraries and no others."""
    name, *libraries = words.split()
    found = dict(library.split("=") for library in libraries)
    return Hardware.from_json(name).model_copy(update={"libraries": found})


DECLINED: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"activation_checkpointing": True}, "cpu", cpu(), "two or more blocks"),
    ({"activation_checkpointing": True}, "cpu", cpu(blocks=4, compiled="in place"), "compiled"),
    ({"activation_checkpointing": True}, "cpu", cpu(blocks=4, own_checkpointing="on"), "own grad"),
    (WHOLE | {"activation_checkpointing": True}, "t4", cuda(blocks=4), "passes by activ"),
    ({"compile": True, "cuda_graphs": True}, "a100", SMALL, "passes by cuda_graphs"),
    ({"compile": {"enabled": True, "backend": "cudagraphs"}}, "cpu", cpu(), "graphs need CUDA"),
    ({"compile": True}, "cpu", cpu(compiled="script"), "TorchScript"),
    ({"compile": True}, "cpu", cpu(compiled="wrapper"), "give the model inside it"),
    ({"grad_scaler": True}, "cpu", cpu(dtypes=("float16",)), "float16: their gradients can't"),
    ({"grad_scaler": True}, "cpu", cpu(dtypes=("float32", "complex64")), "complex64: their grad"),
    ({"malloc": True}, "a100", cuda(), "about CPUs"),
    ({"malloc": True}, "apple_m2_mps", cpu(), "glibc"),
    ({"cuda_graphs": True}, "cpu", cpu(linears=8), "the model is on cpu"),
    ({"cuda_graphs": True}, "mi300x", cuda(), "NVIDIA's GPUs record"),
    ({"cuda_graphs": True}, "a100", cuda(compiled="in place"), "reduce-overhead"),
    ({"cuda_graphs": True}, "a100", cuda(own_checkpointing="on"), "backward pass"),
    ({"cudnn_benchmark": True}, "cpu", cpu(convolutions=1), "cuDNN does not run on cpu"),
    ({"channels_last": True}, "cpu", cpu(), "no 2-D or 3-D convolution"),
    (
        {"device": "cuda:0"},
        "a100",
        Facts(device="cuda:0", devices=("cuda:0", "cpu")),
        "model is on",
    ),
    ({"device": "cpu"}, "cpu", on("meta"), "materialize"),
    ({"inference": True}, "cpu", cpu(training=False, optimizers=(OptimizerFacts(),)), "trains"),
    ({"inference": True}, "cpu", cpu(), "model.eval()"),
    ({"inference": True}, "cpu", cpu(training=False, compiled="in place"), "compiled already"),
    ({"inference": True}, "cpu", cpu(training=False, lazy=True), "lazy"),
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
    ({"sdpa": "flash"}, "cpu", cpu(), "CUDA kernel"),
    ({"tf32": "high"}, "cpu_avx512_bf16", cpu(), "medium"),
    ({"tf32": "medium"}, "cpu", cpu(), "no AVX512_BF16"),
    ({"tf32": "medium"}, "a100", cuda(dtypes=("float64",)), "parameters are float64"),
    ({"tf32": "medium"}, "cpu_avx512_bf16", cpu(dtypes=("complex128",)), "are complex128"),
    ({"precision": "bf16"}, "cpu", cpu(dtypes=("float16",)), "autocast only lowers float32"),
    ({"precision": "bf16"}, "cpu", cpu(dtypes=("complex64",)), "autocast only lowers float32"),
]


@pytest.mark.parametrize(("asked", "words", "facts", "why"), DECLINED)
def test_what_can_not_be_done_is_declined_with_the_reason(asked, words, facts, why):
    wanted = SpeedConfig(**{"device": facts.device, **asked} if facts.device != "meta" else asked)
    decision = plan(wanted, machine(words), facts)[next(iter(asked))]
    assert (decision.declined, decision.active) == (True, False)
    assert why in decision.reason


# Entry, machine, facts; the value by rule, and the offered value.
BY_RULE: list[tuple[str, str, Facts, Any, Any]] = [
    *(("int8", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "apple_m2_mps")),
    *(("int4", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "mi300x")),
    *(("float8", f"{one} {AO}", SMALL, False, None) for one in ("cpu", "h200", "t4")),
    ("activation_checkpointing", "cpu", cpu(blocks=4), False, None),
    ("cuda_graphs", "a100", SMALL, False, None),
    ("inference", "cpu", cpu(training=False), False, None),
    ("sdpa", "h200", cuda(), "auto", None),
    ("threads", "cpu", cpu(flags={"num_threads": 64}), 2, None),
    ("threads", "cpu", cpu(flags={"num_threads": 1}), 1, None),
    ("device", "cpu", cpu(), "cpu", None),
    ("device", "t4", cpu(), "cuda:0", None),
    ("device", "apple_m2_mps", cpu(), "mps", None),
    ("device", "arc_b580_xpu", cpu(), "xpu:0", None),
    ("device", "a100", on("cuda:1"), "cuda:1", None),
    ("cudnn_benchmark", "t4", cuda(convolutions=2), False, True),
    ("cudnn_benchmark", "t4", cuda(convolutions=2, flags={"cudnn.benchmark": True}), True, None),
    ("cudnn_benchmark", "t4", cuda(convolutions=2, flags={"cudnn.deterministic": True}), False,
     None),
    ("cudnn_benchmark", "t4", cuda(), False, None),
    ("channels_last", "t4", cpu(convolutions=3), False, True),
    ("channels_last", "a100", cpu(convolutions=3), False, True),
    ("channels_last", "p100", cpu(convolutions=3), False, None),
    ("channels_last", "cpu", cpu(convolutions=3), False, True),
    ("channels_last", "cpu", cpu(), False, None),
    *(("tf32", one, cuda(), "high", None) for one in ("a100", "h200")),
    *(("tf32", one, cuda(), "highest", None) for one in ("t4", "p100", "mi300x")),
    ("tf32", "cpu_avx512_bf16", cpu(), "highest", None),
    ("compile", "a100", cpu(), True, None),
    *(("compile", one, cpu(), False, None) for one in (
        "p100", "cpu", "rtx4050_laptop_windows", "apple_m2_mps")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "facts", "value", "offered"), BY_RULE)
def test_what_the_rule_takes_and_what_it_offers_to_measure(name, words, facts, value, offered):
    decision = plan(SpeedConfig(), machine(words), facts)[name]
    assert (decision.value, decision.worth_measuring) == (value, offered)
    assert not decision.declined
    if offered is None and decision.value == named(name).none:
        assert not decision.active


REQUESTED: list[tuple[dict[str, Any], str, Facts, Any]] = [
    *(({"int8": word}, f"cpu {AO}", cpu(linears=4), "dynamic") for word in (True, "on", "dynamic")),
    *(({"int4": True}, f"{one} {AO}", SMALL, True) for one in ("a100", "rtx4050_laptop_windows")),
    ({"float8": True}, f"h200 {AO}", SMALL, True),
    ({"float8": True}, f"h200 {AO}", trained("AdamW"), True),
    ({"cuda_graphs": True}, "a100", SMALL, True),
    ({"tf32": "medium"}, "cpu_avx512_bf16", cpu(), "medium"),
    ({"compile": {"enabled": True, "backend": "cudagraphs"}}, "t4", cuda(), True),
]


@pytest.mark.parametrize(("asked", "words", "facts", "value"), REQUESTED)
def test_what_is_asked_for_is_done(asked, words, facts, value):
    decision = plan(SpeedConfig(**asked), machine(words), facts)[next(iter(asked))]
    assert (decision.value, decision.active, decision.declined) == (value, True, False)


CODES: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"int8": "dynamic"}, f"h200 {AO}", SMALL, "Int8DynamicActivationInt8WeightConfig("),
    ({"int4": True}, f"a100 {AO}", SMALL, "quantize_("),
    ({"float8": True}, f"h200 {AO}", SMALL, "convert_to_float8_training("),
    ({"compile": {"enabled": True, "backend": "aot_eager"}}, "cpu", cpu(), 'backend="aot_eager"'),
]


@pytest.mark.parametrize("form", ["torch", "transformers"])
@pytest.mark.parametrize(("asked", "words", "facts", "call"), CODES)
def test_the_code_to_take_along_is_the_librarys_own_call(form, asked, words, facts, call):
    text = code(plan(SpeedConfig(**asked).alone(), machine(words), facts), form=form)
    assert call in text
    compile(text, form, "exec")
