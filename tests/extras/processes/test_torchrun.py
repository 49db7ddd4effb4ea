"""Test decisions about `distributed`, its code, and training under each launcher."""

import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from decisions import check_code
from torch import nn

from speedkit_jupyter import Facts, SpeedConfig, SpeedKitError, code, plan
from speedkit_jupyter.catalog import named
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
    """Write the script with the user's lines filled in, and return its path."""
    lines = [YOURS if line.startswith(PLACE) else line for line in text.splitlines()]
    file = folder / "train.py"
    file.write_text("\n".join(lines).replace("    dist.barrier()", SAVE.strip("\n")))
    return file


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
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


TWO = Facts(processes=2, parameters=1000, block_classes=("Block",))
BIG = replace(TWO, parameters=2 * 10**9, device="cuda:0", devices=("cuda:0",))


@pytest.mark.parametrize(
    ("value", "facts", "machine", "strategy", "reason"),
    [
        ("auto", Facts(), "cpu", False, "one process"),
        ("ddp", Facts(), "cpu", False, "one process"),
        ("auto", TWO, "cpu", "ddp", "fits into each rank"),
        ("auto", BIG, "t4", "fsdp2", "each of 2 holds a part"),
        ("fsdp2", TWO, "cpu", "fsdp2", "over 2 ranks"),
        ("ddp", BIG, "t4", "ddp", "over PCIe, `reduce: bf16`"),
        ("auto", replace(TWO, launcher="Accelerate"), "cpu", False, "Accelerate spreads"),
        ("ddp", replace(TWO, launcher="Accelerate"), "cpu", "ddp", "over 2 ranks"),
        ("ddp", replace(TWO, launcher="Lightning"), "cpu", False, "Lightning spreads"),
        ("ddp", replace(TWO, compiled="in place"), "cpu", False, "compiled"),
    ],
)
def test_memory_and_hosts_decide_with_a_reason(hardware, value, facts, machine, strategy, reason):
    request = SpeedConfig(distributed=value).request("distributed")
    decision = named("distributed").decide(request, hardware(machine), facts)
    assert decision.value == strategy
    assert decision.active is bool(strategy)
    assert reason in decision.reason


def test_the_plan_is_written_as_plain_torch():
    for strategy, call in ("ddp", "DistributedDataParallel(model"), ("fsdp2", "fully_shard(model"):
        check_code("torch", {"distributed": strategy}, "cpu", TWO, call)


SCRIPT = """
import sys
import time


def train():
    import torch
    import torch.distributed as dist
    from torch import nn

    from speedkit_jupyter import SpeedConfig, apply_speedups

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    data, models = torch.arange(32.0).view(8, 4) / 32, []
    for is_spread in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        config = SpeedConfig(distributed=STRATEGY if is_spread else False).alone()
        with apply_speedups(model, config, optimizer=optimizer)[1] as context:
            for _ in range(3):
                optimizer.zero_grad()
                model(data[dist.get_rank() :: 2] if is_spread else data).square().mean().backward()
                optimizer.step()
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other)
    print(f"rank {dist.get_rank()}: {context.plan['distributed'].value}", flush=True)
    dist.barrier()
    time.sleep(1)  # gloo's threads let go of their last tensors before Python ends
    dist.destroy_process_group()


HOW, STRATEGY, PORT = sys.argv[1:]
if __name__ == "__main__" and HOW == "accelerate":
    from accelerate import notebook_launcher

    notebook_launcher(train, num_processes=2, use_port=PORT)
elif __name__ == "__main__":
    if HOW == "lightning":
        from lightning.fabric import Fabric

        Fabric(accelerator="cpu", devices=2, strategy="ddp").launch()
    train()
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("launcher", ["torch", "accelerate", "lightning"])
def test_two_processes_of_any_launcher_train_as_one(tmp_path, launcher, strategy):
    if find_spec(launcher) is None:
        pytest.skip(f"needs {launcher}")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = [*TORCHRUN, "--nproc-per-node=2"] if launcher == "torch" else [sys.executable]
    command = [*start, str(file), launcher, strategy, port]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank}: {strategy}" in done.stdout + done.stderr
