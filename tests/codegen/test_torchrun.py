"""The script for torchrun, run by torchrun, and the batch file for Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, code, plan
from speedkit_jupyter.catalog.facts.model import OptimizerFacts

PLACE = "# Your own lines go here"
YOURS = """
from torch import nn
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
data = torch.arange(64.0).view(16, 4) / 64
loader = DataLoader(torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True)), 4)
loss_fn = nn.functional.mse_loss
"""
SAVE = """
    whole = {name.removeprefix("module."): value for name, value in net.state_dict().items()}
    whole = {name: getattr(one, "full_tensor", lambda: one)() for name, one in whole.items()}
    torch.save(whole, f"{dist.get_rank()}.pt")
    dist.barrier()"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.5)


def written(strategy="auto", form="torchrun"):
    net, optimizer = made()
    config = SpeedConfig(distributed=strategy).alone()
    facts = Facts.read(net, [optimizer])
    return code(plan(config, facts=facts), form, {"optimizer": optimizer}, name="net")


def filled(text: str, folder: Path) -> Path:
    """Return the script with the user's own lines in their place."""
    lines = [YOURS if line.startswith(PLACE) else line for line in text.splitlines()]
    file = folder / "train.py"
    file.write_text("\n".join(lines).replace("    dist.barrier()", SAVE.strip("\n")))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_under_torchrun_train_as_one(tmp_path, strategy):
    file = filled(written(strategy), tmp_path)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(file)]
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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hybrid"])
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
    assert ("mesh=mesh" in text) == (strategy == "hybrid")
    (tmp_path / "train.py").write_text(text)
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F,I"]
    names = 'builtins=["model", "loader", "loss_fn"]'
    done = subprocess.run([*check, "--config", names, str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stdout


def test_what_torchrun_can_not_do_is_said_with_the_next_step():
    with pytest.raises(SpeedKitError, match="no optimizer: take --as torch"):
        code(plan(facts=Facts(parameters=5)), "torchrun")
    net, _ = made()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    facts = Facts.read(net, [optimizer])
    with pytest.raises(SpeedKitError, match="`distributed` is off"):
        code(plan(SpeedConfig(distributed=False), facts=facts), "torchrun", [optimizer])
    with pytest.raises(SpeedKitError, match="optimizer can't be made anew for a sharded model"):
        code(plan(SpeedConfig(distributed="fsdp2"), facts=facts), "torchrun", [optimizer])


def test_slurm_starts_a_process_for_each_gpu_of_a_node(hardware):
    facts = Facts(parameters=10**6).moved("cuda")
    batch = code(plan(SpeedConfig(), hardware("a100"), facts), "slurm")
    assert subprocess.run(["bash", "-n"], input=batch, text=True).returncode == 0
    assert "--gpus-per-node=1" in batch
    assert '--nnodes "$SLURM_NNODES" --nproc-per-node 1' in batch
    assert "gpus" not in written(form="slurm")


def ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True).returncode


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them, by the name of each one's end of it."""
    names = [f"speedkit{os.getpid() % 10**5}{letter}" for letter in "ab"]
    if not shutil.which("ip") or any(ip("netns", "add", name) for name in names):
        pytest.skip("network namespaces are not allowed here")
    try:
        ends = [name[4:] for name in names]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            assert not ip("-n", name, "link", "set", end, "up")
        yield dict(zip(names, ends, strict=True))
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_hosts_go_on_from_the_last_checkpoint_once_one_that_was_cut_off_is_back(
    tmp_path, hosts
):
    file = filled(written(), tmp_path)
    text = file.read_text().replace("train(loader, loss_fn)\n", "train(loader, loss_fn, 10**9)\n")
    limit = "init_process_group(timeout=__import__('datetime').timedelta(seconds=5))"
    file.write_text(text.replace("init_process_group()", limit))
    options = next(line for line in text.splitlines() if "--nnodes" in line).split()[4:-2]
    running = []
    for number, (name, end) in enumerate(hosts.items(), 1):
        command = ["ip", "netns", "exec", name, *TORCHRUN, *options, "10.77.0.1:29500"]
        # A namespace has no host name of its own.
        command += ["--rdzv-conf", f"is_host={2 - number}", "--local-addr", f"10.77.0.{number}"]
        command += ["--nproc-per-node", "1"]
        log, env = tmp_path / f"{number}.log", os.environ | {"GLOO_SOCKET_IFNAME": end}
        with log.open("w") as out:
            words = [*command, str(file)]
            running.append(subprocess.Popen(words, stdout=out, stderr=out, env=env, cwd=tmp_path))
    logs = [tmp_path / "1.log", tmp_path / "2.log"]
    other, end = [*hosts.items()][1]

    def epochs():
        lines = "\n".join(log.read_text() for log in logs).splitlines()
        return [int(line.split()[1][:-1]) for line in lines if line.startswith("epoch ")]

    try:
        wait_for(lambda: len(epochs()) > 2)
        ip("-n", other, "link", "set", end, "down")
        wait_for(lambda: all(" ends, because another" in log.read_text() for log in logs))
        before = len(epochs())
        ip("-n", other, "link", "set", end, "up")
        wait_for(lambda: len(epochs()) > before + 2)
    finally:
        for one in running:
            for process in [*psutil.Process(one.pid).children(recursive=True), one]:
                with suppress(psutil.Error):
                    process.kill()
            one.wait(10)
    assert epochs()[before] in (epochs()[before - 1], epochs()[before - 1] + 1)
    for log in logs:
        said = [line for line in log.read_text().splitlines() if " ends, because" in line]
        assert len(said) == 1
        assert "Traceback" not in log.read_text().partition(said[0])[0]


def wait_for(done: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)
