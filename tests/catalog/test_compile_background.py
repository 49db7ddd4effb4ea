"""Test `compile` with `background`: another process compiles while the model runs as before."""

import contextlib
import signal
import subprocess
import time

import psutil
import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups
from speedkit_jupyter.catalog.model_changes import background_compile
from speedkit_jupyter.catalog.model_changes.compiled import TAKEN_OVER, WAITING
from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.machines.hardware import cxx_compiler

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("nothing_compiled")]
CONFIG = SpeedConfig(compile={"enabled": True, "background": True}).alone()
CXX = pytest.mark.skipif(not cxx_compiler(), reason="a C++ compiler")
MOST_S = 120.0
ASLEEP = "import time; time.sleep(600)"


def net(device="cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)).to(device)


def trained(model, context, x, until: str) -> list[float]:
    """Train until the plan's reason contains `until`; return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    end_s = time.monotonic() + MOST_S
    while not losses or until not in context.plan["compile"].reason:
        assert time.monotonic() < end_s, context.plan["compile"].reason
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(0.01)
    return losses


def check_that_it_takes_over(device: str) -> None:
    model, plain, x = net(device), net(device), torch.ones(4, 8, device=device)
    _, context = apply_speedups(model, CONFIG)
    assert WAITING not in context.plan["compile"].reason
    losses = trained(model, context, x, WAITING)
    assert len(losses) == 1
    losses += trained(model, context, x, TAKEN_OVER)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    for loss in losses:
        expected = plain(x).square().mean()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(expected.item(), rel=1e-3)
    context.restore()


@CXX
@pytest.mark.slow
def test_the_model_trains_on_and_the_compiled_code_takes_over_between_two_steps():
    check_that_it_takes_over("cpu")


@pytest.mark.gpu
def test_the_compiled_code_takes_over_on_a_gpu():
    check_that_it_takes_over("cuda")


def test_where_the_other_process_fails_its_last_line_is_the_reason(monkeypatch):
    fails = "print('x'); raise SystemExit('no memory is left')"
    monkeypatch.setattr(background_compile, "PROGRAM", fails)
    one = background_compile.SubprocessCompiler({})
    one.begin()
    assert one._process is not None
    one._process.wait(MOST_S)
    assert one.is_done()
    assert one.why_not == "no memory is left"


def test_what_cannot_be_sent_is_compiled_in_the_loop():
    one = background_compile.SubprocessCompiler({})
    assert one.trace(torch.fx.symbolic_trace(nn.Identity()), [object()])(3) == 3
    assert "object" in one.why_not
    assert one.is_done()


def sleeps(process: psutil.Process) -> bool:
    """Return whether a process runs the sleeping program of these tests."""
    with contextlib.suppress(psutil.Error):
        return ASLEEP in process.cmdline()
    return False


def test_the_process_ends_with_the_model(monkeypatch):
    one = background_compile.SubprocessCompiler({})
    monkeypatch.setattr(background_compile, "PROGRAM", ASLEEP)
    one.begin()
    process = one._process
    assert isinstance(process, subprocess.Popen)
    assert not one.is_done()
    del one
    assert process.wait(MOST_S) == -signal.SIGKILL


def test_the_process_ends_with_the_plan(monkeypatch):
    monkeypatch.setattr(background_compile, "PROGRAM", ASLEEP)
    model, x = net(), torch.ones(5, 8)
    expected, before = model(x), vars(model).keys()
    _, context = apply_speedups(model, CONFIG)
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    (process,) = filter(sleeps, psutil.Process().children())
    context.restore()
    assert not process.is_running()
    assert vars(model).keys() == before
    assert torch.equal(model(x), expected)


def test_graphs_that_a_process_has_compiled_need_no_other_process(monkeypatch, tmp_path):
    monkeypatch.setenv(compile_cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(background_compile, "PROGRAM", "")
    for width, is_known in ((8, False), (8, True), (16, False)):
        one = background_compile.SubprocessCompiler({})
        one.trace(torch.fx.symbolic_trace(nn.Identity()), [torch.ones(4, width)])
        one.begin()
        assert (one._process is None) is is_known
        if one._process is not None:
            one._process.wait(MOST_S)
        assert one.is_done()
        assert not one.why_not
