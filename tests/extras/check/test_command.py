"""`python -m speedkit_jupyter.check`: functions and modules by file and name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import speedkit_jupyter
from speedkit_jupyter import SpeedKitError, check

FILE = """
import os
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

def infinite(x, weight):
    return reference(x, weight) / 0

def nothing(x, weight):
    return None

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
    patch = "torch.Tensor.isfinite = lambda tensor: tensor == tensor\n"
    (tmp_path / "patching.py").write_text(FILE + patch)
    return path


def test_the_name_is_the_function_and_the_file_is_for_the_command_line():
    with pytest.raises(ImportError, match="is the function"):
        importlib.import_module("speedkit_jupyter.check")
    assert speedkit_jupyter.check is check
    assert check.__module__ == "speedkit_jupyter.extras.check.api"


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("kernels.py:", "must name a function"),
        ("nowhere.py:f", "no file"),
        ("{}:rihgt", "Did you mean 'right'"),
    ],
)
def test_what_can_not_be_found_is_said(kernels, candidate, message):
    with pytest.raises(SpeedKitError, match=message):
        check(candidate.format(kernels), lambda x: x, lambda: None)


def run(kernels, candidate, reference="reference"):
    words = [f"{kernels.parent}/{candidate}", f"{kernels}:{reference}", "--sizes", "small"]
    command = [sys.executable, "-m", "speedkit_jupyter.check", *words, "--json", "--budget", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("candidate", "reference", "status", "verdict"),
    [
        ("patching.py:right", "reference", 0, "right"),
        ("patching.py:infinite", "reference", 1, "wrong"),
        ("kernels.py:nothing", "nothing", 3, "not checked"),
    ],
)
def test_the_verdict_is_the_status_and_files_print_to_stderr(
    kernels, candidate, reference, status, verdict
):
    done = run(kernels, candidate, reference)
    assert done.returncode == status, done.stderr
    assert json.loads(done.stdout)["verdict"] == verdict


@pytest.mark.slow
def test_an_error_is_one_line(kernels):
    done = run(kernels, "kernels.py:rihgt")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("Did you mean 'right'?")


def test_modules_have_the_same_weights(kernels):
    found = check(f"{kernels}:Rewritten", f"{kernels}:Model", f"{kernels}:get_inputs", budget_s=0.1)
    assert found.passed, found.faults
    names = {one.name for one in found.sizes[0].agreements}
    assert {"gradient of inner.weight", "gradient of inner.bias", "gradient of x"} <= names
