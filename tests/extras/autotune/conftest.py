"""Inductor's choices for an H200 whose properties it is handed: lowered, and nothing run."""

from __future__ import annotations

import contextlib
import itertools
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from speedkit_jupyter.extras import autotune

INDUCTOR = "torch._inductor"
PROPERTIES = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)


class Config:
    """Triton's configuration, which a torch for CPUs comes without."""

    def __init__(self, kwargs, num_warps=4, num_stages=2, **more):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


@pytest.fixture
def lowered():
    """Has Inductor choose kernels for a product on an H200; kernels are generated, not loaded."""
    hints = import_module(f"{INDUCTOR}.runtime.hints")
    triton = import_module(f"{INDUCTOR}.template_heuristics.triton")
    handed = hints.DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
    numbers = itertools.count()
    import_module(f"{INDUCTOR}.select_algorithm").get_algorithm_selector_cache()  # of this machine

    def loaded(*_, **__):
        return SimpleNamespace(key=f"kernel{next(numbers)}", __file__="kernel.py")

    given = {
        "torch.cuda.is_available": lambda: True,
        # A torch that is built for CUDA would start the driver.
        "torch._subclasses.fake_tensor.init_gpu_context": lambda *_: None,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
        f"{INDUCTOR}.select_algorithm.PyCodeCache.load": loaded,
    }
    with contextlib.ExitStack() as stack:
        for name, value in given.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(
            mock.patch.object(hints.DeviceProperties, "create", return_value=handed)
        )
        stack.enter_context(mock.patch.object(triton, "TritonConfig", Config))
        settings = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
        stack.enter_context(torch._inductor.config.patch(**settings, compile_threads=1))
        yield _lowered
    autotune.off()


def _lowered(function, shapes, dtype=torch.bfloat16):
    """Lower one product of fake tensors, and return the kernels that Inductor may time.

    Timing is put off until kernels are fused, which is not reached.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.empty(*shape, dtype=dtype, device="cuda") for shape in shapes]
        graph = make_fx(function)(*inputs)
    numbers = []
    choose = import_module(f"{INDUCTOR}.select_algorithm").get_algorithm_selector_cache()

    def look(choices):
        numbers.append(choices)
        return choices[:1]

    choose.preprocessing_fns.append(look)
    try:
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode):
            lowering.run(*inputs)
    finally:
        choose.preprocessing_fns.remove(look)
    return numbers[0]
