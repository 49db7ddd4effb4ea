"""Private attributes of modules, optimizers, scalers and loaders exist and work as expected."""

import multiprocessing

import pytest
import torch
from torch import nn

from speedkit_jupyter.torchglue import modules


def test_tables_are_a_modules_own_parts():
    module = nn.BatchNorm1d(2)
    module.part = nn.Identity()
    assert modules.parameter_table(module) is vars(module)[modules.PARAMETERS]
    assert modules.buffer_table(module) is vars(module)[modules.BUFFERS]
    assert modules.module_table(module) is vars(module)[modules.MODULES]
    other = nn.Parameter(torch.zeros(2))
    modules.parameter_table(module)["weight"] = other
    modules.buffer_table(module)["running_mean"] = other.detach()
    modules.module_table(module)["part"] = module.part
    assert module.weight is other
    assert module.running_mean.tolist() == [0.0, 0.0]
    assert [name for name, _ in module.named_children()] == ["part"]


def test_a_call_in_the_slot_takes_the_place_of_the_plain_one():
    module = nn.Identity()
    vars(module)[modules.COMPILED_CALL] = lambda x: x + 1
    assert module(1) == 2
    module.register_forward_hook(lambda *given: 7)
    assert modules.plain_call(module)(1) == 7
    assert modules.module_table(torch.compile(module))[modules.COMPILED_CHILD] is module
    seen = []
    vars(module)[modules.CAST] = vars(module)[modules.LOAD] = lambda *given: seen.append(given)
    _ = module.float(), module.load_state_dict({})
    assert len(seen) == 2


def test_hooks_are_in_tables_and_can_be_taken_off():
    module = nn.Linear(1, 1)
    module.register_full_backward_hook(lambda *given: None)
    module.register_full_backward_pre_hook(lambda *given: None)
    before = module.register_forward_pre_hook(lambda *given: None, with_kwargs=True)
    after = module.register_forward_hook(lambda *given: 7, with_kwargs=True)
    filled = {name for name, held in modules.hook_tables(module).items() if held}
    assert filled > {*modules.FORWARD_HOOKS, *modules.BACKWARD_HOOKS}
    for kind, handle in zip(modules.FORWARD_HOOKS, (after, before), strict=True):
        assert callable(modules.pop_hook(module, kind, handle.id))
    filled = {name for name, held in modules.hook_tables(module).items() if held}
    assert filled == {*modules.BACKWARD_HOOKS}


def test_a_fused_optimizer_has_these_attributes():
    parameters = [nn.Parameter(torch.ones(1))]
    plain, fused = (torch.optim.SGD(parameters, fused=one) for one in (False, True))
    assert vars(fused).keys() - vars(plain).keys() == {*modules.FUSED_ATTRIBUTES}
    assert not getattr(plain, modules.SCALES_IN_STEP, False)
    assert getattr(fused, modules.SCALES_IN_STEP)


def test_a_scaler_keeps_a_record_of_each_optimizer():
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert modules.scaler_states(scaler)[id(optimizer)]["stage"].name == "UNSCALED"


def test_a_module_is_no_longer_known_as_sharded():
    from torch.distributed import _composable_state as home

    module = nn.Linear(1, 1)
    home._module_state_mapping[module] = lambda: None
    modules.forget_sharding(module)
    assert module not in home._module_state_mapping
    modules.forget_sharding(module)


def test_a_loader_lets_its_iterator_go_and_workers_end():
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert isinstance(first, modules.loader_iterator())
    assert modules.detach_iterator(loader) is first
    assert modules.detach_iterator(loader) is None
    modules.end_workers(first)
    assert iter(loader) is not first
    modules.end_workers(modules.detach_iterator(loader))
    assert multiprocessing.active_children() == []


def test_a_loaders_iterator_holds_the_users_parts():
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    held = [getattr(iter(loader), name) for name in modules.USERS_PARTS]
    assert held == [loader.dataset, loader.batch_sampler, loader.collate_fn]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize("drawn", [0, 1])
def test_a_loaders_iterator_has_a_twin_with_the_same_batches(drawn):
    iterator = iter(torch.utils.data.DataLoader([1, 2, 3], batch_size=2))
    for _ in range(drawn):
        next(iterator)
    twin = modules.same_epoch(iterator)
    expected = [[1, 2], [3]][drawn:]
    assert [batch.tolist() for batch in twin] == expected
    assert [batch.tolist() for batch in iterator] == expected
    assert modules.same_epoch(iter(torch.utils.data.DataLoader(Stream()))) is None
    assert modules.same_epoch(iter([1])) is None


def test_attributes_and_constants_of_torchscript_are_found():
    constant = torch.ones(2)
    scripted = torch.jit.script(nn.BatchNorm1d(2))
    assert modules.script_attributes(scripted)["weight"] is scripted.weight
    modules.set_script_attribute(scripted, "training", False)
    assert not scripted.training
    traced = torch.jit.trace(lambda x: x + constant, torch.zeros(2))
    assert any(one is constant for one in modules.script_constants(traced))


def test_hooks_on_all_modules_are_found():
    hook = nn.modules.module.register_module_forward_hook(print)
    assert sum(len(one) for one in modules.global_hooks()) == 1
    assert modules.has_global_hooks()
    hook.remove()
    assert not modules.has_global_hooks()
