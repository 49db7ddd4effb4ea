"""Steps that compute something wrong while a plan is in force: one of each kind.

Under bf16 the fault hides among rounding; with `sdpa:math`, which changes nothing for these nets,
everything else is exact.
"""

from __future__ import annotations

import dataclasses
import types
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], Any]
Made = tuple[Step, nn.Module, torch.optim.Optimizer, str]
BF16, EXACT = "bf16", "sdpa:math"
FEATURES, CLASSES, BATCH = 20, 12, 24


@dataclass(frozen=True)
class Planted:
    """`make` gives step, model, optimizer and the plan under which it goes wrong; `honest` the
    same step without a fault, where there is a point in it.
    """

    group: str
    name: str
    make: Callable[[], Made]
    honest: Callable[[], Made] | None = None


def in_force() -> bool:
    """Whether the plan under which things go wrong is the one at work."""
    return torch.is_autocast_enabled("cpu") or not torch.backends.cuda.flash_sdp_enabled()


def nothing(value: torch.Tensor) -> torch.Tensor:
    return value


class Net(nn.Module):
    """(N, 20) to (N, 12), through `spoil` while the plan is in force."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor] = nothing) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, CLASSES))
        self.spoil = spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        return self.spoil(out) if in_force() else out


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


# Outputs.


def one_element(out: torch.Tensor) -> torch.Tensor:
    wrong = out.clone()
    wrong[3, 2] += 1
    return wrong


def one_row(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:-1], out[-1:] * 0.5])


def one_column(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:, :1] * 1.3, out[:, 1:]], 1)


def coarse(out: torch.Tensor) -> torch.Tensor:
    """As if quantized to a handful of values."""
    step = out.detach().abs().max() / 8
    return (out / step).round() * step + 0 * out


OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "10 % too large": lambda out: out * 1.1,
    "3 % too large": lambda out: out * 1.03,
    "3 % too small": lambda out: out * 0.97,
    "zero": lambda out: out * 0,
    "another sign": lambda out: -out,
    "shifted by 5 % of its scatter": lambda out: out + 0.05 * out.detach().std(),
    "one element": one_element,
    "one row": one_row,
    "one column": one_column,
    "rows in another order": lambda out: out.flip(0),
    "two columns exchanged": lambda out: out[:, [1, 0, *range(2, CLASSES)]],
    "scatter of 5 %": lambda out: out + 0.05 * out.detach().std() * torch.sin(1e4 * out.detach()),
    "a handful of values": coarse,
    "not a number": lambda out: out / 0 * 0,
    "infinite in one element": lambda out: out + functional.one_hot(
        torch.tensor(0), CLASSES) * torch.tensor(1e38) * 1e38,
    "one row missing": lambda out: out[1:],
    "cut off at its scatter": lambda out: out.clamp(-out.detach().std(), out.detach().std()),
    "the mean for all": lambda out: out.mean(0, keepdim=True).expand_as(out),
}  # fmt: skip


def inferring(
    spoil: Callable[[torch.Tensor], torch.Tensor],
    plan: str,
    result: Callable[[torch.Tensor], Any] = nothing,
) -> Made:
    model, (x, _) = Net(spoil), data()

    def step() -> Any:
        with torch.no_grad():
            return result(model(x))

    return step, model, sgd(model), plan


# Gradients. The outputs are right.


class Spoiled(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, spoil: Any) -> torch.Tensor:
        ctx.spoil = spoil
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.spoil(gradient), None


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half as large again": lambda gradient: gradient * 1.5,
    "another sign": lambda gradient: -gradient,
    "zero": lambda gradient: gradient * 0,
    "left scaled": lambda gradient: gradient * 1024,
    "of one sample missing": lambda gradient: torch.cat([gradient[:-1], gradient[-1:] * 0]),
    "of half of the samples missing": lambda gradient: torch.cat(
        [gradient[:12], gradient[12:] * 0]),
    "cut off": lambda gradient: gradient.clamp(-0.001, 0.001),
    "samples in another order": lambda gradient: gradient.flip(0),
    "not a number": lambda gradient: gradient * float("nan"),
}  # fmt: skip


def training(
    gradient: Callable[[torch.Tensor], torch.Tensor] | None,
    plan: str,
    spoil: Callable[[torch.Tensor], torch.Tensor] = nothing,
    order: str = "plain",
) -> Made:
    """`order`: where gradients are cleared, and whether something is left from before."""
    wrong = spoil if gradient is None else (lambda out: Spoiled.apply(out, gradient))
    model, (x, y) = Net(wrong), data()
    optimizer = sgd(model)
    if order != "plain":
        functional.cross_entropy(model(x * 30), y).backward()  # left behind

    def step() -> Any:
        if order == "cleared before":
            optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if order == "cleared, no optimizer":
            model.zero_grad()
        elif order != "no optimizer":
            optimizer.step()
        if order == "plain":
            optimizer.zero_grad()

    return step, model, optimizer, plan


def differentiating(plan: str) -> Made:
    """`torch.autograd.grad`, handed to the optimizer by hand."""
    model, (x, y) = Net(lambda out: Spoiled.apply(out, lambda gradient: gradient * 1.5)), data()
    optimizer = sgd(model)

    def step() -> None:
        parameters = list(model.parameters())
        found = torch.autograd.grad(functional.cross_entropy(model(x), y), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, plan


def one_layer(plan: str) -> Made:
    """Of one layer among several, whose gradient is a small part of all."""
    model, (x, y) = Net(), data()
    optimizer = sgd(model)
    wrong = types.SimpleNamespace(now=False)
    model.layers[0].bias.register_hook(lambda gradient: gradient * (2 if wrong.now else 1))

    def step() -> None:
        wrong.now = in_force()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, plan


# The optimizer's step. Outputs and gradients are right.


def missteps(model: nn.Module) -> dict[str, Callable[[torch.optim.SGD, Step], None]]:
    """What an optimizer does in place of its step."""

    def none(optimizer: torch.optim.SGD, step: Step) -> None:
        return None

    def rate(factor: float, optimizer: torch.optim.SGD, step: Step) -> None:
        with changed(optimizer, "lr", 0.1 * factor):
            step()

    def twice(optimizer: torch.optim.SGD, step: Step) -> None:
        step()
        step()

    def but_one(optimizer: torch.optim.SGD, step: Step) -> None:
        held = model.layers[0].weight.detach().clone()
        step()
        with torch.no_grad():
            model.layers[0].weight.copy_(held)

    return {
        "no step": none,
        "half as far again": partial(rate, 1.5),
        "20 % short": partial(rate, 0.8),
        "the other way": partial(rate, -1.0),
        "two steps": twice,
        "one parameter stays": but_one,
    }


@contextmanager
def changed(optimizer: torch.optim.Optimizer, name: str, value: Any) -> Iterator[None]:
    found = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    try:
        yield
    finally:
        optimizer.param_groups[0][name] = found


MISSTEPS = tuple(missteps(nn.Module()))


def misstepping(name: str, plan: str) -> Made:
    model, (x, y) = Net(), data()
    wrong = types.SimpleNamespace(now=False)
    spoil = missteps(model)[name]

    class Misstepping(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            right = partial(super().step, closure)
            spoil(self, right) if wrong.now else right()

    optimizer = Misstepping(model.parameters(), 0.1)

    def step() -> None:
        wrong.now = in_force()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, plan


# Results of any type.


@dataclass
class Result:
    logits: Any
    note: str = "a result"


class Held:
    def __init__(self, out: torch.Tensor) -> None:
        self.inner = {"deep": [out]}


class Slotted:
    __slots__ = ("value",)

    def __init__(self, out: torch.Tensor) -> None:
        self.value = out


def as_model_output(out: torch.Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=out)


Pair = namedtuple("Pair", "first second")
RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda out: None,
    "argmax": lambda out: out.argmax(1),
    "dict": lambda out: {"logits": out},
    "nested": lambda out: ({"a": [out, (1, "b")]}, None),
    "dataclass": Result,
    "named tuple": lambda out: Pair(out, 1),
    "object": Held,
    "object with slots": Slotted,
    "SimpleNamespace": lambda out: types.SimpleNamespace(out=out),
    "frozen dataclass": lambda out: dataclasses.make_dataclass("F", ["x"], frozen=True)(out),
    "numpy": lambda out: out.float().numpy(),
    "numpy scalar": lambda out: out.float().numpy().sum(),
    "list of numbers": lambda out: out.tolist(),
    "item": lambda out: out.sum().item(),
    "bool": lambda out: bool(out.sum() > 0),
    "mask": lambda out: out > 0,
    "text": lambda out: f"{out.sum():.1f}",
    "complex": lambda out: torch.complex(out.float(), out.float()),
    "set": lambda out: {round(float(one), 1) for one in out[0]},
    "generator": lambda out: (one for one in out),
    "ModelOutput": as_model_output,
}


def unseen(result: Callable[[torch.Tensor], Any], plan: str) -> Made:
    """The same, where no call of the model can be seen: only the result is left."""
    model, (x, _) = Net(lambda out: out.flip(1) * 1.3), data()

    def step() -> Any:
        with torch.no_grad():
            return result(model.forward(x))

    return step, model, sgd(model), plan


def appending(plan: str) -> Made:
    model, (x, _) = Net(lambda out: out * 1.3), data()
    kept: list[torch.Tensor] = []

    def step() -> None:
        with torch.no_grad():
            kept.append(model(x))

    return step, model, sgd(model), plan


def generating(plan: str) -> Made:
    """Each call is given what the one before it decided."""
    model = Net(lambda out: out * 1.3)

    def step() -> torch.Tensor:
        tokens = torch.zeros(BATCH, dtype=torch.long)
        with torch.no_grad():
            for _ in range(5):
                tokens = model(functional.one_hot(tokens, FEATURES).float()).argmax(1)
        return tokens

    return step, model, sgd(model), plan


# Stochastic nets: a factor of 1.2 beside draws of every kind.


class Stochastic(Net):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor], factor: float) -> None:
        super().__init__(lambda out: out * factor)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.draw(x)[:, :CLASSES] + 0.1 * self.draw(x)[:, :CLASSES]


NUMPY = "numpy.random"
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "randn_like": lambda x: torch.randn_like(x),
    "normal": lambda x: torch.normal(x, 0.1),
    "functional dropout": lambda x: functional.dropout(x, 0.3),
    "randint": lambda x: x * torch.randint(0, 2, x.shape),
    "randperm": lambda x: x[torch.randperm(len(x))],
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "uniform_ in a product": lambda x: (x @ x.T @ x).uniform_(-1, 1),
    "Gumbel softmax": lambda x: functional.gumbel_softmax(x, 1.0),
    "Normal.rsample": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "own generator": lambda x: torch.randn(x.shape, generator=GENERATOR),
    NUMPY: lambda x: torch.from_numpy(__import__("numpy").random.randn(*x.shape)).float(),
    "the clock": lambda x: x * (__import__("time").perf_counter_ns() % 997) / 997,
}
GENERATOR = torch.Generator()


def stochastic(name: str, factor: float, plan: str, trains: bool = True) -> Made:
    model, (x, y) = Stochastic(DRAWS[name], factor), data()
    optimizer = sgd(model)

    def step() -> Any:
        if not trains:
            with torch.no_grad():
                return model(x)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return None

    return step, model, optimizer, plan


# Nets that amplify rounding a hundredfold, and what must be seen all the same.


class Amplifying(nn.Module):
    """Narrow blocks with batch normalization: (N, 20) to (N, 12)."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        layers = [part for _ in range(12) for part in (nn.Linear(20, 20), nn.BatchNorm1d(20),
                                                       nn.ReLU6())]  # fmt: skip
        self.layers = nn.Sequential(*layers, nn.Linear(20, CLASSES))
        self.spoil = spoil

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        return self.spoil(out) if in_force() else out


