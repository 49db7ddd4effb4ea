"""Test `tf32`, which sets the precision inside float32 products."""

import pytest
import torch

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups
from speedkit_jupyter.catalog import named
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.gemm_rates import GemmRates


def _is_mixed() -> bool:
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("mixed", [False, True])
def test_it_is_set_readable_and_put_back_also_from_mixed_apis(machine, mixed, changing_flags):
    machine("cpu_avx512_bf16")
    if mixed:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert _is_mixed()
    before = flags.snapshot()
    config = SpeedConfig(tf32="medium", precision="fp32", threads=torch.get_num_threads())
    kept = torch.nn.Linear(2, 2)
    with apply_speedups(kept, config)[1]:
        assert torch.get_float32_matmul_precision() == "medium"
        assert not _is_mixed()
    assert flags.diff(before, flags.snapshot()) == ()
    assert _is_mixed() == mixed


@pytest.mark.parametrize(("convolutions", "linears", "is_tried"), [(20, 1, False), (1, 16, True)])
def test_convolutions_try_no_library_of_matrix_products(hardware, convolutions, linears, is_tried):
    here = hardware("cpu_avx512_bf16")
    rates = GemmRates(blas=1e11, onednn=2e11)
    here = here.model_copy(update={"cpu": here.cpu.model_copy(update={"gemm": rates})})
    facts = Facts(convolutions=convolutions, linears=linears)
    assert named("tf32").candidates(here, facts) == ("medium",) * is_tried
    assert named("gemm").candidates(here, facts) == ("onednn",) * is_tried
