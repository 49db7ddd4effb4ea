"""Models in torch's wrappers for several processes are put back as bare ones are."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("made_time")

PROGRAM = """
import sys, tempfile, time, warnings
import torch
import torch.distributed as dist
from torch import nn
from speedkit_jupyter import StateWarning
from speedkit_jupyter.measure.subject.from_function import step_of

store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
if sys.argv[1] == "fully_shard":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
elif sys.argv[1] == "DistributedDataParallel":
    net = nn.parallel.DistributedDataParallel(net)
else:
    net = nn.DataParallel(net)
optimizer, x = torch.optim.AdamW(net.parameters()), torch.randn(8, 8)


def step():
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state():
    return str([net.state_dict(), optimizer.state_dict(), torch.get_rng_state().tolist()])


step()
before = state()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", StateWarning)
    with step_of(step).guarded() as guard:
        for _ in range(3):
            step()
            guard.state.restore()
assert state() == before
print([str(one.message) for one in caught if one.category is StateWarning])
step()
assert state() != before
time.sleep(1)  # gloo's threads let go of their last tensors before Python ends
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["fully_shard", "DistributedDataParallel", "DataParallel"])
def test_a_step_of_a_wrapped_model_is_measured_and_put_back(kind: str) -> None:
    command = [sys.executable, "-c", PROGRAM, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
