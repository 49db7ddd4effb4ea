"""Plans that compute the same as the user's step are never called wrong."""

from __future__ import annotations

import time

import pytest
import torch
from planted import examined, word
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

RIGHT = ("exact", "rounding")


def epoch(model, optimizer, batches, wait_s=0.0):
    """A cell that trains on several batches, one optimizer step each."""

    def step():
        time.sleep(wait_s)
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return step


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("batches", [9, 14])
def test_fused_adam_is_right_however_many_steps_a_cell_makes(kind, batches):
    torch.manual_seed(0)
    # The gradient of the keys' bias is zero in theory, so that rounding decides its signs.
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-3)
    step = epoch(model, optimizer, torch.randn(batches, 4, 8, 32))
    (found,) = examined(step, ["fused_optimizer"], model, optimizer).records[1:]
    assert word(found) in RIGHT, found.accuracy


@pytest.mark.real_time
def test_how_long_a_step_takes_does_not_change_its_verdict():
    verdicts = []
    for wait_s in (0.0, 0.06):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 4))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        step = epoch(model, optimizer, torch.randn(4, 16, 20), wait_s)
        found = examined(step, ["fused_optimizer", "bf16"], model, optimizer).records[1:]
        verdicts.append([(word(record), record.accuracy.explained_gradient) for record in found])
    assert verdicts[0] == verdicts[1]
    assert all(verdict in RIGHT for verdict, _ in verdicts[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_count_of_hits_that_rounding_moves_is_not_wrong(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches, labels = torch.randn(9, 64, 32), torch.randint(10, (9, 64))

    def step():
        hits = 0
        for x, y in zip(batches, labels, strict=True):
            optimizer.zero_grad()
            out = model(x)
            functional.cross_entropy(out, y).backward()
            optimizer.step()
            hits += int((out.argmax(1) == y).sum())
        return hits

    (found,) = examined(step, ["bf16"], model, optimizer).records[1:]
    assert word(found) != "wrong", found.accuracy


class ConvNext(nn.Module):
    """(N, 16, H, W) to the same: convolved channel by channel, then widened and narrowed."""

    def __init__(self):
        super().__init__()
        self.deep, self.norm = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        out = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + self.narrow(functional.gelu(self.wide(out))).permute(0, 3, 1, 2)


def stem(act):
    return [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), act]


BLOCKS = {
    "efficientnet": lambda: stem(nn.SiLU()),
    "mobilenet": lambda: [
        *stem(nn.ReLU6()), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
        nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16),
    ],
    "convnext": lambda: [nn.Conv2d(3, 16, 4, 4), ConvNext()],
}  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_whose_terms_cancel_are_no_fault_of_a_layout(one_thread, block):
    """Half of the batch pulls one way, half the other: kernels leave different rests of zero."""
    torch.manual_seed(0)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1))
    model = nn.Sequential(*BLOCKS[block](), *head)
    x, signs = torch.randn(4, 3, 32, 32).repeat_interleave(2, 0), torch.tensor([1.0, -1.0] * 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        (1 + (model(x).flatten() * signs).mean()).backward()
        optimizer.step()

    for found in examined(step, ["channels_last", "bf16+channels_last"], model, optimizer).records:
        assert word(found) in RIGHT, found.accuracy


@pytest.fixture
def one_process(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, nn.Identity])
@pytest.mark.parametrize("views", [False, True])
def test_a_net_in_distributed_data_parallel_is_judged_as_the_bare_one(norm, views):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 64), norm(64), nn.ReLU(), nn.Linear(64, 10))
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(64, 32), torch.randint(10, (64,))

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for found in examined(step, ["bf16", "fused_optimizer"], model, optimizer).records[1:]:
        assert word(found) in RIGHT, found.accuracy


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("seed", range(2))
def test_a_sharded_net_is_not_called_wrong_and_trains_on(seed):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Embedding(50, 32), layer, nn.Linear(32, 10))
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randint(50, (8, 6)), torch.randint(10, (48,))

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(x).flatten(0, 1), y).backward()
        optimizer.step()

    for found in examined(step, ["bf16", "fused_optimizer"], model, optimizer).records[1:]:
        assert word(found) != "wrong", found.accuracy
    step()


def test_a_frozen_part_in_torchscript_is_judged():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
            self.backbone = torch.jit.freeze(torch.jit.script(backbone))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.backbone(x))

    torch.manual_seed(0)
    model, x = Headed(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for found in examined(step, ["fused_optimizer"], model, optimizer).records:
        assert word(found) in RIGHT, found.accuracy
