"""torch's private names: each is there, and does what its one function says."""

from __future__ import annotations

import ast
import multiprocessing
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import speedkit_jupyter
from speedkit_jupyter.torchglue import private as torch_private

pytestmark = pytest.mark.usefixtures("made_time")

PACKAGE = Path(speedkit_jupyter.__file__).parent
HOME = PACKAGE / "torchglue" / "private.py"
# Text that generated code and a process of its own have from there.
WRITTEN = {"torch._C._accelerator_setAllocatorSettings", "torch.ops.mkldnn._linear_pointwise"}
PRIVATE = re.compile(r"torch(?:\.[a-z_]+)*\._(?!_)\w+(?:\.\w+)*")
IMPORTED = re.compile(r"from torch[\w.]* import [^\n]*\b_[a-z]")
# All that the package uses, in torch's own packages `_C` and `_C._autograd` and beside them.
NAMES = {
    "_BaseDataLoaderIter", "_FrameAction", "_FrameExecStrategy",
    "_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings", "_cache", "_cdata",
    "_composable_state", "_get_method", "_global_", "_method_names", "_module_state_mapping",
    "_current_autograd_node", "_disable_current_modes", "_dynamo", "_functorch",
    "_get_current_dispatch_mode_stack", "_pop_mode",
    "_get_current_function_mode", "_get_sdp_priority_order", "_get_sequence_nr", "_inductor",
    "_int_mm", "_linear_pointwise", "_profiler_enabled", "_python_dispatch", "_pytree",
    "_saved_tensors_hooks_is_enabled", "_set_sdp_priority_order", "_storage_Use_Count",
    "_torchdynamo_orig_callable", "_type", "_unsafe_set_version_counter", "_version",
}  # fmt: skip


def test_no_other_file_has_private_names_of_torch():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path != HOME and (names := {*PRIVATE.findall(text), *IMPORTED.findall(text)} - WRITTEN):
            found[path.name] = names
    assert found == {}


def test_these_are_the_names_of_this_one():
    code = ast.parse(HOME.read_text(encoding="utf-8"))
    attributes = {node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute)}
    texts = [node.value for node in ast.walk(code) if isinstance(node, ast.Constant)]
    words = {word for text in texts if " " not in str(text) for word in str(text).split(".")}
    private = {name for name in attributes | words if re.fullmatch(r"_[A-Za-z]\w+", name)}
    assert private - {"_C", "_autograd"} == NAMES


def test_onednn_multiplies():
    a, weight = torch.rand(4, 3), torch.rand(5, 3)
    found = torch_private.linear_by_onednn()(a, weight, None, "none", [], "")
    torch.testing.assert_close(found, a @ weight.t())


def test_inductor_says_where_it_keeps_code_and_what_the_compiler_is_asked_for():
    assert torch_private.inductor_config().cpp.vec_isa_ok in (None, True, False)
    code, options = torch_private.instruction_probes()
    torch_private.forget_instructions()
    assert all("immintrin" in one for one in code)
    assert all(one.startswith("-m") for one in map(str.strip, options))
    import_module("torch._inductor.runtime.cache_dir_utils")
    assert Path(torch_private.usual_cache_folder()).name.startswith("torchinductor_")


def test_a_failed_cpp_compiler_says_why():
    failed = subprocess.CalledProcessError(
        1, ["g++"], b"ld: warning\nld: final link failed: full\n"
    )
    error = ValueError()
    error.__cause__ = failed
    assert str(torch_private.cause(error)) == "ld: final link failed: full"


def test_the_hooks_around_searches_come_and_go():
    cache = import_module("torch._inductor.select_algorithm").get_algorithm_selector_cache()
    before = [*cache.preprocessing_fns], [*cache.feedback_saver_fns]
    remove = torch_private.on_autotuning(list, print)
    assert cache.preprocessing_fns[-1] is list
    assert cache.feedback_saver_fns[-1] is print
    remove()
    remove()
    assert (cache.preprocessing_fns, cache.feedback_saver_fns) == before
    assert not torch_private.is_library_kernel(object())


@pytest.mark.slow
def test_what_is_compiled_in_a_block_is_noted_apart():
    def double(x):
        return x.sin() * 2

    def noted(function):
        with torch_private.compiled_code_noted() as what:
            torch.compile(function)(torch.ones(2))
            return what()

    torch._dynamo.reset()
    artifacts, libraries = noted(double)
    assert artifacts
    assert len(libraries) == 1
    torch._dynamo.reset()
    assert noted(double)[1] == libraries  # found in the cache
    assert noted(lambda x: x)[1] == []


@pytest.mark.slow
def test_a_function_that_is_left_uncompiled_runs_as_it_is():
    def seen(x):
        return x + 1 if torch.compiler.is_compiling() else x - 1

    torch_private.leave_uncompiled(seen)
    assert torch.compile(seen)(torch.ones(2)).tolist() == [0.0, 0.0]


def test_settings_come_back():
    order = torch_private.attention_order()
    torch_private.set_attention_order(order[::-1])
    assert torch_private.attention_order() == order[::-1]
    torch_private.set_attention_order(order)
    if torch_private.has_allocator_settings():  # since torch 2.10
        before = torch_private.allocator_settings()
        torch_private.set_allocator_settings("max_split_size_mb:64")
        assert "max_split_size_mb:64" in torch_private.allocator_settings()
        torch_private.set_allocator_settings(before)


def test_tensors_tell_of_themselves():
    tensor = torch.ones(2)
    alone = torch_private.users_of_storage(tensor)
    view = tensor[:1]
    assert torch_private.users_of_storage(tensor) > alone
    assert not torch_private.is_made_of_tensors(view)
    a = torch.ones(32, 64, dtype=torch.int8)
    assert (torch_private.int8_product(a, a.t()) == 64).all()


