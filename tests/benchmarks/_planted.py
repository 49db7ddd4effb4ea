"""Steps that compute something wrong while a plan is in force, as broken plans do.

Each fault is planted under two plans. Under bf16, rounding can hide the fault. Under `sdpa:math`,
these nets have no other change.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import _honest
import torch
from _nets import Case, Made, training
from torch import nn
from torch.nn import functional

from speedkit_jupyter.catalog.model_changes.calls import CALLS
from speedkit_jupyter.catalog.precision import Lowered

Spoil = Callable[[torch.Tensor], torch.Tensor]
BF16, EXACT = "bf16", "sdpa:math"
FEATURES, CLASSES, BATCH = 20, 12, 24


def in_force() -> bool:
    """Return whether one of the two plans, bf16 or `sdpa:math`, is in force."""
    layers = (layer for each in CALLS.every().values() for layer in each.overrides.values())
    is_lowered = any(isinstance(layer, Lowered) for layer in layers)
    return is_lowered or not torch.backends.cuda.flash_sdp_enabled()


def nothing(value: torch.Tensor) -> torch.Tensor:
    return value


class Net(nn.Module):
    """Net from (N, 20) to (N, 12), whose output goes through `spoil` while the plan is in force."""

    def __init__(self, spoil: Spoil = nothing) -> None:
        super().__init__()
        layers = nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, CLASSES)
        self.layers = nn.Sequential(*layers)
        self.spoil = spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        return self.spoil(out) if in_force() else out


def with_gradient(value: torch.Tensor, spoil: Spoil) -> torch.Tensor:
    """Return the same value, whose gradient goes through `spoil`."""
    value = value.clone()
    value.register_hook(spoil)
    return value


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def trained(
    model: nn.Module, plan: str, optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[], object] = lambda: None, loss: Callable[[], torch.Tensor] | None = None,
) -> Made:  # fmt: skip
    """Return a training step that then calls `after`; `model.is_bad` is true under the plan."""
    found, (x, y) = optimizer or sgd(model), data()
    train = training(loss or (lambda: functional.cross_entropy(model(x), y)), found)

    def step() -> None:
        model.is_bad = in_force()
        train()
        after()

    return step, model, found, [plan]


OUTPUTS: dict[str, Spoil] = {
    "10 % too large": lambda out: out * 1.1,
    "3 % too large": lambda out: out * 1.03,
    "3 % too small": lambda out: out * 0.97,
    "zero": lambda out: out * 0,
    "another sign": lambda out: -out,
    "shifted by 5 % of its scatter": lambda out: out + 0.05 * out.detach().std(),
    "scatter of 10 %": lambda out: out + 0.1 * out.detach().std() * torch.sin(1e4 * out.detach()),
    "rows in another order": lambda out: out.flip(0),
    "columns exchanged": lambda out: out[:, [1, 0, *range(2, CLASSES)]],
    "rows dropped": lambda out: torch.cat([out[:-4], out[-4:] * 0]),
    "a row missing": lambda out: out[1:],
    "the mean for all": lambda out: out.mean(0, keepdim=True).expand_as(out),
    "cut off at its scatter": lambda out: out.clamp(-out.detach().std(), out.detach().std()),
    "not a number": lambda out: out / 0 * 0,
    "cast to 8 bits": lambda out: (out / 0.25).round() * 0.25 + 0 * out,
}
GRADIENTS: dict[str, Spoil] = {
    "10 % too large": lambda gradient: gradient * 1.1,
    "another sign": lambda gradient: -gradient,
    "zero": lambda gradient: gradient * 0,
    "left scaled": lambda gradient: gradient * 1024,
    "half of the samples missing": lambda gradient: torch.cat([gradient[:12], gradient[12:] * 0]),
    "samples in another order": lambda gradient: gradient.flip(0),
    "cut off": lambda gradient: gradient.clamp(-0.001, 0.001),
    "not a number": lambda gradient: gradient * float("nan"),
}
RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a dict": lambda out: {"logits": out},
    "nested": lambda out: ({"a": [out, (1, "b")]}, None),
    "numbers": lambda out: out.tolist(),
    "NumPy": lambda out: out.float().numpy(),
    "classes": lambda out: out.argmax(1),
    "text": lambda out: " ".join(f"class {int(row)}" for row in out.argmax(1)),
}


def inferring(
    spoil: Spoil, plan: str, result: Callable[[torch.Tensor], Any] = nothing, is_seen: bool = True
) -> Made:
    """Return an inference step; unless `is_seen`, the accuracy check sees only its results."""
    model, (x, _) = Net(spoil).eval(), data()
    call = model if is_seen else model.forward
    return torch.no_grad()(lambda: result(call(x))), model, sgd(model), [plan]


def unseen(result: Callable[[torch.Tensor], Any], plan: str) -> Made:
    return inferring(lambda out: out.flip(1) * 1.3, plan, result, is_seen=False)


def wrong_gradient(spoil: Spoil, plan: str) -> Made:
    return trained(Net(lambda out: with_gradient(out, spoil)), plan)


def of_one_input(name: str, factor: float, plan: str) -> Made:
    """Return a step whose plan scales one parameter's gradient, as a wrong kernel might."""
    model = Net()
    parameter = dict(model.named_parameters())[name]
    parameter.register_hook(lambda gradient: gradient * (factor if model.is_bad else 1))
    return trained(model, plan)


