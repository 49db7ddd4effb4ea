"""The script for torchrun, run by torchrun."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, code, plan
from speedkit_jupyter.catalog.facts.model import OptimizerFacts

PLACE = "# Put your own lines here"
YOURS = """
from torch import nn
torch.manual_seed(dist.get_rank())
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
data = torch.arange(64.0).view(16, 4) / 64
loader = DataLoader(torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True)), 4)
loss_fn = nn.functional.mse_loss
"""
SAVE = """
    whole = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    whole = {name: getattr(one, "full_tensor", lambda: one)() for name, one in whole.items()}
    torch.save(whole, f"{dist.get_rank()}.pt")
    dist.barrier()"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.5)


def written(strategy):
    net, optimizer = made()
    config = SpeedConfig(distributed=strategy).alone()
    facts = Facts.read(net, [optimizer])
    return code(plan(config, facts=facts), "torchrun", {"optimizer": optimizer}, name="net")


def filled(text: str, folder: Path) -> Path:
    """Return the script with the user's own lines in their place."""
    lines = [YOURS if line.startswith(PLACE) else line for line in text.splitlines()]
    file = folder / "train.py"
    file.write_text("\n".join(lines).replace("    dist.barrier()", SAVE.strip("\n")))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_under_torchrun_train_as_one(tmp_path, strategy):
    command = [*TORCHRUN, "--nproc-per-node", "2", str(filled(written(strategy), tmp_path))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 1: loss" in done.stdout
    net, optimizer = made()
    data = torch.arange(64.0).view(16, 4) / 64
    for batch in data.split(8):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(batch), batch.sum(1, keepdim=True)).backward()
        optimizer.step()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), dict(net.state_dict()))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("machine", ["cpu", "t4", "a100"])
def test_the_script_is_whole_but_for_the_users_own_lines(hardware, tmp_path, machine, strategy):
    facts = Facts(parameters=10**6, block_classes=("Block",), optimizers=(OptimizerFacts("AdamW"),))
    facts = replace(facts, processes=16, hosts=2)
    here = hardware(machine)
    facts = facts.moved("cuda:0") if here.accelerators else facts
    options = {"strategy": strategy, "reduce": "bf16"}
    config = SpeedConfig.from_dict({"distributed": options, "compile": True})
    text = code(plan(config, here, facts), "torchrun")
    assert ("set_device_index" in text) == ('.to("cuda")' in text) == bool(here.accelerators)
    assert '"cuda:' not in text
    assert "torch.compile" not in text
    hooked = strategy == "ddp" and bool(here.accelerators)  # torch has no such hook on CPUs
    assert ("bf16_compress_hook)" in text) == hooked
    assert ("mp_policy=" in text) == (strategy != "ddp")
    pytest.importorskip("ruff")
    (tmp_path / "train.py").write_text(text)
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F,I"]
    names = 'builtins=["model", "loader", "loss_fn"]'
    done = subprocess.run([*check, "--config", names, str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stdout


def test_what_torchrun_can_not_do_is_said_with_the_next_step():
    with pytest.raises(SpeedKitError, match="no optimizer: use --as torch"):
        code(plan(facts=Facts(parameters=5)), "torchrun")
    net, _ = made()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    facts = Facts.read(net, [optimizer])
    with pytest.raises(SpeedKitError, match="`distributed` is off"):
        code(plan(SpeedConfig(distributed=False), facts=facts), "torchrun", [optimizer])
    with pytest.raises(SpeedKitError, match="optimizer can't be recreated for a sharded model"):
        code(plan(SpeedConfig(distributed="fsdp2"), facts=facts), "torchrun", [optimizer])