def test_containers_are_taken_apart_and_made_again():
    value = {"a": [1, (2,)], "b": 3}
    assert torch_private.tree_leaves(value) == torch_private.tree_flatten(value)[0] == [1, 2, 3]
    assert torch_private.tree_map(str, value) == {"a": ["1", ("2",)], "b": "3"}


def test_torchscript_tells_what_it_holds_and_hooks_on_all_modules_are_found():
    constant = torch.ones(2)
    scripted = torch.jit.script(nn.BatchNorm1d(2))
    assert torch_private.script_attributes(scripted)["weight"] is scripted.weight
    torch_private.set_script_attribute(scripted, "training", False)
    assert not scripted.training
    traced = torch.jit.trace(lambda x: x + constant, torch.zeros(2))
    assert any(one is constant for one in torch_private.script_constants(traced))
    hook = nn.modules.module.register_module_forward_hook(print)
    assert sum(len(one) for one in torch_private.global_hooks()) == 1
    hook.remove()


def test_a_mode_sees_operations_unless_modes_are_off():
    seen = []

    class Seeing(torch_private.dispatch_mode()):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seeing():
        torch.ones(2)
        with torch_private.without_dispatch_modes():
            torch.ones(2)
    assert len(seen) == 1
    assert torch_private.innermost_function_mode() is None
    with torch.overrides.TorchFunctionMode() as mode:
        assert torch_private.innermost_function_mode() is mode


def test_modes_that_were_left_on_end():
    with torch_private.dispatch_modes_put_back():
        torch_private.dispatch_mode()().__enter__()  # sees every operation, and refuses it
    assert torch.ones(2).sum() == 2


def test_what_a_transform_works_on_is_told():
    told = []

    def look(x):
        told.append((torch_private.is_transformed(x), torch_private.is_transforming()))
        return x

    torch.func.vmap(look)(torch.ones(2))
    look(torch.ones(2))
    assert told == [(True, True), (False, False)]


def test_autograd_tells_of_itself():
    first, nodes = torch_private.sequence_number(), []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: nodes.append(torch_private.current_node()))
    (x * 2).sum().backward()
    assert torch_private.sequence_number() > first
    assert nodes[0] is not None
    assert torch_private.current_node() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not torch_private.can_hook_saved_tensors()
    assert torch_private.can_hook_saved_tensors()
    with torch.profiler.profile():
        assert torch_private.is_profiled()
    assert not torch_private.is_profiled()


def test_a_module_is_no_longer_known_as_sharded():
    from torch.distributed import _composable_state as home

    module = nn.Linear(1, 1)
    home._module_state_mapping[module] = lambda: None
    torch_private.forget_sharding(module)
    assert module not in home._module_state_mapping
    torch_private.forget_sharding(module)


def test_a_loaders_iterator_has_its_class_and_its_workers_end():
    iterator = iter(torch.utils.data.DataLoader([1, 2], num_workers=1))
    assert isinstance(iterator, torch_private.loader_iterator())
    torch_private.end_workers(iterator)
    assert multiprocessing.active_children() == []


def test_the_compilers_tell_of_themselves():
    assert torch_private.dynamo_config() is sys.modules[torch_private.DYNAMO_CONFIG]
    assert torch_private.lookups()
    assert not torch_private.is_compiler_error(ValueError())


def test_graph_breaks_and_what_was_compiled_are_told():
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    before = len(torch_private.graph_breaks())
    compiled = torch.compile(broken, backend="eager")
    compiled(torch.ones(2))
    (one,) = torch_private.graph_breaks()[before:]
    assert "graph_break()" in one.reason
    assert one.user_stack[-1].name == "broken"
    assert torch_private.compiled_from(compiled) is broken
    assert torch_private.compiled_from(broken) is None
    assert torch_private.is_dynamo_loaded()
    config, settings = torch_private.eager_backward()
    assert all(getattr(config, name) is not value for name, value in settings.items())


def test_an_error_of_the_compilers_tells_where_it_comes_from():
    def broken(x):
        return torch._dynamo.graph_break() or x

    with pytest.raises(RuntimeError) as error:
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    file, number = torch_private.users_lines(error.value)[0]
    assert (file, number) == (__file__, broken.__code__.co_firstlineno + 1)
    assert not torch_private.lacks_compiler(error.value)
    inner = ValueError("inner")
    outer = RuntimeError("outer")
    outer.__cause__ = inner
    assert torch_private.cause(outer) is inner


@pytest.mark.slow
def test_a_compilation_is_told_and_its_error_known():
    told = []
    remove = torch_private.on_compiling(told.append, told.append)
    before = torch_private.compile_counters()["stats"]["unique_graphs"]
    noted = torch_private.compilations()[-1:]  # torch keeps the last ones
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    finally:
        remove()
    assert len(told) == 2
    assert torch_private.compile_counters()["stats"]["unique_graphs"] == before + 1
    assert torch_private.compilations()[-1:] != noted
    with pytest.raises(RuntimeError) as error:
        torch.compile(lambda x: torch._dynamo.graph_break() or x, fullgraph=True)(torch.ones(2))
    assert torch_private.is_compiler_error(error.value)
    torch_private.forget_builds()


def test_writes_are_counted_where_torch_counts_them():
    weight = nn.Linear(2, 2).weight
    before = torch_private.version(weight)
    with torch.no_grad():
        weight.add_(1)
    assert torch_private.version(weight) == before + 1
    torch_private.set_versions([weight], [before])
    assert torch_private.version(weight) == before


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