# Optimizers.

Right = Callable[[], object]
Steps = dict[str, Callable[[torch.optim.Optimizer, Right], object]]


def with_option(
    name: str, change: Callable[[Any], Any], optimizer: torch.optim.Optimizer, right: Right
) -> None:
    group = optimizer.param_groups[0]
    usual, group[name] = group[name], change(group[name])
    right()
    group[name] = usual


def one_stays(optimizer: torch.optim.Optimizer, right: Right) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    held = parameter.detach().clone()
    right()
    parameter.data.copy_(held)


def state_spoiled(spoil: Spoil, optimizer: torch.optim.Optimizer, right: Right) -> None:
    """Change the optimizer's momenta by `spoil`, then make the right step."""
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if state.get(name) is not None and state[name].dim() > 1:
                state[name].copy_(spoil(state[name]))
    right()


STEPS: Steps = {
    "no step": lambda optimizer, right: None,
    "two steps": lambda optimizer, right: (right(), right()),
    "half as far again": partial(with_option, "lr", lambda lr: 1.5 * lr),
    "10 % short": partial(with_option, "lr", lambda lr: 0.9 * lr),
    "the other way": partial(with_option, "lr", lambda lr: -lr),
    "a parameter stays": one_stays,
    "no weight decay": partial(with_option, "weight_decay", lambda _: 0.0),
    "state in another layout": partial(state_spoiled, lambda x: x.t().reshape(x.shape).clone()),
    "state lost": partial(state_spoiled, lambda x: x * 0),
}


