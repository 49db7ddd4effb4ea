"""Test verify() with planted faults, with plans that only round, and with scaled losses."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, StepError, apply_speedups, verify
from speedkit_jupyter.extras.verify import verification
from speedkit_jupyter.step.step import Step

Parts = tuple[nn.Module, Any, Callable[[], None]]


def training(dropout: float = 0.0, spoiled=lambda optimizer: None) -> Parts:
    """Return a network, its optimizer and a step that calls `spoiled` before each update."""
    network = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    x, y = torch.rand(32, 6), torch.randint(3, (32,))
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        loss_fn(network(x), y).backward()
        spoiled(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return network, optimizer, step


def test_a_plan_that_only_rounds_keeps_the_curve_and_everything_is_put_back():
    network, optimizer, step = training(dropout=0.3)
    before = copy.deepcopy(network.state_dict())
    state = (torch.get_rng_state(), random.getstate())
    found = verify(step, "bf16+fused_optimizer", steps=12)
    assert found.verdict == "same"
    assert found.plan == {"precision": "bf16", "fused_optimizer": True}
    assert len(found.loss.baseline) == len(found.loss.planned) == len(found.loss.other) == 12
    assert found.loss.baseline[-1] < found.loss.baseline[0]
    assert found.loss.other != found.loss.baseline
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert not optimizer.state
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()


@pytest.mark.parametrize("factor", [-1.0, math.nan, 0.0])
def test_a_plan_that_spoils_training_is_seen(factor):
    def spoiled(optimizer: Any) -> None:
        if optimizer.param_groups[0]["fused"]:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(factor)

    assert verify(training(spoiled=spoiled)[2], "fused_optimizer", steps=20).verdict == "worse"


def test_every_run_gets_the_same_data_and_each_step_new_data():
    network, optimizer, _ = training()
    drawn: list[float] = []
    names: dict[str, Any] = {"batches": (torch.full((4, 6), float(i)) for i in range(100))}

    def run(context: Any) -> None:
        batch = next(names["batches"])
        drawn.append(float(batch[0, 0]))
        network(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = Step(run, [network], [optimizer], names=names, iterators=["batches"])
    list(verification.Verifier(step, "bf16", steps=5).run())
    assert drawn[:10] == [0.0, 1.0, 2.0, 3.0, 4.0] * 2
    assert float(next(names["batches"])[0, 0]) == 0.0


def test_the_plan_in_force_is_what_is_verified_and_stays_in_force():
    network, optimizer, step = training()
    with apply_speedups(network, SpeedConfig(precision="bf16"), optimizer=optimizer)[1] as context:
        assert verify(step, steps=4).plan["precision"] == "bf16"
        assert context.active


def test_a_plan_that_fails_is_a_verdict_and_not_a_traceback():
    def spoiled(optimizer: Any) -> None:
        if optimizer.param_groups[0]["fused"]:
            raise RuntimeError("out of luck\nand more")

    found = verify(training(spoiled=spoiled)[2], "fused_optimizer", steps=4)
    assert found.verdict == "failed"
    assert found.failure == "RuntimeError: out of luck"
    assert "out of luck" in repr(found)


def test_what_cannot_be_verified_is_one_clear_error():
    network, _, step = training()
    hidden = ((torch.rand(2, 6) for _ in range(9)),)  # an item of a tuple can't be replaced
    for run, plan, steps, told in (
        (step, "baseline", 3, "changes nothing"),
        (step, "bf16", 1, "2 steps"),
        (lambda: network(torch.rand(2, 6)), "bf16", 3, "no backward"),
        (lambda: None, "bf16", 3, "no model"),
        (lambda: network(next(hidden[0])).sum().backward(), "bf16", 3, "generator"),
    ):
        with pytest.raises(StepError, match=told):
            verify(run, plan, steps=steps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_other_baselines_begin_from_weights_moved_by_a_rounding(dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(2000).to(dtype))
    before = model.weight.detach().to(torch.complex128)
    verification.jitter([model])
    moved = (model.weight.detach().to(torch.complex128) - before).abs() / before.abs()
    assert (moved > 0).double().mean() > 0.7
    assert (
        moved.max()
        <= 1.001 * max(verification.ROUNDING, torch.finfo(dtype).eps) + torch.finfo(dtype).eps
    )


def test_the_verdict_is_the_yardsticks():
    def run(losses: list[float]) -> list[verification.Losses]:
        return [verification.Losses(ran_on=[one]) for one in losses]

    runs = [run([4.0, 3.0, 2.0, 1.0]), run([4.0, 3.1, 2.1, 1.1]), run([4.0, 3.2, 2.2, 1.0])]
    found = verification.Verification("plan", runs=runs)
    assert found.verdict == "same"
    runs[2] = runs[0]
    assert found.verdict == "worse"
    runs[1] = run([4.0, 2.9, 1.9, 0.9])
    assert found.verdict == "different"


# The modules between two linear layers; an empty list means a single linear layer.
NETS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": list,
    "mlp": lambda: [nn.GELU()],
    "dropout": lambda: [nn.ReLU(), nn.Dropout(0.05)],
    "batch norm": lambda: [nn.BatchNorm1d(64), nn.ReLU()],
}


def faulty(net, fault="", lr=1e-3, decay=0.01, dtype=torch.float32, warm_up=False):
    """Return a step that makes the fault only if the optimizer is fused."""
    torch.manual_seed(0)
    between = NETS[net]()
    layers = [nn.Linear(32, 64), *between, nn.Linear(64, 4)] if between else [nn.Linear(32, 4)]
    model = nn.Sequential(*layers).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay)
    x, y = torch.randn(64, 32, dtype=dtype), torch.randint(4, (64,))
    rate = (lambda n: (n + 1) / 10000) if warm_up else (lambda n: 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step() -> torch.Tensor:
        group: dict[str, Any] = optimizer.param_groups[0]
        kept, bad = dict(group), fault if group["fused"] else ""
        loss = nn.functional.cross_entropy((model(x) * (0.9 if bad == "logits" else 1)).float(), y)
        loss.backward()
        group["lr"] *= 3 if bad == "lr" else 1
        group["weight_decay"] *= 0 if bad == "decay" else 1
        optimizer.step()
        group.update(lr=kept["lr"], weight_decay=kept["weight_decay"])
        schedule.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.sampled(6)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(("fault", "steps"), [("lr", 12), ("logits", 40), ("decay", 60)])
def test_a_planted_fault_is_another_curve(net, fault, steps):
    step = faulty(net, fault, lr=3e-3, decay=2.0 if fault == "decay" else 0.01)
    assert verify(step, "fused_optimizer", steps=steps).verdict in ("different", "worse")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    ("way", "plan"),
    [*((way, plan) for way in ("warm-up", "usual") for plan in ("bf16", "fused_optimizer")),
     ("weights in bf16", "fused_optimizer")],
)  # fmt: skip
def test_a_plan_that_only_rounds_is_the_baselines_curve(net, way, plan):
    dtype = torch.bfloat16 if way == "weights in bf16" else torch.float32
    found = verify(faulty(net, dtype=dtype, warm_up=way == "warm-up"), plan, steps=8)
    assert found.verdict == "same", str(found)


def test_a_curve_that_may_be_anothers_is_held_against_several_baselines():
    certain = verify(faulty("linear", "lr", lr=3e-2), "fused_optimizer", steps=6)
    assert len(certain.loss.others) == 1
    unclear = verify(faulty("mlp", "logits"), "fused_optimizer", steps=3)
    assert unclear.verdict in ("different", "worse")
    assert len(unclear.loss.others) == 4
    assert "the farthest of 4" in " ".join(str(unclear).split())


SCALER = torch.amp.GradScaler("cpu", init_scale=2.0**20)


class Subclass(torch.amp.GradScaler):
    """A framework's own scaler class."""


