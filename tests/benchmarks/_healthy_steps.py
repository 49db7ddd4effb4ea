"""Twenty models in loops that are well kept: nothing known makes them slow."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _nets import Recurrent, mlp, training
from _slow_steps import Attention, Reader, cnn
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

Step = Callable[[], object]


def fused(*models: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-3, fused=True)


def minimised(loss: Callable[[], torch.Tensor], *models: nn.Module) -> Step:
    return training(loss, fused(*models))


def trained(net: nn.Module, x: torch.Tensor, classes: int = 10) -> Step:
    with torch.no_grad():
        y = torch.randint(0, classes, (len(x), *net(x).shape[2:]))
    return minimised(lambda: F.cross_entropy(net(x), y), net)


def wide_mlp() -> Step:
    return trained(mlp(256, 1024, 1024, 10), torch.randn(256, 256))


def convolutions() -> Step:
    net = cnn(32).to(memory_format=torch.channels_last)
    return trained(net, torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last))


def encoder_of_words() -> Step:
    return trained(Reader(), torch.randint(1, 500, (32, 48)), 2)


def recurrent() -> Step:
    return trained(Recurrent(nn.LSTM, 32, 64, 4, 1), torch.randn(64, 32, 32), 4)


def table_in_batches() -> Step:
    table = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    sampler = BatchSampler(RandomSampler(table), 256, False)
    loader = DataLoader(table, sampler=sampler, batch_size=None)
    net = mlp(64, 256, 256, 10)
    optimizer = fused(net)

    def step() -> float:
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total.item() / len(loader)

    return step


def predictions() -> Step:
    net, x = cnn(16).eval(), torch.randn(64, 3, 32, 32)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        return net(x).argmax(1)

    return step


def autoencoder() -> Step:
    net, x = mlp(128, 256, 16, 256, 128), torch.randn(256, 128)
    return minimised(lambda: F.mse_loss(net(x), x), net)


def two_players() -> Step:
    maker, judge = mlp(32, 256, 128), mlp(128, 256, 1)
    making, judging = fused(maker), fused(judge)
    real = torch.randn(128, 128)

    def step() -> None:
        fake = maker(torch.randn(128, 32))
        judging.zero_grad()
        (F.softplus(-judge(real)) + F.softplus(judge(fake.detach()))).mean().backward()
        judging.step()
        making.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        making.step()

    return step


def frozen_backbone() -> Step:
    body, head = mlp(256, 512, 256).requires_grad_(False), nn.Linear(256, 10)
    x, y = torch.randn(128, 256), torch.randint(0, 10, (128,))

    def loss() -> torch.Tensor:
        with torch.no_grad():
            features = body(x)
        return F.cross_entropy(head(features), y)

    return minimised(loss, head)


def accumulated() -> Step:
    net = mlp(128, 512, 10)
    optimizer = fused(net)
    x, y = torch.randn(4, 64, 128), torch.randint(0, 10, (4, 64))

    def step() -> None:
        optimizer.zero_grad()
        for inputs, labels in zip(x, y, strict=True):
            (F.cross_entropy(net(inputs), labels) / 4).backward()
        optimizer.step()

    return step


def gradient_penalty() -> Step:
    net, x = mlp(64, 256, 1), torch.randn(128, 64)

    def loss() -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        out = net(inputs)
        (slopes,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        return out.mean() + (slopes.norm(dim=1) - 1).square().mean()

    return minimised(loss, net)


def clipped() -> Step:
    net, x, y = mlp(128, 512, 512, 10), torch.randn(128, 128), torch.randint(0, 10, (128,))
    optimizer = fused(net)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def contrasted() -> Step:
    net, first, second = mlp(128, 512, 64), torch.randn(128, 128), torch.randn(128, 128)

    def loss() -> torch.Tensor:
        a, b = F.normalize(net(first), dim=1), F.normalize(net(second), dim=1)
        return F.cross_entropy(a @ b.T / 0.1, torch.arange(128))

    return minimised(loss, net)


def graph_of_nodes() -> Step:
    first, second = nn.Linear(64, 128), nn.Linear(128, 7)
    edges = torch.randint(0, 512, (2, 4096))
    x, y = torch.randn(512, 64), torch.randint(0, 7, (512,))

    def spread(nodes: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(nodes).index_add_(0, edges[1], nodes[edges[0]])

    def loss() -> torch.Tensor:
        return F.cross_entropy(spread(second(F.relu(spread(first(x))))), y)

    return minimised(loss, first, second)


def unrolled_policy() -> Step:
    policy = mlp(16, 64, 4)

    def loss() -> torch.Tensor:
        state, rewards = torch.zeros(64, 16), []
        for _ in range(8):
            action = policy(state).softmax(-1)
            state = torch.tanh(state + action.repeat(1, 4))
            rewards.append(state.mean(1))
        return -torch.stack(rewards).mean()

    return minimised(loss, policy)


def attention_by_torch() -> Step:
    net = nn.Sequential(Attention(False), nn.Flatten(), nn.Linear(64 * 64, 10))
    return trained(net, torch.randn(32, 64, 64))


def variational() -> Step:
    encoder, decoder, x = mlp(128, 256, 32), mlp(16, 256, 128), torch.randn(256, 128)

    def loss() -> torch.Tensor:
        mean, spread = encoder(x).chunk(2, 1)
        seen = decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
        return F.mse_loss(seen, x) + 1e-3 * divergence

    return minimised(loss, encoder, decoder)


def teacher_and_pupil() -> Step:
    teacher, pupil, x = mlp(128, 512, 10).eval(), mlp(128, 128, 10), torch.randn(256, 128)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        return F.kl_div(pupil(x).log_softmax(1), wanted, reduction="batchmean")

    return minimised(loss, pupil)


def segments() -> Step:
    first, second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
    third, last = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 2, 2, 2)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU(), last)
    net = net.to(memory_format=torch.channels_last)
    return trained(net, torch.randn(16, 3, 64, 64).to(memory_format=torch.channels_last), 2)


def regression_with_dropout() -> Step:
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 1))
    x, y = torch.randn(512, 64), torch.randn(512, 1)
    return minimised(lambda: F.huber_loss(net(x), y), net)


HEALTHY: dict[str, Callable[[], Step]] = {
    one.__name__: one
    for one in (
        wide_mlp, convolutions, encoder_of_words, recurrent, table_in_batches, predictions,
        autoencoder, two_players, frozen_backbone, accumulated, gradient_penalty, clipped,
        contrasted, graph_of_nodes, unrolled_policy, attention_by_torch, variational,
        teacher_and_pupil, segments, regression_with_dropout,
    )
}  # fmt: skip