def misstepping(kind: type[torch.optim.Optimizer], spoil: Callable[..., object], plan: str) -> Made:
    class Misstepping(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> None:
            right = partial(super().step, closure)
            spoil(self, right) if model.is_bad else right()

    model, options = Net(), {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return trained(model, plan, Misstepping(model.parameters(), 0.01, weight_decay=0.1, **options))


# Buffers, copies and masks.


class Stale(Net):
    """Net that uses weights from before the first step, like a plan with stale copies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not in_force():
            return self.layers(x)
        if self.__dict__.get("copied") is None:
            self.__dict__["copied"] = copy.deepcopy(self.layers)
        fresh, own = self.layers(x), self.__dict__["copied"](x)
        return fresh + (own - fresh).detach()


def stale(plan: str) -> Made:
    """Return a step with a large learning rate, so that stale weights show in the next step."""
    model = Stale()
    return trained(model, plan, torch.optim.SGD(model.parameters(), 1.0))


def buffer(change: Callable[[nn.BatchNorm1d], object], plan: str) -> Made:
    model = Net()
    return trained(model, plan, after=lambda: in_force() and change(model.layers[1]))


BUFFERS: dict[str, Callable[[nn.BatchNorm1d], object]] = {
    "frozen": lambda norm: norm.reset_running_stats(),
    "updated twice": lambda norm: norm.running_mean.mul_(1.9),
    "counted wrong": lambda norm: norm.num_batches_tracked.add_(1),
    "left in eval mode": lambda norm: norm.eval(),
    "not a number": lambda norm: norm.running_var.mul_(float("nan")),
}


class Attending(nn.Module):
    """Attention over tokens (N, T, 16), with a mask that `spoil` changes while the plan is on."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.mix, self.out, self.spoil = nn.Linear(16, 48), nn.Linear(16, CLASSES), spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        mask = self.spoil(mask) if in_force() else mask
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(x + mixed).mean(1)


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "ignored": lambda mask: None,
    "of the future": lambda mask: mask.t(),
    "one place further": lambda mask: mask.roll(1, 1) | torch.eye(len(mask)).bool(),
    "without the last tokens": lambda mask: (
        mask & (torch.arange(len(mask)) < len(mask) - 3) | torch.eye(len(mask)).bool()
    ),
}


def masked(spoil: Callable[[torch.Tensor], torch.Tensor | None], plan: str) -> Made:
    model, x, (_, y) = Attending(spoil), torch.randn(BATCH, 10, 16), data()
    return trained(model, plan, loss=lambda: functional.cross_entropy(model(x), y))


def unscaled(plan: str) -> Made:
    """Return a step that, while the plan is in force, clips gradients before unscaling them."""
    model, (x, y) = Net(), data()
    optimizer = sgd(model)

    def step() -> None:
        factor = 1024.0 if in_force() else 1.0
        optimizer.zero_grad()
        (factor * functional.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad.div_(factor)
        optimizer.step()

    return step, model, optimizer, [plan]


def of_autograd_grad(plan: str) -> Made:
    model, (x, y) = Net(lambda out: with_gradient(out, lambda gradient: gradient * 1.5)), data()
    optimizer = sgd(model)

    def step() -> None:
        parameters = list(model.parameters())
        found = torch.autograd.grad(functional.cross_entropy(model(x), y), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, [plan]


def loop(make: Callable[..., Made], plan: str) -> Made:
    """Return a loop of `_honest.py` that makes its mistake while the plan is in force."""
    step, model, optimizer, _ = make(bad=in_force)
    return step, model, optimizer, [plan]


SINGLE: dict[str, Callable[[str], Made]] = {
    "stale weights": stale,
    "clipped before unscaling": unscaled,
    "accumulation that replaces": partial(loop, partial(_honest.accumulated, False)),
    "a generator the other way": partial(loop, _honest.gan),
    "an average that stays": partial(loop, _honest.averaged),
    "moved too far by hand": partial(loop, _honest.by_hand),
    "a step of an epoch left out": partial(loop, partial(_honest.epoch, 9, 1, False)),
    "autograd.grad": of_autograd_grad,
    "gradient of a weight half as large again": partial(of_one_input, "layers.3.weight", 1.5),
    "gradient of a weight doubled": partial(of_one_input, "layers.0.weight", 2.0),
    "gradient of a weight missing": partial(of_one_input, "layers.0.weight", 0.0),
}


def _for(plan: str) -> list[Case]:
    adam, momentum = torch.optim.AdamW, torch.optim.SGD
    tables: list[tuple[str, dict[str, Any], Callable[..., Made]]] = [
        ("output", OUTPUTS, inferring),
        ("gradient", GRADIENTS, wrong_gradient),
        ("AdamW", STEPS, partial(misstepping, adam)),
        ("SGD", STEPS, partial(misstepping, momentum)),
        ("buffer", BUFFERS, buffer),
        ("mask", MASKS, masked),
        ("result", RESULTS, unseen),
        ("step", SINGLE, lambda make, plan: make(plan)),
    ]
    return [
        Case(f"{kind}, {plan}: {name}", partial(make, it, plan), is_planted=True)
        for kind, table, make in tables
        for name, it in table.items()
    ]


PLANTED = (*_for(BF16), *_for(EXACT))
