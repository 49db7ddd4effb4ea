"""`distributed` on two or four real processes trains as one process does."""

import pytest
import torch
from torch import nn

from speedkit_jupyter import launch
from speedkit_jupyter.extras.processes.launching import Launch

pytest.importorskip("ipyparallel")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.inner(x).tanh()


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Block(), Block(), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, data, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def on_workers(model, optimizer, values, train):
    """Train under a plan; return its active entries, whether undo was exact, and its changes."""
    import torch
    import torch.distributed as dist

    from speedkit_jupyter import SpeedConfig, apply_speedups

    def surface():
        hooks = [len(v) for m in model.modules() for k, v in vars(m).items() if "_hooks" in k]
        return [type(m) for m in model.modules()], [sorted(vars(m)) for m in model.modules()], hooks

    data = torch.arange(32.0).view(8, 4) / 32
    before, own = surface(), list(map(id, model.parameters()))
    train(model, optimizer, data, 1)
    _, context = apply_speedups(model, SpeedConfig.from_dict(values).alone(), optimizer=optimizer)
    active = {decision.name for decision in context.plan if decision.active}
    train(model, optimizer, data[dist.get_rank() :: dist.get_world_size()])
    changes = [str(change) for change in context.changes()]
    context.restore()
    same = before == surface() and own == list(map(id, model.parameters()))
    train(model, optimizer, data, 1)
    return active, same, changes


TOGETHER = {"activation_checkpointing": True, "compile": {"enabled": True, "backend": "aot_eager"}}


@pytest.mark.parametrize(
    ("number", "strategy", "more"),
    [
        (2, "ddp", {}),
        (2, "fsdp2", TOGETHER),
        pytest.param(4, "ddp", TOGETHER, marks=pytest.mark.thorough),
        pytest.param(4, "fsdp2", {}, marks=pytest.mark.thorough),
    ],
)
def test_processes_train_as_one_and_undo_leaves_the_same_full_parameters(number, strategy, more):
    alone, mine = made(), made()
    data = torch.arange(32.0).view(8, 4) / 32
    train(*alone, data, 5)
    values = {"distributed": strategy, **more}
    active, same, changes = launch(on_workers, *mine, values, train, n=number)
    assert active == {*values}
    assert same
    assert "distributed" in str(changes)
    torch.testing.assert_close(mine[0].state_dict(), alone[0].state_dict())
    assert mine[1].state_dict()["state"][0]["step"] == 5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_plan_that_a_cell_leaves_in_force_ends_with_it(strategy):
    names = dict(zip(("model", "optimizer"), made(), strict=True)) | {"train": train}
    alone, data = made(), torch.arange(32.0).view(8, 4) / 32
    weight, names = names["model"][0].weight, names | {"data": data, "strategy": strategy}
    cell = """
import torch.distributed as dist
from speedkit_jupyter import SpeedConfig, apply_speedups
config = SpeedConfig.from_dict({"distributed": strategy}).alone()
context = apply_speedups(model, config, optimizer=optimizer)[1]
train(model, optimizer, data[dist.get_rank() :: 2], 1)
"""
    for _ in range(2):
        run = Launch(cell, names, 2)
        list(run.run(lambda text: None))
        train(*alone, data, 1)
        assert not run.stays
    torch.testing.assert_close(names["model"].state_dict(), alone[0].state_dict())
    assert names["optimizer"].param_groups[0]["params"][0] is names["model"][0].weight is weight


def test_a_model_that_a_cell_shards_itself_does_not_come_back():
    model, _ = made()
    before = model[0].weight.detach().clone()
    cell = "from torch.distributed.fsdp import fully_shard\nfully_shard(model)"
    run = Launch(cell, {"model": model}, 2)
    list(run.run(lambda text: None))
    assert "can't be sent" in str(run.stays)
    assert type(model) is nn.Sequential
    assert torch.equal(model[0].weight, before)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        return self.decode(self.encode(x))

    def loss(self, x):
        return (self.decode(self.encode(x).tanh()) - x).square().mean()


WAYS = [
    lambda model, x: model.loss(x).backward(),
    lambda model, x: model.encode(x).square().mean().backward(),
    lambda model, x: [part.backward() for part in [model(x).square().mean(), model(x).mean()]],
    lambda model, x: (model(x).mean() + model.loss(x)).backward(),
]


def averaged(model, data, ways):
    import torch.distributed as dist

    from speedkit_jupyter import SpeedConfig, apply_speedups

    found = []
    for way in ways:
        model.zero_grad()
        config = SpeedConfig.from_dict({"distributed": "ddp"}).alone()
        with apply_speedups(model, config)[1]:
            way(model, data[dist.get_rank() :: 2])
        found.append([parameter.grad for parameter in model.parameters()])
    return found


def test_gradients_of_any_method_and_of_each_backward_pass_are_averaged():
    model, data = Encoder(), torch.arange(32.0).view(8, 4) / 32
    for found, way in zip(launch(averaged, model, data, WAYS, n=2), WAYS, strict=True):
        model.zero_grad()
        way(model, data)
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


def accumulated(model, strategy, data, labels):
    """Return whether no_sync() kept gradients on this rank, and the final accumulated gradients."""
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from speedkit_jupyter import SpeedConfig, apply_speedups, micro_batch

    config = SpeedConfig.from_dict({"distributed": strategy})
    mine = slice(dist.get_rank(), None, 2)
    context = apply_speedups(model, config.alone())[1]
    first, last = data[mine].chunk(2)
    with context.no_sync():
        model(first).mean().backward()
    kept, every = next(one.grad for one in model.parameters()), [None, None]
    dist.all_gather_object(every, kept if kept is None else kept.sum().item())
    stayed = every[0] != every[1] or kept is None  # fsdp2 keeps the gradient elsewhere
    model(last).mean().backward()
    counted = lambda x, y: (y != -100).sum()  # noqa: E731
    loss_of = micro_batch(lambda x, y: cross_entropy(model(x), y), 2, weight=counted)
    loss_of(data[mine], labels[mine])
    context.restore()
    return stayed, [one.grad for one in model.parameters()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_accumulated_gradients_are_exchanged_once_and_are_those_of_the_whole_batch(strategy):
    model, _ = made()
    data, labels = torch.arange(32.0).view(8, 4).sin(), torch.tensor([0, 1, -100, 1, 1, -100, 0, 0])
    stayed, found = launch(accumulated, made()[0], strategy, data, labels, n=2)
    (2 * model(data).mean() + nn.functional.cross_entropy(model(data), labels)).backward()
    assert stayed
    torch.testing.assert_close(found, [one.grad for one in model.parameters()])


def test_strategies_race_on_the_users_step_and_everything_is_put_back():
    model, optimizer = made()
    names = {"model": model, "optimizer": optimizer, "x": torch.rand(8, 4)}
    before = [parameter.clone() for parameter in model.parameters()]
    step = "loss = model(x).square().mean(); loss.backward(); optimizer.step()"
    given = (step, model, [optimizer], ["single", "fsdp2"], 0.1)
    from speedkit_jupyter.extras.processes import strategy_race

    run = Launch(step, names, function=strategy_race.race, given=(given, {}))
    list(run.run(lambda text: None))
    rows = run.result
    assert [row.strategy for row in rows] == ["single", "fsdp2"]
    assert all(row.is_equal for row in rows)
    assert rows[1].memory_bytes < rows[0].memory_bytes
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert {*names} == {"model", "optimizer", "x"}
