"""Test `channels_last`, the layout of convolution weights, gradients and optimizer state."""

import copy

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, plan


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten())


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("handed_over", [True, False])
def test_gradients_and_optimizer_state_have_the_layout_of_their_weight(fused, handed_over):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, fused=fused)
    config = SpeedConfig(channels_last=True, fused_optimizer=False, precision="fp32")
    weight = model[0].weight
    for _ in range(2):  # the second plan finds existing optimizer state
        with apply_speedups(model, config, optimizer=optimizer if handed_over else None)[1]:
            model(torch.rand(2, 3, 5, 5)).pow(2).mean().backward()
            optimizer.step()
            assert weight.is_contiguous(memory_format=torch.channels_last)
            state = [one for one in optimizer.state[weight].values() if one.dim() == 4]
            assert {one.stride() for one in (*state, weight.grad)} == {weight.stride()}
        assert all(one.is_contiguous() for one in (*state, weight, weight.grad))


def test_results_of_the_model_are_contiguous_and_weights_can_be_trained_as_without_a_plan():
    model = nn.Conv2d(3, 4, 3)
    with torch.inference_mode(), apply_speedups(model, SpeedConfig(channels_last=True))[1]:
        assert not model.weight.is_inference()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        assert model(torch.rand(2, 3, 5, 5)).is_contiguous()


def test_memory_that_is_shared_stays_shared():
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(5)))
    model[1].weight = nn.Parameter(model[0].weight.detach())  # two parameters share memory
    model[2].share_memory()  # as for training in several processes
    flat = torch.zeros(200)
    model[3].weight.data = flat[:81].view(3, 3, 3, 3)
    model[4].weight.grad = flat[81:162].view(3, 3, 3, 3)
    places = [part.weight.data_ptr() for part in model]
    with apply_speedups(model, SpeedConfig(channels_last=True))[1] as context:
        assert "5 convolutions as before" in context.plan["channels_last"].reason
        assert [part.weight.data_ptr() for part in model] == places
        assert all(part.weight.is_contiguous() for part in model)


@pytest.mark.parametrize(
    ("make", "word"), [(torch.optim.LBFGS, "LBFGS"), (torch.optim.SGD, "GroupNorm")]
)
def test_what_torch_breaks_in_this_layout_is_declined(make, word):
    model = network().insert(1, nn.GroupNorm(2, 4))
    model[0].requires_grad_(False)
    facts = Facts.read(model, [make(model[3].parameters())])
    assert word in plan(SpeedConfig(channels_last=True), facts=facts)["channels_last"].reason


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_state_that_is_loaded_meanwhile_follows_the_layout(make):
    more = {"momentum": 0.9} if make is torch.optim.SGD else {"eps": 1e-3}
    x = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))

    def built():
        model = network()
        return model, make(model.parameters(), lr=0.05, fused=True, **more)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    plain, plain_optimizer = built()
    step(plain, plain_optimizer)
    saved = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
    step(plain, plain_optimizer)

    model, optimizer = built()
    with apply_speedups(model, SpeedConfig(channels_last=True, precision="fp32"))[1]:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        step(model, optimizer)
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-5, atol=1e-6)
    assert not optimizer._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("follower", [
    lambda weight: weight.detach(), lambda weight: weight.detach().numpy(),
    lambda weight: weight.detach().view(-1), lambda weight: nn.Parameter(weight.data),
], ids=["detached", "array", "view", "tied"])  # fmt: skip
def test_what_follows_a_weight_follows_it_afterwards_too(follower):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    kept = follower(model[0].weight)
    with apply_speedups(model, SpeedConfig(channels_last=True).alone())[1] as context:
        assert "1 convolution as before" in context.notes["channels_last"]
        assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        model[0].weight.fill_(3)
    assert bool((torch.as_tensor(kept) == 3).all())


@pytest.mark.parametrize("entry", ["channels_last", "fused_optimizer"])
@pytest.mark.parametrize("change", [
    lambda model: model.double(),
    lambda model: model.load_state_dict(network().state_dict()),
    lambda model: model.load_state_dict(network().state_dict(), assign=True),
    lambda model: torch.utils.swap_tensors(
        model[0].weight, nn.Parameter(torch.zeros_like(model[0].weight))
    ),
], ids=["double", "loaded", "assigned", "swapped"])  # fmt: skip
def test_parameters_can_be_swapped_under_a_plan(monkeypatch, entry, change):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    with apply_speedups(model, SpeedConfig(**{entry: True}).alone(), optimizer=optimizer)[1]:
        change(model)
    assert model[0].weight.is_contiguous()
    assert optimizer.param_groups[0]["fused"] is None
