"""Inductor's private names exist, and each function of torchglue/inductor.py does what it says."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from speedkit_jupyter.machines.hardware import cxx_compiler
from speedkit_jupyter.torchglue import inductor


def test_inductor_tells_its_settings_and_where_it_keeps_code():
    assert inductor.inductor_config() is sys.modules[inductor.INDUCTOR_CONFIG]
    import_module("torch._inductor.runtime.cache_dir_utils")
    assert Path(inductor.usual_cache_folder()).name.startswith("torchinductor_")


def test_the_hooks_around_searches_come_and_go():
    cache = import_module("torch._inductor.select_algorithm").get_algorithm_selector_cache()
    before = [*cache.preprocessing_fns], [*cache.feedback_saver_fns]
    remove = inductor.on_autotuning(list, print)
    assert cache.preprocessing_fns[-1] is list
    assert cache.feedback_saver_fns[-1] is print
    remove()
    remove()
    assert (cache.preprocessing_fns, cache.feedback_saver_fns) == before
    assert not inductor.is_library_kernel(object())


@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("mkldnn", inductor.ONEDNN_KERNEL),
        pytest.param(
            "mkl",
            inductor.MKL_KERNEL,
            marks=pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="for MKL"),
        ),
    ],
)
def test_library_kernels_are_named_after_their_operators(home, name):
    assert getattr(getattr(torch.ops, home), name).__name__ == name


def test_the_options_of_vector_instructions_are_the_compilers():
    options = inductor.instruction_options()
    assert all(one.startswith("-m") for one in options)
    chosen = import_module("torch._inductor.cpu_vec_isa").x86_isa_checker()
    assert ("-mavx2" in options) == ("avx2" in chosen)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not cxx_compiler(), reason="g++ on Linux")
def test_a_kernel_is_built_with_its_bindings():
    import_module("torch._inductor.async_compile")
    assert hasattr(inductor.kernel_builder().AsyncCompile, "cpp_pybinding")
    double = 'extern "C" void kernel(float* x) { *x *= 2; }'
    code = inductor.with_bindings(["float*"], double)
    assert double in code
    inductor.forget_builds()
    x = torch.ones(1)
    inductor.kernel_library(code)().kernel(x)
    assert x.tolist() == [2.0]
