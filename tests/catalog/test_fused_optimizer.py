"""Test `fused_optimizer`, which switches existing optimizers in place."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups


def applied(model, optimizer, **values):
    return apply_speedups(model, SpeedConfig(**values), optimizer=optimizer)[1]


def stepped(make, **more):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = make(model.parameters(), lr=0.01, **more)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.RMSprop(p), "no fused kernel"),
        (lambda p: torch.optim.LBFGS(p), "no fused kernel"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "not differentiable"),
        (lambda p: torch.optim.Adam(p, fused=False), "you set fused=False"),
        (lambda p: torch.optim.Adam(p, foreach=True), "you set foreach=True"),
    ],
)
def test_what_can_not_or_should_not_be_fused_is_left_with_the_reason(make, words):
    model = nn.Linear(2, 2)
    optimizer = make(list(model.parameters()))
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with applied(model, optimizer) as context:
        assert words in context.plan["fused_optimizer"].reason
        assert optimizer.state_dict()["param_groups"] == groups


def test_gradients_and_states_of_other_strides_are_updated_like_without_the_plan():
    found = []
    for fused in (False, True):
        model = nn.ParameterList([torch.ones(3, 4)])
        optimizer, weight = torch.optim.Adam(model.parameters()), model[0]
        with applied(model, optimizer, fused_optimizer=fused):
            for _ in range(3):
                weight.grad = torch.arange(12.0).view(4, 3).t()
                optimizer.step()
                saved = optimizer.state_dict()
                saved["state"][0]["exp_avg"] = weight.grad.clone()
                optimizer.load_state_dict(saved)
        found.append(weight.detach())
    assert torch.allclose(*found)


def test_a_group_that_was_added_meanwhile_gets_the_users_setting():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam([model.weight])
    with applied(model, optimizer):
        optimizer.add_param_group({"params": [model.bias]})
        assert optimizer.param_groups[1]["fused"] is True
    assert optimizer.param_groups[1]["fused"] is None


def test_sgd_of_16_bit_parameters_stays_as_exact_as_it_was():
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters())
    with applied(model, optimizer, fused_optimizer=True) as context:
        assert "rounds 16-bit parameters" in context.plan["fused_optimizer"].reason


def test_parameters_that_train_later_begin_their_momentum_like_without_the_plan():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    plain = copy.deepcopy((net, optimizer))
    for model, own in ((net, optimizer), plain):
        model[0].requires_grad_(False)
        if own is optimizer:
            applied(model, own)
        for number in range(4):
            model[0].requires_grad_(number >= 2)
            own.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            own.step()
    torch.testing.assert_close(net.state_dict(), plain[0].state_dict())


def test_an_optimizer_stays_fused_when_a_state_is_loaded():
    model, optimizer = stepped(torch.optim.AdamW)
    saved = copy.deepcopy(optimizer.state_dict())
    with applied(model, optimizer):
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["fused"] is True
        optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None
    assert not optimizer._optimizer_load_state_dict_post_hooks
    optimizer.step()


# Compares saved states exactly, with the device and the type of each value.
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("handed_over", [True, False])
@pytest.mark.parametrize(
    ("make", "more"),
    [(torch.optim.Adam, {"foreach": True}), (torch.optim.AdamW, {"amsgrad": True}),
     (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}),
     (torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {"capturable": False})],
)  # fmt: skip
def test_state_is_kept_and_saved_as_without_a_plan_and_settings_come_back(make, more, handed_over):
    model, optimizer = stepped(make, **more)
    plain, attributes = copy.deepcopy(optimizer.state_dict()), {*vars(optimizer)}
    defaults = dict(optimizer.defaults)
    objects = {id(v) for s in optimizer.state.values() for v in s.values()}
    with applied(model, optimizer if handed_over else None, fused_optimizer=True):
        saved = optimizer.state_dict()
        assert_same({key: saved[key] for key in plain}, plain)
        make(model.parameters(), lr=0.5).load_state_dict(saved)
        optimizer.step()
        if handed_over:
            assert optimizer.param_groups[0]["fused"] is True
            assert not optimizer.param_groups[0]["foreach"]
            assert optimizer._step_supports_amp_scaling
    assert {id(v) for s in optimizer.state.values() for v in s.values()} == objects
    assert optimizer.state_dict()["param_groups"] == plain["param_groups"]
    assert ({*vars(optimizer)}, optimizer.defaults) == (attributes, defaults)
    assert not optimizer._optimizer_state_dict_post_hooks
    optimizer.step()


def test_a_state_that_an_optimizer_of_later_saves_is_as_without_a_plan():
    model = nn.Linear(4, 2)
    with apply_speedups(model, SpeedConfig(fused_optimizer=True).alone())[1]:
        optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert [group["fused"] for group in optimizer.param_groups] == [True, True]
        saved = optimizer.state_dict()
    assert [group["fused"] for group in saved["param_groups"]] == [None, None]
    assert_same(saved, optimizer.state_dict())


def parts():
    """Return a model with a sparse embedding, its optimizer, and the dense layer's optimizer."""
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    sparse = torch.optim.SparseAdam(list(model[0].parameters()))
    return model, sparse, torch.optim.AdamW(model[1].parameters())


def train(model, *optimizers):
    model(torch.randint(9, (3, 2))).square().mean().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()


def test_an_optimizer_of_dense_parameters_is_fused_next_to_one_of_sparse_ones():
    model, sparse, dense = parts()
    whole = torch.optim.SGD(model.parameters(), 0.1)
    with applied(model, [sparse, dense, whole]) as context:
        assert dense.param_groups[0]["fused"] is True
        assert whole.param_groups[0]["fused"] is None
        reason = context.plan["fused_optimizer"].reason
        assert "SparseAdam" in reason
        assert "SGD: fused kernels take no sparse gradients" in reason
        train(model, sparse, dense, whole)
    assert dense.param_groups[0]["fused"] is None


def test_one_that_is_made_later_is_judged_by_what_it_holds():
    model, _, _ = parts()
    with applied(model, None, fused_optimizer=True):
        sparse = torch.optim.SGD(model[0].parameters(), 0.1)
        dense = torch.optim.AdamW(model[1].parameters())
        train(model, sparse, dense)
        assert sparse.param_groups[0]["fused"] is None
        assert dense.param_groups[0]["fused"] is True


def test_a_gradient_that_is_sparse_already_is_seen_without_a_module_that_says_it():
    weight = nn.Parameter(torch.rand(9, 4))
    nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    model = nn.ParameterDict({"weight": weight})
    assert Facts.read(model, [torch.optim.SGD([weight], 0.1)]).optimizers[0].sparse_gradients


def test_an_optimizer_that_was_not_given_is_said_to_stay_and_a_frozen_model_waits_for_none():
    model, teacher = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    with apply_speedups(model)[1] as context:
        assert "your AdamW was not given" in context.notes["fused_optimizer"]
        assert optimizer.param_groups[0]["fused"] is None
    with apply_speedups(teacher)[1] as context:
        assert "requires gradients: apply again" in context.plan["fused_optimizer"].reason
