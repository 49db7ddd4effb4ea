"""distributed under the launchers that others have: the same training as in one process."""

from __future__ import annotations

import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
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
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(start if launcher == "torch" else []), str(file)]
    command += [launcher, strategy, port]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank}: {strategy}" in done.stdout + done.stderr