def amplified(gradient: bool, spoil: Callable[[torch.Tensor], torch.Tensor], plan: str) -> Made:
    model = Amplifying((lambda out: Spoiled.apply(out, spoil)) if gradient else spoil)
    x, y = data()
    optimizer = sgd(model)

    def step() -> None:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, plan


# Right at first, wrong later.


def later(after: int, plan: str) -> Made:
    calls: SimpleQueue[int] = SimpleQueue()  # no counter: that is put back

    def spoil(out: torch.Tensor) -> torch.Tensor:
        calls.put(1)
        return out * (1.0 if calls.qsize() < after else 0.0)

    model, (x, _) = Net(spoil), data()

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return step, model, sgd(model), plan


def _kinds() -> Iterator[Planted]:
    for plan in (BF16, EXACT):
        for name, spoil in OUTPUTS.items():
            yield Planted(f"output, {plan}", name, partial(inferring, spoil, plan))
        for name, spoil in GRADIENTS.items():
            yield Planted(f"gradient, {plan}", name, partial(training, spoil, plan))
        yield Planted(f"gradient, {plan}", "10 % too large with the output",
                      partial(training, None, plan, lambda out: out * 1.1))  # fmt: skip
        cut = partial(training, None, plan, lambda out: out.detach() + 0 * out)
        yield Planted(f"gradient, {plan}", "output cut from its graph", cut)
        yield Planted(f"gradient, {plan}", "of one bias", partial(one_layer, plan))
        for name in MISSTEPS:
            yield Planted(f"optimizer, {plan}", name, partial(misstepping, name, plan))
        half = GRADIENTS["half as large again"]
        for order in ("left over, added to", "cleared before", "no optimizer",
                      "cleared, no optimizer"):  # fmt: skip
            yield Planted(f"order, {plan}", order, partial(training, half, plan, order=order))
        yield Planted(f"order, {plan}", "autograd.grad", partial(differentiating, plan))
        spoil = OUTPUTS["3 % too large"]
        for name, result in RESULTS.items():
            make = partial(inferring, spoil, plan, result)
            yield Planted(f"result, {plan}", name, make)
            yield Planted(f"result alone, {plan}", name, partial(unseen, result, plan))
        for name in ("10 % too large", "zero", "another sign", "rows in another order",
                     "two columns exchanged", "the mean for all"):  # fmt: skip
            make = partial(amplified, False, OUTPUTS[name], plan)
            yield Planted(f"amplifying, {plan}", f"output {name}", make)
        for name in ("half as large again", "another sign", "zero", "left scaled",
                     "of half of the samples missing"):  # fmt: skip
            make = partial(amplified, True, GRADIENTS[name], plan)
            yield Planted(f"amplifying, {plan}", f"gradient {name}", make)
        yield Planted(f"result, {plan}", "appended to a list", partial(appending, plan))
        yield Planted(f"result, {plan}", "generated", partial(generating, plan))


def _stochastic() -> Iterator[Planted]:
    for name in DRAWS:
        for trains in (True, False):
            yield Planted(
                "stochastic",
                f"{name}, {'training' if trains else 'inference'}",
                partial(stochastic, name, 1.2, BF16, trains),
                partial(stochastic, name, 1.0, BF16, trains),
            )


KINDS = tuple(_kinds())
STOCHASTIC = tuple(_stochastic())
LATE = tuple(Planted("later", f"from call {n} on", partial(later, n, BF16)) for n in (20, 60))
