"""Plans that compute the same as the user's step are never called wrong."""

import weakref
from queue import SimpleQueue

import pytest
import torch
from _nets import net
from planted import examined, word
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from training import is_lowered, training_step

RIGHT = ("exact", "rounding")


def squares(model, batches):
    return [lambda x=x: model(x).square().mean() for x in batches]


@pytest.mark.parametrize(("kind", "batches"), [("AdamW", 9), ("Adam", 14)])
def test_fused_adam_is_right_however_many_steps_a_cell_makes(kind, batches):
    # The gradient of the keys' bias is zero in theory, so rounding decides its signs.
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 1e-3)
    step = training_step(optimizer, *squares(model, torch.randn(batches, 4, 8, 32)))
    (found,) = examined(step, ["fused_optimizer"], model, optimizer).records[1:]
    assert word(found) in RIGHT, found.accuracy


def adversarial():
    """Return a GAN's step and its generator, whose first bias has a gradient of zero in theory."""
    generator = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    models, x = {"G": generator, "D": critic}, torch.randn(32, 16)
    optimizers = {name: torch.optim.Adam(one.parameters(), 1e-4) for name, one in models.items()}

    def step():
        for name in "DDG":
            drawn = critic(models["G"](torch.randn(32, 16))).mean()
            loss = drawn - critic(x).mean() if name == "D" else -drawn
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
        return loss

    return step, generator


def test_a_fault_is_told_by_the_names_of_the_code():
    step, generator = adversarial()
    generator[1].bias.register_hook(lambda one: one * torch.get_num_threads())
    found = examined(step, ["threads:2"]).records[1].accuracy
    assert found.verdict == "wrong"
    assert "gradient of models['G'].1.bias" in found.reason


def test_gradients_whose_terms_cancel_are_no_fault_of_a_layout():
    """Give equal samples opposite signs, so gradients cancel and only rounding errors remain."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1),
    )  # fmt: skip
    x, signs = torch.randn(4, 3, 32, 32).repeat_interleave(2, 0), torch.tensor([1.0, -1.0] * 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = training_step(optimizer, lambda: 1 + (model(x).flatten() * signs).mean())
    for found in examined(step, ["channels_last", "bf16+channels_last"], model, optimizer).records:
        assert word(found) in RIGHT, found.accuracy


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("norm", "views"), [(nn.BatchNorm1d, False), (nn.LayerNorm, True)])
def test_a_net_in_distributed_data_parallel_is_judged_as_the_bare_one(norm, views):
    inner = nn.Sequential(nn.Linear(32, 64), norm(64), nn.ReLU(), nn.Linear(64, 10))
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(64, 32), torch.randint(10, (64,))
    step = training_step(optimizer, lambda: functional.cross_entropy(model(x), y))
    for found in examined(step, ["bf16", "fused_optimizer"], model, optimizer).records[1:]:
        assert word(found) in RIGHT, found.accuracy


@pytest.mark.usefixtures("one_process")
def test_a_sharded_net_is_not_called_wrong_and_trains_on():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Embedding(50, 32), layer, nn.Linear(32, 10))
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randint(50, (8, 6)), torch.randint(10, (48,))
    step = training_step(optimizer, lambda: functional.cross_entropy(model(x).flatten(0, 1), y))
    for found in examined(step, ["bf16", "fused_optimizer"], model, optimizer).records[1:]:
        assert word(found) != "wrong", found.accuracy
    step()


LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", ["attention", "gru", "residual"])
@pytest.mark.parametrize("how", ["autocast to bf16", "autocast to fp16", "parameters in bf16"])
def test_a_step_that_lowers_its_precision_itself_is_judged_by_what_that_rounds(name, how):
    model, forward, loss = net(name)
    dtype, optimizer = LOWER[how[-4:]], torch.optim.AdamW(model.train().parameters(), 1e-3)
    if how.startswith("parameters"):
        model.to(dtype)
        model.register_forward_pre_hook(
            lambda _, given: tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
        )

    def step():
        with torch.autocast("cpu", dtype, enabled=how.startswith("autocast")):
            value = loss(forward())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    plans = ["channels_last", "fused_optimizer", "sdpa:math"]
    for record in examined(step, plans, model, optimizer).records:
        assert word(record) in RIGHT or record.failure, record.accuracy


def test_that_dropout_was_off_in_the_check_is_said():
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    step = training_step(optimizer, *squares(model, torch.rand(1, 8, 16)))
    found = examined(step, ["bf16"], model, optimizer)
    assert found.dropout_off
    assert "Dropout was off in the accuracy check" in found.report().to_html()
    assert model[1].p == 0.5


def test_a_failed_variant_keeps_nothing_of_its_step_alive():
    model = nn.Linear(16, 16)
    held: SimpleQueue = SimpleQueue()  # measurements don't restore queues

    class Large:
        """Stand-in for a large tensor in a frame of the failing step."""

    def step():
        large = Large()
        held.put(weakref.ref(large))
        if is_lowered(model):
            raise torch.OutOfMemoryError("out of memory")
        return model(torch.rand(2, 16))

    assert "OutOfMemoryError" in examined(step, ["bf16"], model).records[1].failure
    seen = [held.get() for _ in range(held.qsize())]
    assert len(seen) > 2
    assert all(one() is None for one in seen)
