"""low_bit_optimizer: moments in few bits between the steps, plain in files and afterwards."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.optimizations.moments.narrow import all_narrow

ENTRY = named("low_bit_optimizer")
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, foreach, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "Adam, groups": lambda p: torch.optim.Adam(
        [{"params": p[:1], "lr": 3e-3}, {"params": p[1:]}], lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}  # fmt: skip


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao", reason="pip install torchao")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.LayerNorm(64))


def asked(bits: str | bool = "8bit") -> SpeedConfig:
    return SpeedConfig(low_bit_optimizer=bits).alone()


def data():
    torch.manual_seed(1)
    return torch.randn(128, 64), torch.randn(128, 64)


def trained(make, config, steps: int = 20, scheduler: bool = False):
    model, (x, y), losses = net(), data(), []
    optimizer = make([*model.parameters()])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98) if scheduler else None
    with apply_speedups(model, config, optimizer=optimizer)[1]:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if schedule:
                schedule.step()
            losses.append(float(loss.detach()))
        inside = len([*all_narrow(optimizer)])
    return losses, inside, model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_nearly_the_same_way_with_moments_in_eight_bits(torchao, name):
    plain, _, _, _ = trained(OPTIMIZERS[name], asked(False), scheduler=True)
    losses, inside, _, optimizer = trained(OPTIMIZERS[name], asked(), scheduler=True)
    assert losses[0] == plain[0]
    assert losses[-1] == pytest.approx(plain[-1], rel=0.02)
    moments = {"SGD": 1, "AdamW, foreach, amsgrad": 3}.get(name, 2)
    assert inside == 2 * moments
    assert not [*all_narrow(optimizer)]
    assert all(
        type(value) is torch.Tensor
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )


def test_in_four_bits_it_trains_too(torchao):
    losses, inside, _, _ = trained(OPTIMIZERS["AdamW"], asked("4bit"))
    assert inside == 4
    assert losses[-1] < 0.6 * losses[0]


def test_without_a_step_nothing_changes_and_small_parameters_are_stepped_to_the_bit(torchao):
    plain, narrow = (trained(OPTIMIZERS["AdamW"], asked(on), steps=1) for on in (False, "8bit"))
    for one, other in zip(plain[2].parameters(), narrow[2].parameters(), strict=True):
        assert torch.equal(one, other)  # the first step begins with moments of zero
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(data()[0]).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with apply_speedups(model, asked(), optimizer=optimizer)[1]:
        pass
    after = optimizer.state_dict()
    for number, state in before["state"].items():
        assert all(torch.equal(state[name], after["state"][number][name]) for name in state)


def test_files_copies_and_loaded_states_are_plain(torchao):
    model, (x, y) = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with apply_speedups(model, asked(), optimizer=optimizer)[1]:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved, twin = torch.load(file), copy.deepcopy(optimizer)
        assert [*all_narrow(optimizer)]
        kinds = {type(v) for s in saved["state"].values() for v in s.values()}
        assert kinds == {torch.Tensor}
        assert not [*all_narrow(twin)]
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert len([*all_narrow(optimizer)]) == 4
    other = torch.optim.AdamW(net().parameters(), lr=1e-2)
    other.load_state_dict(saved)
    assert not [*all_narrow(other)]


def test_less_memory_between_steps_and_hardly_more_within(torchao):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    optimizer, x, sizes, peaks = torch.optim.AdamW(model.parameters()), torch.rand(4, 256), [], []

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for config in (asked(False), asked()):
        with apply_speedups(model, config, optimizer=optimizer)[1]:
            step()
            tensors = memory.state_tensors([], [optimizer])
            sizes.append(memory.size(tensors))
            peaks.append(memory.needed(step, torch.device("cpu"), tensors).peak_bytes)
    assert sizes[1] < 0.3 * sizes[0]
    assert sizes[1] + peaks[1] < 0.75 * (sizes[0] + peaks[0])


def test_closures_gradient_scaling_and_optimizers_made_later(torchao):
    model, (x, y) = net(), data()
    with apply_speedups(model, asked())[1]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        first = float(optimizer.step(closure))
        assert len([*all_narrow(optimizer)]) == 4
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert float(closure()) < first
    assert not [*all_narrow(optimizer)]


def test_an_interrupted_step_leaves_moments_that_can_be_used(torchao):
    model, (x, y) = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def interrupt(*given):
        raise KeyboardInterrupt

    with apply_speedups(model, asked(), optimizer=optimizer)[1]:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        handle = optimizer.register_step_post_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        handle.remove()
        optimizer.step()
    assert not [*all_narrow(optimizer)]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_state_dict_post_hooks
    optimizer.step()


def test_auto_never_takes_it_nor_does_a_search(hardware):
    from speedkit_jupyter.tuning.candidates import candidates

    facts = Facts(optimizers=(OptimizerFacts("AdamW"),))
    decision = plan(SpeedConfig(), facts=facts)["low_bit_optimizer"]
    assert (decision.active, decision.declined) == (False, False)
    for aim in ("time", "memory"):
        found = candidates(hardware("cpu"), facts, objective=aim)
        assert not [one for one in found if ENTRY.name in one.values]


@pytest.mark.parametrize(
    ("libraries", "optimizer", "words"),
    [
        ({}, OptimizerFacts("AdamW"), "pip install torchao"),
        ({"torchao": "0.18.0"}, OptimizerFacts("LBFGS"), "only those of Adam"),
        ({"torchao": "0.18.0"}, OptimizerFacts("AdamW", capturable=True), "capturable"),
        ({"torchao": "0.18.0"}, OptimizerFacts("AdamW", own_step=False), "not torch's own"),
    ],
)
def test_it_is_declined_with_the_reason(hardware, libraries, optimizer, words):
    machine = hardware("cpu").model_copy(update={"libraries": libraries})
    decision = plan(asked(), machine, Facts(optimizers=(optimizer,)))["low_bit_optimizer"]
    assert (decision.active, decision.declined) == (False, True)
    assert words in decision.reason


def test_the_code_names_torchaos_own_optimizer(hardware):
    machine = hardware("cpu").model_copy(update={"libraries": {"torchao": "0.18.0"}})
    decided = plan(asked(), machine, Facts(optimizers=(OptimizerFacts("AdamW"),)))
    assert "torchao.optim import AdamW8bit" in code(decided)


def test_a_comparison_shows_what_it_saves_and_puts_the_moments_back(torchao):
    model, (x, y) = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    step()
    before = copy.deepcopy(optimizer.state_dict())
    found = benchmark(
        step, "baseline,low_bit_optimizer:8bit", model=model, optimizer=optimizer, budget_s=20
    )
    record = found.records[1]
    assert record.failure is None
    assert record.memory.state_bytes < found.baseline.memory.state_bytes
    after = optimizer.state_dict()
    for number, state in before["state"].items():
        assert all(torch.equal(state[name], after["state"][number][name]) for name in state)
