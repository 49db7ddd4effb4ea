"""A real signal at lines of ours: a plan is in force as a whole, or not at all."""

from __future__ import annotations

import signal
import sys

import pytest
import torch
from torch import nn

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, restore_all
from speedkit_jupyter.plans import applying, context
from speedkit_jupyter.plans.applying import applied_to, prepare
from speedkit_jupyter.torchglue import interrupts

OURS = {one.__file__ for one in (applying, context, interrupts)}
CONFIG = {"sdpa": "math", "channels_last": True, "alone": True}


class Interrupt:
    """Sends Ctrl-C at the given event of our files."""

    def __init__(self, at: int) -> None:
        self.at, self.events = at, 0

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in OURS:
            return None
        self.events += 1
        if self.events == self.at:
            signal.raise_signal(signal.SIGINT)
        return self


@pytest.fixture
def detected(monkeypatch):
    found = Hardware.detect()
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: found))


def apply(model):
    apply_speedups(model, SpeedConfig.from_dict(CONFIG))


def apply_and_restore(model):
    apply_speedups(model, SpeedConfig.from_dict(CONFIG))[1].restore()


@interrupts.interruptible
def measure(model):
    with prepare(model, SpeedConfig.from_dict(CONFIG)).in_force():
        pass


def run(work, model, sender) -> bool:
    """Return whether the signal has ended it."""
    try:
        sys.settrace(sender)
        work(model)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("work", [apply, apply_and_restore, measure])
def test_wherever_it_comes_a_plan_is_whole_and_can_be_taken_back(detected, work, every):
    model = nn.Conv2d(2, 2, 2)
    before = model.weight.stride(), torch.backends.cuda.flash_sdp_enabled()

    def state():
        return model.weight.stride(), torch.backends.cuda.flash_sdp_enabled()

    counted = Interrupt(0)
    run(work, model, counted)
    assert counted.events > 100
    restore_all()
    for at in range(1, counted.events + 1, every):
        run(work, model, Interrupt(at))
        in_force = applied_to(model) is not None
        assert (state() == before) is not in_force, at
        restore_all()
        assert state() == before, at


def test_an_interrupt_while_it_is_applied_leaves_the_plan_of_before_in_force(monkeypatch):
    model = nn.Conv2d(2, 2, 2)
    _, first = apply_speedups(model, SpeedConfig.from_dict(CONFIG))

    def observed(target):
        signal.raise_signal(signal.SIGINT)
        return {}

    monkeypatch.setattr(context, "observed", observed)
    with pytest.raises(KeyboardInterrupt):
        apply_speedups(model, SpeedConfig(threads=1).alone())
    monkeypatch.undo()
    assert applied_to(model) is first
    assert first.active
    first.restore()
