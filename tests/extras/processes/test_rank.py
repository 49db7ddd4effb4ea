"""Test how ranks use GPUs, in this process and without GPUs."""

import os
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from speedkit_jupyter.extras.processes import rank as ranks
from speedkit_jupyter.extras.processes import workers


@pytest.fixture
def gpus(monkeypatch):
    """Return a function: `gpus(2)` simulates 2 GPUs and returns a list of set_device() calls."""

    def pretend(number):
        taken = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
        return taken

    return pretend


@pytest.fixture
def rank(monkeypatch):
    """Return a function: `rank(1, 2)` sets up rank 1 of 2 in this process."""
    shell = SimpleNamespace(user_ns={}, run_line_magic=lambda *words: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with warnings.catch_warnings():
        yield ranks.begin


@pytest.mark.parametrize(
    ("size", "number", "backend"), [(2, 2, "nccl"), (2, 1, "gloo"), (1, 0, "gloo")]
)
def test_nccl_needs_a_gpu_for_each_rank(gpus, monkeypatch, tmp_path, size, number, backend):
    gpus(number)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(workers.tempfile, "tempdir", str(tmp_path))
    assert workers.Workers(size).backend == backend


def test_ranks_take_the_gpus_in_turn(gpus, rank):
    taken = gpus(2)
    for number in range(3):
        rank(number, 3)
    assert taken == [0, 1, 0]


@pytest.mark.parametrize(("backend", "device"), [("nccl", torch.device("cuda", 1)), ("gloo", None)])
def test_nccl_is_bound_to_the_gpu_of_its_rank(gpus, rank, monkeypatch, backend, device):
    gpus(2)
    rank(1, 2)
    given = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **more: given.update(more))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    ranks.join("/nowhere", backend)
    assert given["device_id"] == device


@pytest.mark.parametrize(("number", "used_s"), [(0, "7"), (1, "0")])
def test_waiting_for_a_gpu_is_no_work_of_a_rank(gpus, monkeypatch, tmp_path, number, used_s):
    """Count CPU time as work only without GPUs, because waiting for CUDA uses CPU time, too."""
    gpus(number)
    monkeypatch.setattr(ranks.time, "process_time", lambda: 7.0)
    ended = threading.Event()
    monkeypatch.setattr(ended, "wait", lambda timeout: (tmp_path / "place.3").exists())
    ranks._note_place(tmp_path, 3, threading.get_ident(), ended)
    assert (tmp_path / "place.3").read_text().startswith(f"{used_s} 0\n")
