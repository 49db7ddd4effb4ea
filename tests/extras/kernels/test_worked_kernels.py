"""The kernels of notebooks/kernels: right on each device that this machine has."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, check, optimization
from speedkit_jupyter.plans import own_kernels

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
SIZES = {"one": (1, 1), "odd": (7, 33), "three": (2, 5, 16), "large": (64, 1024)}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture(autouse=True)
def notebooks(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in a notebook, whose folder Python imports from."""
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    built = tmp_path_factory.getbasetemp().parent / "torch_extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))


def module(name: str) -> Any:
    return importlib.import_module(f"kernels.{name}")


def built(name: str) -> Any:
    if name == "triton":
        pytest.importorskip("triton", reason="needs triton")
    return module(f"bias_gelu_{name}").built()


def is_right(kernel: Any, device: str) -> None:
    """Values and gradients, by the judge that users have."""
    example = module("bias_gelu")
    found = check(
        kernel, example.reference, lambda size: [one.to(device) for one in example.inputs(size)],
        sizes=SIZES, budget_s=1.5,
    )  # fmt: skip
    assert found.passed, found


@needs_compiler
@pytest.mark.slow
def test_the_cpp_kernel_is_right():
    is_right(built("cpp"), "cpu")


@needs_compiler
def test_what_the_kernel_is_not_written_for_goes_to_the_reference():
    kernel, example = built("cpp"), module("bias_gelu")
    x, bias, residual = example.inputs((4, 8))
    for one in ((x.double(), bias.double(), residual.double()), (x, bias, residual[:1])):
        assert torch.equal(kernel(*one), example.reference(*one))
    across = torch.randn(8, 4).t()
    torch.testing.assert_close(kernel(across, bias, residual), x.new_tensor(0) + example.reference(
        across, bias, residual))  # fmt: skip
    assert kernel(x[:0], bias, residual[:0]).shape == (0, 8)


@needs_compiler
def test_as_an_optimization_it_trains_the_same_model():
    kernel, example = built("cpp"), module("bias_gelu")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.end = nn.Linear(8, 8), example.BiasGelu(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.end(self.linear(x), x)

    @optimization("my_bias_gelu", replaces=example.BiasGelu)
    def fused(module, x, residual):
        return kernel(x, module.bias, residual)

    try:
        model, x = Net(), torch.rand(4, 8)
        model(x).sum().backward()
        expected = [one.grad.clone() for one in model.parameters()]
        model.zero_grad()
        with apply_speedups(model, SpeedConfig(my_bias_gelu=True).alone())[1] as context:
            assert context.plan["my_bias_gelu"].active
            model(x).sum().backward()
        for one, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(one.grad, gradient)
    finally:
        own_kernels.forget("my_bias_gelu")


def test_the_triton_kernel_is_right_in_the_interpreter_where_there_is_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("it runs on the GPU")
    kernel, example = built("triton"), module("bias_gelu")
    for size in SIZES.values():
        given = example.inputs(size)
        torch.testing.assert_close(kernel(*given), example.reference(*given))


@needs_nvcc
def test_the_cuda_kernel_compiles(tmp_path):
    source = tmp_path / "kernel.cu"
    source.write_text(module("bias_gelu_cuda").SOURCE)
    subprocess.run(["nvcc", "-ptx", "-o", tmp_path / "kernel.ptx", source], check=True)
    assert "bias_gelu_kernel" in (tmp_path / "kernel.ptx").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", pytest.param("cuda", marks=needs_nvcc)])
def test_kernels_are_right_on_a_gpu(name):
    is_right(built(name), "cuda")
