"""Define correct steps of many kinds: the accuracy check must not call their plans wrong."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _nets import NAMES, Case, Made, net, training
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PLANS = ("bf16", "fp16", "tf32:medium", "channels_last", "fused_optimizer", "threads:2",
         "bf16+channels_last+fused_optimizer")  # fmt: skip
KINDS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.AdamW(p, 1e-3),
    lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, 1e-3),
    lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    lambda p: torch.optim.Adagrad(p, 1e-2),
    lambda p: torch.optim.NAdam(p, 1e-3),
)


def family(name: str, number: int) -> Made:
    model, forward, loss = net(name, seed=number)
    model.train()
    return trained(model, lambda: loss(forward()), number % len(KINDS))


def predicted(name: str) -> Made:
    model, forward, _ = net(name)
    model.eval()
    return torch.no_grad()(forward), model, (), PLANS


# Other kinds of loops around a small net. For `_planted.py`, some of them make a mistake on purpose
# while `bad()` is true.


never = bool  # bool() is False


def classifier(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), norm(64), nn.ReLU(), nn.Linear(64, 10))


def data(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 32), torch.randint(10, (count,))


def trained(
    model: nn.Module, loss: Callable[[], torch.Tensor], optimizer: Any = 0,
    plans: Sequence[str] = PLANS,
) -> Made:  # fmt: skip
    """Return a step that minimizes a loss; a number as `optimizer` is an index of KINDS."""
    found = KINDS[optimizer](model.parameters()) if isinstance(optimizer, int) else optimizer
    return training(loss, found), model, found, plans


def classified(
    model: nn.Module, optimizer: Any = 0, plans: Sequence[str] = PLANS,
    inputs: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    call: Callable[..., torch.Tensor] = lambda model, x: model(x),
) -> Made:  # fmt: skip
    x, y = data()
    x = inputs(x)
    loss = lambda: functional.cross_entropy(call(model, x).float(), y)  # noqa: E731
    return trained(model, loss, optimizer, plans)


def epoch(count: int, kind: int, attends: bool, bad: Callable[[], bool] = never) -> Made:
    """Return an epoch of `count` optimizer steps; while `bad()`, leave out the second step.

    With `attends`, the net uses attention, whose key bias has near-zero gradients.
    """
    width = {"batch_first": True, "dropout": 0.0}
    model = nn.TransformerEncoderLayer(32, 4, 64, **width) if attends else classifier()
    optimizer, (x, _) = KINDS[kind](model.parameters()), data(count * 16)

    def step() -> list[float]:
        losses = []
        for number, part in enumerate(x.chunk(count)):
            optimizer.zero_grad()
            loss = model(part.view(4, 4, 32) if attends else part).square().mean()
            loss.backward()
            if number != 1 or not bad():
                optimizer.step()
            losses.append(loss.item())
        return losses

    return step, model, optimizer, ("bf16", "fused_optimizer", "bf16+fused_optimizer")


def hits(trains: bool) -> Made:
    """Return a step that counts correct predictions; rounding can change the number."""
    model, (x, y) = classifier(nn.LayerNorm), data(576)
    optimizer = KINDS[1](model.parameters())

    def step() -> int:
        count = 0
        for part, labels in zip(x.chunk(9), y.chunk(9), strict=True):
            out = model(part)
            if trains:
                optimizer.zero_grad()
                functional.cross_entropy(out, labels).backward()
                optimizer.step()
            count += int((out.argmax(1) == labels).sum())
        return count

    return step, model, optimizer, ("bf16", "fused_optimizer")


def accumulated(clips: bool, bad: Callable[[], bool] = never) -> Made:
    """Return a step that accumulates four gradients; while `bad()`, it keeps only the last one."""
    model, (x, y) = classifier(nn.LayerNorm), data()
    optimizer = KINDS[0](model.parameters())

    def step() -> None:
        for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
            if bad():
                optimizer.zero_grad()
            (functional.cross_entropy(model(part), labels) / 4).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, PLANS


def gan(bad: Callable[[], bool] = never) -> Made:
    """Return a step that trains a GAN; while `bad()`, the generator's loss has the wrong sign."""
    maker, judge = classifier(), nn.Sequential(nn.Linear(10, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    optimizers = [KINDS[3](judge.parameters()), KINDS[3](maker.parameters())]
    (x, _), real, labels = data(), torch.randn(64, 10), torch.arange(128).lt(64).float()

    def judging() -> torch.Tensor:
        found = judge(torch.cat([real, maker(x).detach()])).flatten()
        return functional.binary_cross_entropy_with_logits(found, labels)

    def making() -> torch.Tensor:
        return functional.softplus((1 if bad() else -1) * judge(maker(x))).mean()

    first, second = map(training, (judging, making), optimizers)
    return lambda: (first(), second()), nn.ModuleList([maker, judge]), optimizers, PLANS


def averaged(bad: Callable[[], bool] = never) -> Made:
    """Return a step that trains and averages weights; while `bad()`, it keeps the old average."""
    model, (x, y) = classifier(), data()
    average, optimizer = copy.deepcopy(model), KINDS[0](model.parameters())
    train = training(lambda: functional.cross_entropy(model(x), y), optimizer)

    def step() -> torch.Tensor:
        train()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.0 if bad() else 0.01)
            return average(x)

    return step, nn.ModuleList([model, average]), optimizer, ("bf16", "fused_optimizer")


FEW = ("bf16", "fused_optimizer")


def by_closure() -> Made:
    model, (x, y) = classifier(nn.LayerNorm), data()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure), model, optimizer, ("bf16", "threads:2")


