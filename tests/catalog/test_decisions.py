"""Check tables of decisions: declined requests, values by rule or request, and code."""

from typing import Any

from decisions import SMALL, cpu, cuda, each_row, on

from speedkit_jupyter import Facts
from speedkit_jupyter.catalog.facts.model import OptimizerFacts

DECLINED: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"compile": True, "cuda_graphs": True}, "a100", SMALL, "bypasses cuda_graphs"),
    ({"compile": {"enabled": True, "backend": "cudagraphs"}}, "cpu", cpu(), "graphs need CUDA"),
    ({"compile": {"mode": "max-autotune"}}, "cpu", cpu(), "`--compile true`"),
    ({"compile": True}, "cpu", cpu(compiled="script"), "TorchScript"),
    ({"compile": True}, "cpu", cpu(compiled="wrapper"), "give the model inside it"),
    ({"grad_scaler": True}, "cpu", cpu(dtypes=("float16",)), "float16: their gradients can't"),
    ({"grad_scaler": True}, "cpu", cpu(dtypes=("float32", "complex64")), "complex64: their grad"),
    ({"malloc": True}, "a100", cuda(), "for CPUs"),
    ({"malloc": True}, "apple_m2_mps", cpu(), "glibc"),
    ({"cuda_graphs": True}, "cpu", cpu(linears=8), "the model is on cpu"),
    ({"cuda_graphs": True}, "mi300x", cuda(), "NVIDIA's GPUs record"),
    ({"cuda_graphs": True}, "a100", cuda(compiled="in place"), "reduce-overhead"),
    ({"cuda_graphs": True}, "a100", cuda(own_checkpointing="on"), "backward pass"),
    ({"cudnn_benchmark": True}, "cpu", cpu(convolutions=1), "cuDNN does not run on cpu"),
    ({"channels_last": True}, "cpu", cpu(), "no 2-D or 3-D convolution"),
    ({"device": "cuda:0"}, "a100", Facts(device="cuda:0", devices=("cuda:0", "cpu")), "is on "),
    ({"device": "cpu"}, "cpu", on("meta"), "materialize"),
    ({"inference": True}, "cpu", cpu(training=False, optimizers=(OptimizerFacts(),)), "trains"),
    ({"inference": True}, "cpu", cpu(), "model.eval()"),
    ({"inference": True}, "cpu", cpu(training=False, compiled="in place"), "compiled already"),
    ({"inference": True}, "cpu", cpu(training=False, lazy=True), "lazy"),
    ({"sdpa": "flash"}, "cpu", cpu(), "CUDA kernel"),
    ({"tf32": "high"}, "cpu_avx512_bf16", cpu(), "medium"),
    ({"tf32": "medium"}, "cpu", cpu(), "no AVX512_BF16"),
    ({"tf32": "medium"}, "a100", cuda(dtypes=("float64",)), "parameters are float64"),
    ({"tf32": "medium"}, "cpu_avx512_bf16", cpu(dtypes=("complex128",)), "are complex128"),
    ({"precision": "bf16"}, "cpu", cpu(dtypes=("float16",)), "autocast only lowers float32"),
    ({"precision": "bf16"}, "cpu", cpu(dtypes=("complex64",)), "autocast only lowers float32"),
]

# A row has an entry, a machine, facts, the value by rule, and the value offered for measuring.
BY_RULE: list[tuple[str, str, Facts, Any, Any]] = [
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
    ("tf32", "a100", cuda(flags={"float32_matmul_precision": "medium", "cudnn.allow_tf32": True}),
     "medium", None),  # the user's setting
    ("compile", "a100", cpu(), True, None),
    *(("compile", one, cpu(), False, None) for one in (
        "p100", "cpu", "rtx4050_laptop_windows", "apple_m2_mps")),
]  # fmt: skip

REQUESTED: list[tuple[dict[str, Any], str, Facts, Any]] = [
    ({"cuda_graphs": True}, "a100", SMALL, True),
    ({"tf32": "medium"}, "cpu_avx512_bf16", cpu(), "medium"),
    ({"compile": {"enabled": True, "backend": "cudagraphs"}}, "t4", cuda(), True),
]

CODES: list[tuple[dict[str, Any], str, Facts, str]] = [
    ({"compile": {"enabled": True, "backend": "aot_eager"}}, "cpu", cpu(), 'backend="aot_eager"')
]


@each_row(DECLINED, BY_RULE, REQUESTED, CODES)
def test_each_entry_decides_as_its_table_says(check, case):
    check(*case)
