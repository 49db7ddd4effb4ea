"""Profiles and advice in a real kernel, beside generators, workers and threads."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.usefixtures("made_time"), pytest.mark.kernel, pytest.mark.slow]

SETUP = """
%load_ext speedkit_jupyter
import threading, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(net.parameters())
data = [torch.randn(32, 16) for _ in range(20)]
workers = DataLoader(TensorDataset(torch.randn(64, 16)), 8, num_workers=1)
def batches():
    for i in range(4):
        yield from (torch.randn(8, 16) * k for k in range(3))
def beside():
    other = threading.Thread(target=lambda: [sum(g for g in range(300)) for _ in range(5)])
    other.start(); net(data[0]).sum().backward(); other.join()
"""
CELLS = [
    "%%speedbench --profile --budget 0.3\nfor b in tqdm(data):\n    net(b).sum().backward()",
    "%%speedbench --profile --budget 0.3\nfor b in batches():\n    net(b).sum().backward()",
    "%%speedbench --profile --budget 0.3\nfor b, in tqdm(workers):\n    net(b).sum().backward()",
    "%%speedbench --profile --budget 0.3\nbeside()",
    "%speedkit advise --budget 0.3",
]


def test_generators_workers_and_threads_leave_the_kernel_alive():
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=300, kernel_name="python3")
    try:
        for cell in [SETUP, *CELLS]:
            reply = client.execute_interactive(cell, timeout=120, output_hook=lambda _: None)
            assert reply["content"]["status"] == "ok", (cell, reply["content"])
        assert manager.is_alive()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
