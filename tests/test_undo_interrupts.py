"""A real SIGINT at every line of ours on the way out of a plan leaves nothing of it behind."""

from __future__ import annotations

import gc
import signal
import sys

import pytest
import torch
from torch import nn

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, interrupts
from speedkit_jupyter.context import in_force, prepare

OURS = ("context.py", "interrupts.py", "registry.py", "properties.py", "layout.py")


class Interrupts:
    """Sends `burst` signals, `gap` events apart, from the given event of our files on."""

    def __init__(self, at: int, burst: int, gap: int) -> None:
        self.at, self.burst, self.gap = at, burst, gap
        self.events = self.sent = 0

    def __call__(self, frame, event, argument):
        """What sys.settrace calls."""
        if frame.f_code.co_filename.rsplit("/", 1)[-1] not in OURS:
            return None
        self.events += 1
        due = self.events >= self.at and (self.events - self.at) % self.gap == 0
        if due and self.sent < self.burst:
            self.sent += 1
            signal.raise_signal(signal.SIGINT)
        return self


@pytest.fixture
def machine(monkeypatch):
    """Detected once; the search for optimizers need not look through all of torch each time.

    Nor is there anything to wait for after each of hundreds of bursts: they have ended.
    """
    monkeypatch.setattr(interrupts, "QUIET_S", 0.002)
    found = Hardware.detect()
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: found))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def leave_with(model, sender):
    with apply_speedups(model, SpeedConfig(sdpa="math", channels_last=True).alone())[1]:
        sys.settrace(sender)


def leave_prepared(model, sender):
    context = prepare(model, SpeedConfig(sdpa="math", channels_last=True).alone())
    with context.in_force():
        sys.settrace(sender)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("burst", "gap"), [(1, 1), (2, 1), (2, 5)])
@pytest.mark.parametrize("leave", [leave_with, leave_prepared])
def test_wherever_it_comes_the_plan_is_taken_back(machine, leave, burst, gap):
    model = nn.Conv2d(2, 2, 2)
    stride = model.weight.stride()
    counted = Interrupts(0, 0, 1)
    leave(model, counted)
    sys.settrace(None)
    for at in range(1, counted.events + 1):
        try:
            leave(model, Interrupts(at, burst, gap))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert torch.backends.cuda.flash_sdp_enabled(), at
        assert model.weight.stride() == stride, at
        assert in_force(model) is None, at
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
