"""`python -m speedkit_jupyter.check`: each function in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

import speedkit_jupyter
from speedkit_jupyter import SpeedKitError, check
from speedkit_jupyter.extras.check.inputs import CallInputs
from speedkit_jupyter.extras.check.processes import RemoteSide

FILE = """
import os, sys, threading, time
import torch

print("nor this")
os.write(1, b"nor that")

def inputs(size):
    return torch.randn(size), torch.rand(size[-1])

def reference(x, weight):
    return torch.softmax(x, -1) * weight

def right(x, weight):
    print("not in the JSON")
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True) * weight

def ends(x, weight):
    os._exit(7)

def conjugated(x):
    return x.is_conj()

def nothing(x, weight):
    return None

def stopped(x, weight):  # no time passes on its own clock
    time.perf_counter = time.monotonic = lambda: 0.0
    time.sleep(0.002)
    return reference(x, weight)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.inner(x).relu()

class Rewritten(Model):
    def forward(self, x):
        return (x @ self.inner.weight.t() + self.inner.bias).clamp(min=0)

def get_inputs():
    return [torch.randn(16, 8)]
"""


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(FILE)
    return path


def test_the_name_is_the_function_and_the_file_is_for_the_command_line():
    with pytest.raises(ImportError, match="is the function"):
        importlib.import_module("speedkit_jupyter.check")
    assert speedkit_jupyter.check is check
    assert check.__module__ == "speedkit_jupyter.extras.check.api"


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("kernels.py", "neither"),
        ("kernels.py:", "must name a function"),
        ("nowhere.py:f", "no file"),
        pytest.param("{}:rihgt", "Did you mean 'right'", marks=pytest.mark.slow),
    ],
)
def test_what_can_not_be_found_is_said(kernels, candidate, message):
    with pytest.raises(SpeedKitError, match=message):
        check(candidate.format(kernels), f"{kernels}:reference", f"{kernels}:inputs", sizes="small")


def run(kernels, candidate, *more, reference="reference"):
    words = [f"{kernels}:{candidate}", f"{kernels}:{reference}", "--sizes", "small,odd", *more]
    command = [sys.executable, "-m", "speedkit_jupyter.check", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_right_one_passes(kernels):
    done = run(kernels, "right", "--json", "--budget", "8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["isolated"]
    small, odd = found["sizes"]
    assert small["speedup"] > 0
    assert odd["skipped"] or odd["speedup"] > 0  # a busy machine has no time for it


@pytest.mark.slow
@pytest.mark.thorough
def test_modules_have_the_same_weights(kernels):
    words = {"reference": "Model"}
    done = run(kernels, "Rewritten", "--inputs", f"{kernels}:get_inputs", **words)
    assert done.returncode == 2
    assert "sizes need a function of a size" in done.stderr
    found = check(f"{kernels}:Rewritten", f"{kernels}:Model", f"{kernels}:get_inputs", budget_s=2)
    assert found.passed, found.faults
    names = {one.name for one in found.sizes[0].agreements}
    assert {"gradient of inner.weight", "gradient of inner.bias", "gradient of x"} <= names


@pytest.mark.slow
def test_a_process_that_ends_is_a_fault(kernels):
    done = run(kernels, "ends", "--budget", "2")
    assert done.returncode == 1, done.stderr
    assert "ends is wrong" in done.stdout
    assert "its process ended" in done.stdout


@pytest.mark.slow
def test_what_is_not_checked_has_a_status_of_its_own(kernels):
    done = run(kernels, "nothing", "--json", reference="nothing")
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["verdict"] == "not checked"


@pytest.mark.slow
def test_a_process_is_stopped_between_questions_and_keeps_the_conjugate_bit(kernels):
    with RemoteSide(f"{kernels}:conjugated", gradients=False) as side:
        process = psutil.Process(side._process.pid)
        side.prepare([CallInputs({"x": torch.randn(4, dtype=torch.complex64).conj()}, True)])
        assert side.run() > 0
        assert side.take()[0].values["output"].item() is True
        while os.name == "posix" and process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    assert not process.is_running()


@pytest.mark.slow
@pytest.mark.real_time
def test_the_clock_is_not_the_candidates(kernels):
    found = check(
        *(f"{kernels}:{name}" for name in ("stopped", "reference", "inputs")),
        sizes="small",
        budget_s=2,
    )
    (one,) = found.sizes
    assert "it replaces time.perf_counter" in str(found.faults)
    assert one.ratio is None
