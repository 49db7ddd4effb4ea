"""Plans see through the wrappers of models and optimizers, whichever framework made them."""

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups
from speedkit_jupyter.plans.applying import applied_to
from speedkit_jupyter.support.wrappers import unwrapped

FUSED = SpeedConfig(fused_optimizer=True).alone()


class WithProperties(torch.optim.Optimizer):
    """Optimizer wrapper like Accelerate's, whose groups and state are properties."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.skipped = False

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.skipped = not self.skipped
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class SharingGroups(torch.optim.Optimizer):
    """Optimizer wrapper like Lookahead or SAM, which shares the wrapped optimizer's groups."""

    def __init__(self, base):
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults = base.defaults
        self._zero_grad_profile_name = "zero_grad"

    def step(self, closure=None):
        return self.base.step(closure)


class Plain:
    """Handwritten optimizer wrapper that does not subclass `torch.optim.Optimizer`."""

    def __init__(self, optimizer):
        self.inside = optimizer

    def step(self):
        self.inside.step()

    def zero_grad(self):
        self.inside.zero_grad()


WRAPPERS = {"properties": WithProperties, "sharing groups": SharingGroups, "no optimizer": Plain}


class Forwarding(nn.Module):
    """Model wrapper like Fabric's, which holds the model in two attributes."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = self._original_module = model

    def forward(self, x):
        return self._forward_module(x)


MODELS = {
    "forwarding": Forwarding,
    "parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel and compiled": lambda m: nn.DataParallel(torch.compile(m, backend="eager")),
}


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_optimizer_behind_a_wrapper_is_planned_for_switched_and_restored(model, wrap):
    optimizer = torch.optim.Adam(model.parameters())
    wrapper = wrap(optimizer)
    assert unwrapped(wrapper) is unwrapped(optimizer) is optimizer
    assert Facts.read(model, [wrapper, optimizer]) == Facts.read(model, [optimizer])
    attributes, own = dict(vars(wrapper)), dict(vars(optimizer))

    groups = [dict(group) for group in optimizer.param_groups]
    _, context = apply_speedups(model, FUSED, optimizer=[wrapper, optimizer])
    assert list(context.target.optimizers) == [optimizer]
    assert optimizer.param_groups[0]["fused"] is True
    assert [change.name for change in context.changes()] == ["Adam.fused"]
    model(torch.rand(4, 8)).sum().backward()
    wrapper.step()
    context.restore()
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert vars(wrapper).keys() == attributes.keys()
    assert vars(optimizer).keys() == own.keys()


@pytest.mark.parametrize("outer", MODELS.values(), ids=MODELS)
def test_a_plan_on_a_model_is_one_plan_with_that_of_its_wrapper(model, outer):
    wrapper = outer(model)
    assert unwrapped(wrapper) is model
    keys = [*model.__dict__]
    _, first = apply_speedups(model, SpeedConfig(threads=1))
    returned, second = apply_speedups(wrapper, SpeedConfig(threads=1))
    assert returned is wrapper
    assert second.model is wrapper
    assert applied_to(model) is applied_to(wrapper) is second
    assert not first.active
    second.restore()
    assert applied_to(model) is None
    assert first.restored
    assert [*model.__dict__] == keys
    assert [*wrapper.__dict__] == [*outer(model).__dict__]


def test_what_has_tensors_of_its_own_is_no_wrapper(model):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert unwrapped(averaged) is averaged
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    assert unwrapped(scheduler) is scheduler
    wrapper = Forwarding(model)
    wrapper.scale = nn.Parameter(torch.ones(1))
    assert unwrapped(wrapper) is wrapper
