"""fused_kernels: Liger's patches of one model, which leave nothing behind.

What the kernels compute is tested on a CUDA device.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from language_models import FAMILIES, batch, language_model
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups
from speedkit_jupyter.catalog import fused_kernels
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.fused_kernels import FusedKernels
from speedkit_jupyter.search.candidates import candidates

LLAMA = Facts(device="cuda:0", parameters=100, linears=9, model_type="llama")
HERE = Hardware.detect()
IS_INSTALLED = "liger-kernel" in HERE.libraries and "triton" in {
    name.partition(".")[0] for name in sys.modules
} | ({"triton"} if __import__("importlib.util").util.find_spec("triton") else set())
installed = pytest.mark.skipif(not IS_INSTALLED, reason="needs liger-kernel and triton")
ON = Decision("fused_kernels", True, "as asked", active=True)


def with_liger(machine: Hardware, version: str = "0.8.5", **more: Any) -> Hardware:
    return machine.model_copy(update={"libraries": {"liger-kernel": version}, **more})


def looks(model: nn.Module) -> list:
    """What lies on each module, and its class."""
    return [(type(part), dict(part.__dict__)) for part in model.modules()]


def test_a_search_tries_it_on_nvidias_gpus_for_such_models(hardware):
    for machine, facts, tried in (
        ("h200", LLAMA, True),
        ("h200", Facts(device="cuda:0"), False),
        ("mi300x", LLAMA, False),
    ):
        names = [one.name for one in candidates(with_liger(hardware(machine)), facts)]
        assert ("fused_kernels" in names) == tried


def test_the_type_of_a_model_is_transformers_own_word():
    pytest.importorskip("transformers")
    assert Facts.read(language_model("llama")).model_type == "llama"
    own = nn.Linear(2, 2)
    own.config = type("Config", (), {"model_type": "llama"})
    assert Facts.read(own).model_type == ""


@installed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
def test_nothing_of_the_patch_is_left_on_model_classes_and_modules(family, ending):
    model = language_model(family)
    assert model.config.model_type in fused_kernels.TYPES
    library = sys.modules[type(model).__module__]
    classes = {n: dict(vars(v)) for n, v in vars(library).items() if isinstance(v, type)}
    names, before, torchs = dict(vars(library)), looks(model), dict(vars(nn))
    try:
        with FusedKernels().applied(ON, Target(model)):
            assert "modules by Liger" in str(FusedKernels().observe(Target(model)))
            assert dict(vars(library)) == names
            if ending:
                raise ending
    except (ValueError, KeyboardInterrupt):
        pass
    assert looks(model) == before
    assert dict(vars(library)) == names
    assert dict(vars(nn)) == torchs
    assert {n: dict(vars(v)) for n, v in vars(library).items() if isinstance(v, type)} == classes


@installed
def test_nothing_is_kept_alive_by_it():
    model = language_model("llama")
    block = FusedKernels().applied(ON, Target(model))
    block.__enter__()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    block.__exit__(None, None, None)


@pytest.mark.gpu
@installed
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gives_the_same_loss_and_gradients(family):
    model, words = language_model(family).to("cuda"), batch()
    words = {name: tensor.to("cuda") for name, tensor in words.items()}
    plain = copy.deepcopy(model)
    expected = plain(**words).loss
    expected.backward()
    with FusedKernels().applied(ON, Target(model)):
        found = model(**words).loss
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@installed
def test_it_is_applied_on_a_gpu():
    model = language_model("llama").cuda()
    with apply_speedups(model, SpeedConfig(fused_kernels=True).alone())[1] as context:
        assert context.plan["fused_kernels"].active
        model(**{name: tensor.cuda() for name, tensor in batch().items()}).loss.backward()