WAYS: dict[str, tuple[Callable[[torch.Tensor], None], float]] = {
    "bare": (lambda loss: loss.backward(), 1.0),
    "GradScaler": (lambda loss: SCALER.scale(loss).backward(), 1.0),
    "a subclass": (lambda loss: Subclass("cpu").scale(loss).backward(), 1.0),
    "off": (lambda loss: torch.amp.GradScaler("cpu", enabled=False).scale(loss).backward(), 1.0),
    "in a list": (lambda loss: torch.autograd.backward(SCALER.scale([loss])), 1.0),
    "divided after": (lambda loss: (SCALER.scale(loss) / 4).backward(), 0.25),
    "divided before": (lambda loss: SCALER.scale(loss / 4).backward(), 0.25),
    "summed": (lambda loss: sum(SCALER.scale(loss) for _ in range(3)).backward(), 3.0),
    "by hand": (lambda loss: (loss * 1024).backward(), 1024.0),
}


@pytest.mark.parametrize("way", WAYS)
def test_whichever_scaler_scaled_it_the_loss_is_seen_without_its_scale(way):
    run, times = WAYS[way]
    loss = nn.Linear(3, 1)(torch.rand(4, 3)).square().mean()
    with verification.watched() as seen:
        run(loss)
    assert seen.ran_on == pytest.approx([times * loss.item()])


def test_a_checkpoints_backward_inside_the_backward_is_no_loss():
    from torch.utils.checkpoint import checkpoint

    net, x = nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True)
    with verification.watched() as seen:
        checkpoint(net, x, use_reentrant=True).sum().backward()
    assert len(seen.ran_on) == 1


def test_a_scale_that_moves_hides_no_fault():
    def verified(factor: float) -> Any:
        """Verify a loop whose loss scale doubles; `factor` scales outputs under the plan."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        x, y = torch.randn(32, 8), torch.randint(4, (32,))
        scales = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

        def step() -> None:
            out = net(x) * (factor if optimizer.param_groups[0]["fused"] else 1.0)
            scales.scale(nn.functional.cross_entropy(out, y)).backward()
            scales.step(optimizer)
            scales.update()
            optimizer.zero_grad()

        return verify(step, "fused_optimizer", steps=12)

    honest, wrong = verified(1.0), verified(0.9)
    assert honest.verdict == "same"
    assert wrong.verdict in ("different", "worse")
    assert honest.loss.baseline[0] < 3


@pytest.mark.parametrize("wrong", [0, 1])
def test_of_two_losses_in_a_step_each_is_judged_by_itself(wrong):
    nets = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(2)]
    both = nn.ModuleList(nets)
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in nets]
    x, y = torch.randn(16, 8), torch.randint(2, (16,))

    def step() -> None:
        for index, (net, optimizer) in enumerate(zip(both, optimizers, strict=True)):
            faulty = optimizer.param_groups[0]["fused"]
            # One loss rises by the factor by which the other loss falls.
            times = (1.1 if index == wrong else 1 / 1.1) if faulty else 1.0
            (times * nn.functional.cross_entropy(net(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = verify(step, "fused_optimizer", steps=8)
    assert len(found.curves) == 2
    assert found.curves[wrong].agreement == "worse"
    assert found.verdict == "worse"
    assert f"loss {wrong + 1} of 2" in " ".join(str(found).split())
