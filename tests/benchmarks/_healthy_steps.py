"""Twenty models in loops that are well kept: nothing known makes them slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _slow_steps import AtOnce, Attention, Reader, cnn, mlp
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

Step = Callable[[], object]


def fused(*models: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-3, fused=True)


def trained(net: nn.Module, x: Any, y: torch.Tensor) -> Step:
    optimizer = fused(net)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def wide_mlp() -> Step:
    return trained(mlp(256, 1024, 1024, 10), torch.randn(256, 256), torch.randint(0, 10, (256,)))


def convolutions() -> Step:
    net = cnn(32).to(memory_format=torch.channels_last)
    x = torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last)
    return trained(net, x, torch.randint(0, 10, (64,)))


def encoder_of_words() -> Step:
    return trained(Reader(), torch.randint(1, 500, (32, 48)), torch.randint(0, 2, (32,)))


def recurrent() -> Step:
    return trained(AtOnce(), torch.randn(64, 32, 32), torch.randint(0, 4, (64,)))


def table_in_batches() -> Step:
    table = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    loader = DataLoader(table, sampler=BatchSampler(RandomSampler(table), 256, False),
                        batch_size=None)  # fmt: skip
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
    net = cnn(16).eval()
    x = torch.randn(64, 3, 32, 32)

    @torch.inference_mode()
    def step() -> torch.Tensor:
        return net(x).argmax(1)

    return step


def autoencoder() -> Step:
    net = mlp(128, 256, 16, 256, 128)
    optimizer, x = fused(net), torch.randn(256, 128)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


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
    optimizer = fused(head)
    x, y = torch.randn(128, 256), torch.randint(0, 10, (128,))

    def step() -> None:
        with torch.no_grad():
            features = body(x)
        optimizer.zero_grad()
        F.cross_entropy(head(features), y).backward()
        optimizer.step()

    return step


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
    net = mlp(64, 256, 1)
    optimizer, x = fused(net), torch.randn(128, 64)

    def step() -> None:
        inputs = x.clone().requires_grad_()
        out = net(inputs)
        (slopes,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        optimizer.zero_grad()
        (out.mean() + (slopes.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    return step


def clipped() -> Step:
    net = mlp(128, 512, 512, 10)
    optimizer = fused(net)
    x, y = torch.randn(128, 128), torch.randint(0, 10, (128,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def contrasted() -> Step:
    net = mlp(128, 512, 64)
    optimizer = fused(net)
    first, second = torch.randn(128, 128), torch.randn(128, 128)

    def step() -> None:
        optimizer.zero_grad()
        a, b = F.normalize(net(first), dim=1), F.normalize(net(second), dim=1)
        F.cross_entropy(a @ b.T / 0.1, torch.arange(128)).backward()
        optimizer.step()

    return step


def graph_of_nodes() -> Step:
    first, second = nn.Linear(64, 128), nn.Linear(128, 7)
    edges = torch.randint(0, 512, (2, 4096))
    x, y = torch.randn(512, 64), torch.randint(0, 7, (512,))
    optimizer = fused(first, second)

    def spread(nodes: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(nodes).index_add_(0, edges[1], nodes[edges[0]])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(spread(second(F.relu(spread(first(x))))), y).backward()
        optimizer.step()

    return step


def unrolled_policy() -> Step:
    policy = mlp(16, 64, 4)
    optimizer = fused(policy)

    def step() -> None:
        state, rewards = torch.zeros(64, 16), []
        for _ in range(8):
            action = policy(state).softmax(-1)
            state = torch.tanh(state + action.repeat(1, 4))
            rewards.append(state.mean(1))
        optimizer.zero_grad()
        (-torch.stack(rewards).mean()).backward()
        optimizer.step()

    return step


def attention_by_torch() -> Step:
    net = nn.Sequential(Attention(False), nn.Flatten(), nn.Linear(64 * 64, 10))
    return trained(net, torch.randn(32, 64, 64), torch.randint(0, 10, (32,)))


def variational() -> Step:
    encoder, decoder = mlp(128, 256, 32), mlp(16, 256, 128)
    optimizer, x = fused(encoder, decoder), torch.randn(256, 128)

    def step() -> None:
        mean, spread = encoder(x).chunk(2, 1)
        optimizer.zero_grad()
        seen = decoder(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
        (F.mse_loss(seen, x) + 1e-3 * divergence).backward()
        optimizer.step()

    return step


def teacher_and_pupil() -> Step:
    teacher, pupil = mlp(128, 512, 10).eval(), mlp(128, 128, 10)
    optimizer, x = fused(pupil), torch.randn(256, 128)

    def step() -> None:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        optimizer.zero_grad()
        F.kl_div(pupil(x).log_softmax(1), wanted, reduction="batchmean").backward()
        optimizer.step()

    return step


def segments() -> Step:
    first, second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
    third, last = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 2, 2, 2)
    x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 2, (16, 64, 64))
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU(), last)
    net = net.to(memory_format=torch.channels_last)
    return trained(net, x.to(memory_format=torch.channels_last), y)


def regression_with_dropout() -> Step:
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 1))
    optimizer = fused(net)
    x, y = torch.randn(512, 64), torch.randn(512, 1)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.huber_loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


HEALTHY: dict[str, Callable[[], Step]] = {
    one.__name__: one
    for one in (
        wide_mlp, convolutions, encoder_of_words, recurrent, table_in_batches, predictions,
        autoencoder, two_players, frozen_backbone, accumulated, gradient_penalty, clipped,
        contrasted, graph_of_nodes, unrolled_policy, attention_by_torch, variational,
        teacher_and_pupil, segments, regression_with_dropout,
    )
}  # fmt: skip