def in_backward() -> Made:
    """Return a step that updates each parameter in the backward pass, in a gradient hook."""
    model, (x, y) = classifier(nn.LayerNorm), data()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(now)

    def step() -> None:
        functional.cross_entropy(model(x), y).backward()

    return step, model, list(optimizers.values()), ("bf16", "threads:2")


def by_hand(bad: Callable[[], bool] = never) -> Made:
    """Return a step that updates weights by hand; while `bad()`, updates are 30 % too large."""
    model, (x, y) = classifier(), data()

    def step() -> None:
        gradients = torch.autograd.grad(functional.cross_entropy(model(x), y), model.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= (0.13 if bad() else 0.1) * gradient

    return step, model, (), ("bf16", "threads:2")


class Words(nn.Module):
    """Map tokens (N, T) to logits (N, 50): average their embeddings, and apply a linear layer."""

    def __init__(self, sparse: bool, tied: bool) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(50, 24, sparse=sparse), nn.Linear(24, 50, bias=False)
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.tokens(x).mean(1))


def embedding(sparse: bool, tied: bool) -> Made:
    model, x, y = Words(sparse, tied), torch.randint(50, (32, 9)), torch.randint(50, (32,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if sparse else 0
    plans = ("bf16", "fused_optimizer", "threads:2")
    return trained(model, lambda: functional.cross_entropy(model(x), y), optimizer, plans)


def generating() -> Made:
    """Return a greedy generation step; if rounding changes a token, later tokens change, too."""
    model, x = Words(False, False), torch.randint(50, (8, 4))

    @torch.no_grad()
    def step() -> torch.Tensor:
        found = x
        for _ in range(12):
            found = torch.cat([found, model(found).argmax(1, keepdim=True)], 1)
        return found

    return step, model, (), ("bf16", "threads:2")


def noisy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(model(x + 0.1 * torch.randn_like(x)), 0.2)


def penalized() -> Made:
    """Return a step with a gradient penalty, which needs second derivatives."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    x = data()[0].requires_grad_()

    def loss() -> torch.Tensor:
        out = model(x).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return out.square() / 64 + (gradient.norm(dim=1) - 1).square().mean()

    return trained(model, loss, plans=("bf16", "fused_optimizer"))


def scheduled() -> Made:
    step, model, optimizer, _ = classified(classifier(), 1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    both = lambda: (step(), schedule.step(), schedule.get_last_lr())[-1]  # noqa: E731
    return both, model, optimizer, FEW


def frozen() -> Made:
    model = classifier()
    model[0].requires_grad_(False)
    return classified(model, KINDS[0](model[3].parameters()))


OWN_PRECISION = ("fused_optimizer", "threads:2")
LOOPS: dict[str, Callable[[], Made]] = {
    **{f"epoch of {count}, attention, optimizer {kind}": partial(epoch, count, kind, True)
       for count, kind in ((9, 0), (9, 3), (14, 0))},
    "epoch of 9, batch norm, SGD": partial(epoch, 9, 1, False),
    "epoch of 9, batch norm, RMSprop": partial(epoch, 9, 2, False),
    "hits of an epoch": partial(hits, True),
    "hits of an evaluation": partial(hits, False),
    "accumulated": partial(accumulated, False),
    "accumulated and clipped": partial(accumulated, True),
    "GAN": gan,
    "averaged": averaged,
    "LBFGS": by_closure,
    "steps in the backward pass": in_backward,
    "moved by hand": by_hand,
    "autocast of its own": lambda: classified(
        classifier(nn.LayerNorm), 0, OWN_PRECISION,
        call=torch.autocast("cpu", torch.bfloat16)(lambda model, x: model(x))),
    "parameters in bf16": lambda: classified(
        classifier(nn.LayerNorm).bfloat16(), 0, OWN_PRECISION, torch.Tensor.bfloat16),
    "embedding": partial(embedding, False, False),
    "sparse embedding": partial(embedding, True, False),
    "tied embedding": partial(embedding, False, True),
    "generating": generating,
    "checkpointed": lambda: classified(classifier(nn.LayerNorm), 0, FEW,
        call=partial(checkpoint, use_reentrant=False)),
    "dropout and noise": lambda: classified(
        nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 10)),
        call=noisy),
    "gradient penalty": penalized,
    "scheduled": scheduled,
    "pixels": lambda: classified(classifier(), inputs=lambda x: 128 + 64 * x),
    "nearly constant inputs": lambda: classified(classifier(), inputs=lambda x: 128 + 0.1 * x),
    "frozen": frozen,
    "DataParallel": lambda: classified(nn.DataParallel(classifier())),
}  # fmt: skip
SEEN = ("cnn batchnorm", "lstm", "encoder", "residual", "attention")
HONEST = (
    *(Case(name, make) for name, make in LOOPS.items()),
    *(Case(name, partial(family, name, number)) for number, name in enumerate(NAMES)),
    *(Case(f"{name}, inference", partial(predicted, name)) for name in SEEN),
)
