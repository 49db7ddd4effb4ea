"""torch's private names for tensors, operators, modes and autograd exist and work as expected."""

import functools

import pytest
import torch
from torch import nn

from speedkit_jupyter.torchglue import private


def test_onednn_multiplies():
    a, weight = torch.rand(4, 3), torch.rand(5, 3)
    found = private.linear_by_onednn()(a, weight, None, "none", [], "")
    torch.testing.assert_close(found, a @ weight.t())
    found = named(private.ONEDNN_LINEAR)(a, weight, None, "none", [], "")
    torch.testing.assert_close(found, a @ weight.t())


def test_operators_have_these_names_and_schemas():
    every = {schema.name for schema in torch._C._jit_get_all_schemas()}
    named = (f"aten::{one}" for one in (private.CAST, private.READ_A_NUMBER))
    assert {private.SOFTMAX, *named} <= every
    assert any(name.startswith(f"aten::{private.GRAD_SCALER}") for name in every)
    ones = [torch.ones(1), torch.ones(2)]
    getattr(torch, private.MULTIPLY_ALL)(ones, 2.0)
    assert torch.cat(ones).tolist() == [2.0] * 3
    schema = private.operator_schema(torch.ops.aten.add_.Tensor)
    assert (schema.name, schema.is_mutable) == ("aten::add_", True)
    assert [one.name for one in schema.arguments] == ["self", "other", "alpha"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_and_nested_tensors_have_parts():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    indices, values = private.coo_parts(sparse)
    assert (indices.tolist(), values.tolist()) == ([[0, 0]], [1.0, 2.0])


def test_a_tensors_hooks_are_in_two_dicts():
    leaf = torch.ones(1, requires_grad=True)
    assert [getattr(leaf, name) for name in private.TENSOR_HOOKS] == [None, None]
    assert not private.has_gradient_hooks(leaf)
    leaf.register_hook(print)
    assert not private.has_gradient_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(print)
    assert private.has_gradient_hooks(leaf)
    held = [list(getattr(leaf, name).values()) for name in private.TENSOR_HOOKS]
    assert held == [[print], [print]]


def test_names_are_found_and_so_are_cached_functions():
    assert private.found("torch.nn", "Linear") is nn.Linear
    owner = type("Owner", (), {"cached": functools.cache(abs), "plain": abs})
    assert private.cached_functions(owner) == [owner.cached]


def test_settings_are_told_and_come_back():
    assert private.autocast_dtype(torch.autocast("cpu", torch.bfloat16)) is torch.bfloat16
    assert private.autocast_dtype(torch.autocast("cpu", torch.bfloat16, enabled=False)) is None
    order = private.attention_order()
    private.set_attention_order(order[::-1])
    assert private.attention_order() == order[::-1]
    private.set_attention_order(order)


def named(text):
    """Return the object that a dotted name in generated code refers to."""
    return functools.reduce(getattr, text.split(".")[1:], torch)


def test_tensors_tell_of_themselves():
    tensor = torch.ones(2)
    alone = private.users_of_storage(tensor)
    view = tensor[:1]
    assert private.users_of_storage(tensor) > alone
    assert not private.is_made_of_tensors(view)
    a = torch.ones(32, 64, dtype=torch.int8)
    assert (private.int8_product(a, a.t()) == 64).all()
    assert private.base_of(a[1:]) is private.base_of(a) is a


def test_containers_are_taken_apart_and_mapped():
    value = {"a": [1, (2,)], "b": 3}
    assert private.tree_leaves(value) == private.tree_flatten(value)[0] == [1, 2, 3]
    assert private.tree_unflatten(*private.tree_flatten(value)) == value
    assert private.tree_map(str, value) == {"a": ["1", ("2",)], "b": "3"}
    names: dict = {}
    exec(private.TREE_MAP_IMPORT, names)
    assert names["tree_map_only"](int, str, value) == private.tree_map(str, value)


def test_a_mode_sees_operations_unless_modes_are_off():
    seen = []

    class Seeing(private.dispatch_mode()):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seeing():
        torch.ones(2)
        with private.without_dispatch_modes():
            torch.ones(2)
    assert len(seen) == 1
    assert private.innermost_function_mode() is None
    with torch.overrides.TorchFunctionMode() as mode:
        assert private.innermost_function_mode() is mode


def test_what_a_transform_works_on_is_told():
    told = []

    def look(x):
        told.append((private.is_transformed(x), private.is_transforming()))
        return x

    torch.func.vmap(look)(torch.ones(2))
    look(torch.ones(2))
    assert told == [(True, True), (False, False)]


def test_autograd_tells_of_itself():
    nodes = list[object]()
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: nodes.append(private.current_node()))
    (x * 2).sum().backward()
    assert nodes != [None]
    assert private.current_node() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        assert not private.can_hook_saved_tensors()
    assert private.can_hook_saved_tensors()
    with torch.profiler.profile():
        assert private.is_profiled()
    assert not private.is_profiled()


def test_writes_are_counted_where_torch_counts_them():
    weight = nn.Linear(2, 2).weight
    before = private.version(weight)
    with torch.no_grad():
        weight.add_(1)
    assert private.version(weight) == before + 1
    private.set_versions([weight], [before])
    assert private.version(weight) == before


def test_what_torch_has_moved_is_told_from_other_errors():
    for act, told in (
        (lambda: torch.no_such_name, "torch.no_such_name"),
        (lambda: torch.ones(1).no_such_name, "Tensor.no_such_name"),
        (lambda: [].no_such_name, ""),
    ):
        with pytest.raises(AttributeError) as error:
            act()
        assert private.missing_name(error.value) == told
    assert private.missing_name(ValueError()) == ""


def test_a_storage_is_bytes_and_again_what_it_was():
    typed = private.typed(torch.ones(2).untyped_storage(), torch.float32)
    storage, dtype = private.untyped(typed)
    assert private.address(storage) == private.address(private.untyped(typed)[0])
    assert private.typed(storage, dtype).dtype == torch.float32
    assert private.typed(*private.untyped(storage)) is storage


def test_a_backward_pass_calls_at_its_end():
    seen, leaf = [], torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: private.after_backward(lambda: seen.append(leaf.grad)))
    (leaf * 2).sum().backward()
    assert seen == [2]


def test_batches_of_a_loader_and_collectives_are_counted():
    assert private.collectives() == 0
    batches = iter(torch.utils.data.DataLoader([1, 2, 3]))
    next(batches)
    assert private.batches_given(batches) == 1
