"""The kernels of notebooks/kernels compute the right values on each device of this machine."""

import importlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from speedkit_jupyter import check

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
SIZES = {"one": (1, 1), "odd": (7, 33), "three": (2, 5, 16), "large": (64, 1024)}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.fixture(autouse=True)
def notebooks(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import from the notebooks' folder, and share built extensions with other test processes."""
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
    """Assert that check() passes the kernel's values and gradients."""
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
