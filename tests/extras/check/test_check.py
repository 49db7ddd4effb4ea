"""Test that only right rewrites pass `check()`, from Python and from the command line."""

import importlib
import itertools
import json
import random
import subprocess
import sys

import pytest
import torch
from _rewrites import CHEATS, FAULTS, RIGHT, attention, exponentials, one, qkv, sdpa, softmax

import speedkit_jupyter
from speedkit_jupyter import SpeedKitError, StepError, check

ENOUGH_S = 1e4  # on a clock that each reading advances


def checked(case, **more):
    sizes = {"small": (1, 2, 16, 16), "odd": (2, 3, 37, 24)}
    more |= {"sizes": sizes, "budget_s": ENOUGH_S}
    return check(case.candidate, case.reference, case.inputs, **more)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_a_right_rewrite_passes(case):
    found = checked(case)
    assert found.passed, found.faults


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_planted_fault_is_found(case):
    found = checked(case)
    assert found.faults
    assert not found.passed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CHEATS, ids=str)
def test_a_cheat_is_found(case):
    with torch.no_grad():
        found = checked(case, gradients=False)
    assert found.faults
    assert not found.passed


def test_what_passed_says_how_fast_and_how_far_off_and_is_json():
    found = check(sdpa, attention, qkv, sizes="small,odd", budget_s=ENOUGH_S)
    data = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert data["passed"]
    assert data["candidate"] == "partial"
    assert [one["name"] for one in data["sizes"]] == ["small", "odd"]
    for size in data["sizes"]:
        assert size["speed"] == "same"  # on this clock, all calls take equally long
        assert len(size["reference_times_s"]) == len(size["candidate_times_s"]) > 8
        names = {a["name"] for a in size["agreements"]}
        assert names == {"output", *map("gradient of {}".format, "qkv")}
        assert all(a["excess"] < 0.5 for a in size["agreements"])
    assert found.rows()[0]["speedup"] == 1.0


def test_one_value_that_cancels_in_a_call_is_no_fault():
    draws = itertools.count()

    def three(size):
        """Return three values; from the third call on, the first two nearly cancel."""
        a, b, c = torch.rand(size) + 1, torch.rand(size) + 1, torch.rand(size)
        return (a, b, c) if next(draws) < 2 else (a, c * 1e-6 - a, c * 1e-6)

    found = check(
        lambda a, b, c: a + (b + c), lambda a, b, c: (a + b) + c, three, sizes={"one": (1, 1)},
        budget_s=ENOUGH_S,
    )  # fmt: skip
    assert found.passed, found.faults


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (lambda size: "text", {}, "tensors in a tuple or a dict, not str"),
        (one, {"sizes": "smal"}, "choose from single, small"),
        ((torch.rand(4),), {}, "inputs must be a function"),
        (lambda: torch.rand(4), {"sizes": "small"}, "sizes need a function of a size"),
    ],
)
def test_what_can_not_be_drawn_is_said(inputs, options, message):
    with pytest.raises(SpeedKitError, match=message):
        check(softmax, softmax, inputs, budget_s=ENOUGH_S, **options)


def test_an_error_of_the_candidate_is_a_fault_and_one_of_the_reference_is_raised():
    def raises(x):
        raise ValueError("not today")

    assert check(raises, softmax, one, sizes="small").faults == ["small: ValueError: not today"]
    with pytest.raises(ValueError, match="not today"):
        check(softmax, raises, one, sizes="small")


def test_an_unsteady_reference_is_refused():
    draw = random.SystemRandom().random  # check() can't seed it
    with pytest.raises(StepError, match="another result each time"):
        check(softmax, lambda x: x * draw(), one, sizes="small", budget_s=ENOUGH_S)


def test_a_size_without_time_or_memory_is_named(made_time):
    def reference(x):
        if x.numel() > 1e6:
            raise MemoryError
        made_time.sleep(x.numel() / 1e3)
        return softmax(x)

    sizes = {"single": (1, 1, 1, 16), "odd": (2, 3, 37, 24), "large": (4, 16, 1024, 64)}
    found = check(reference, reference, one, sizes=sizes, budget_s=100, gradients=False)
    assert [bool(size.skipped) for size in found.sizes] == [False, True, True]
    assert "odd is skipped: takes about" in repr(found)
    assert "large is skipped: out of memory" in repr(found)
    assert found.verdict == "right"


def test_what_nothing_can_be_said_about_is_said():
    def noise(x):
        return (x + 1e6) - 1e6 - x

    found = check(lambda x: 0 * x, noise, one, sizes="small", budget_s=ENOUGH_S)
    assert "output is not judged" in str(found.remarks)
    found = check(lambda x: x.argmax(-1), lambda x: x.max(-1)[1], one, sizes="odd", budget_s=1e4)
    assert found.passed
    assert "no gradients were compared" in repr(found)


@pytest.mark.gpu
def test_on_a_gpu_what_is_right_passes():
    inputs = lambda size: torch.randn(size, device="cuda")  # noqa: E731
    found = check(exponentials, softmax, inputs, sizes="small,realistic", budget_s=ENOUGH_S)
    assert found.passed, found.faults


@pytest.mark.gpu
def test_work_in_another_stream_is_found():
    busy, stream = torch.rand(4096, 4096, device="cuda"), torch.cuda.Stream()

    def elsewhere(x):
        out = torch.zeros_like(x)
        with torch.cuda.stream(stream):
            for _ in range(20):
                busy @ busy
            out.copy_(softmax(x.detach()))
        return out

    inputs = lambda size: torch.randn(size, device="cuda")  # noqa: E731
    assert not check(elsewhere, softmax, inputs, sizes="small", gradients=False).passed


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
    ("candidate", "message"), [("kernels.py:", "must name a function"),
    ("nowhere.py:f", "no file"), ("{}:rihgt", "Did you mean 'right'")],
)  # fmt: skip
def test_what_can_not_be_found_is_said(kernels, candidate, message):
    with pytest.raises(SpeedKitError, match=message):
        check(candidate.format(kernels), lambda x: x, lambda: None)


def run(kernels, candidate, reference="reference"):
    words = [f"{kernels.parent}/{candidate}", f"{kernels}:{reference}", "--sizes", "small"]
    command = [sys.executable, "-m", "speedkit_jupyter.check", *words, "--json", "--budget", "0.5"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("candidate", "reference", "status", "verdict"),
    [
        ("patching.py:right", "reference", 0, "right"),
        ("patching.py:infinite", "reference", 1, "wrong"),
        ("kernels.py:nothing", "nothing", 3, "not checked"),
    ],
)
def test_the_verdict_is_the_status_and_in_json(kernels, candidate, reference, status, verdict):
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
