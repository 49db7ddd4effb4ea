"""torch's private names: each is there, and does what its one function says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from speedkit_jupyter.support import torch_private

SOURCE = Path(torch_private.__file__).read_text(encoding="utf-8")


def test_there_are_at_most_twenty_five_of_them():
    tree = ast.parse(SOURCE)
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr[:1] == "_" and node.attr != "_C"
    }
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value)[:1] == "_" and " " not in node.value
    }
    assert len(names | words) <= 25


def test_a_precision_is_read_and_set_and_follows_its_parent():
    before = torch_private.fp32_precision("cuda", "matmul")
    torch_private.set_fp32_precision("cuda", "matmul", "tf32")
    assert torch_private.fp32_precision("cuda", "matmul") == "tf32"
    torch_private.set_fp32_precision("cuda", "matmul", before)


@pytest.mark.parametrize("library", ["cublas", "cudnn", "onednn"])
def test_the_old_settings_can_be_read(library):
    assert torch_private.allows_tf32(library) in (True, False)


@pytest.mark.parametrize("library", ["cudnn", "onednn"])
def test_the_old_settings_can_be_set(library):
    before = torch_private.allows_tf32(library)
    torch_private.allow_tf32(library, before)
    assert torch_private.allows_tf32(library) is before


def test_flags_of_backends_can_be_set_inside():
    with torch_private.flags_can_be_set():
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark


def test_onednn_multiplies_and_says_whether_it_may():
    a, weight = torch.rand(4, 3), torch.rand(5, 3)
    found = torch_private.linear_by_onednn()(a, weight, None, "none", [], "")
    torch.testing.assert_close(found, a @ weight.t())
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch_private.onednn_is_allowed()() is False


def test_kernels_of_others_are_seen_until_they_are_removed():
    library = torch.library.Library("speedkit_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    assert "speedkit_test/twice/CPU" in torch_private.kernels_of_others()
    torch_private.remove_kernels(library)
    assert "speedkit_test/twice/CPU" not in torch_private.kernels_of_others()


@pytest.mark.slow
def test_a_function_that_is_left_uncompiled_runs_as_it_is():
    def seen(x):
        return x + 1 if torch.compiler.is_compiling() else x - 1

    torch_private.leave_uncompiled(seen)
    assert torch.compile(seen)(torch.ones(2)).tolist() == [0.0, 0.0]


def test_this_cpus_features_are_words():
    assert set(torch_private.cpu_features()) <= {"avx512_bf16", "amx_bf16"}


def test_the_allocators_settings_come_back():
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("before torch 2.10")
    before = torch_private.allocator_settings()
    torch_private.set_allocator_settings("max_split_size_mb:64")
    assert "max_split_size_mb:64" in torch_private.allocator_settings()
    torch_private.set_allocator_settings(before)


def test_no_mode_sees_what_is_asked_inside():
    asked = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    with Mode(), torch_private.without_modes():
        torch.ones(2).numel()
    assert asked == []


def test_leaves_lie_in_containers_one_in_another():
    assert torch_private.leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]


def test_writes_are_counted_where_torch_counts_them():
    weight = nn.Linear(2, 2).weight
    before = torch_private.version(weight)
    with torch.no_grad():
        weight.add_(1)
    assert torch_private.version(weight) == before + 1
    with torch.inference_mode():
        assert torch_private.version(torch.ones(1)) == 0


def test_what_torch_has_moved_is_told_from_other_errors():
    for act, told in (
        (lambda: torch.no_such_name, "torch.no_such_name"),
        (lambda: torch.ones(1).no_such_name, "Tensor.no_such_name"),
        (lambda: [].no_such_name, ""),
    ):
        with pytest.raises(AttributeError) as error:
            act()
        assert torch_private.moved(error.value) == told
    assert torch_private.moved(ValueError()) == ""
